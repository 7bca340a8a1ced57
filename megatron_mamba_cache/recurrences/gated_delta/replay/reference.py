"""Torch reference for replayed states, one token at a time; it supports float64 and does not synchronize on a GPU."""

import torch
from torch import Tensor

from ....kernels.reference import compute_dtype
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.reference import advanced, append, fold_and_replay
from ...replay.ring import ReplayRing
from ...stochastic_rounding import cast_state_ref
from ..inputs import EPS, DeltaTokens, GateWeights, write_strengths


def delta_replay_ref(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    seed: int | None = None,
) -> Tensor:
    """Torch reference for `delta_replay`."""
    num_tokens, heads = tokens.v.shape[:2]
    y = tokens.v.new_zeros(num_tokens + 1, *tokens.v.shape[1:])  # the additional last token receives padding
    if rows.slots.shape[0] == 0 or num_tokens == 0:
        return y[:num_tokens]
    dtype = compute_dtype(tokens.v)
    is_row = rows.slots != PAD_SLOT
    states = fold_and_replay(pool, ring, rows, ring_len, dtype, seed)

    starts, ends = rows.cu_tokens[:-1].to(torch.int64), rows.cu_tokens[1:].to(torch.int64)
    for t in range(rows.max_tokens):
        exists = is_row & (starts + t < ends)
        token, position = (starts + t).clamp_max(num_tokens - 1), rows.computed + t
        q, k, v, b, a = (
            getattr(tokens, name).index_select(0, token).to(dtype if name != "b" else tokens.b.dtype)
            for name in ("q", "k", "v", "b", "a")
        )
        of_q, of_k = (torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) for x in (q, k))
        times = heads // k.shape[1]
        read, asked = (x.repeat_interleave(times, dim=1)[..., None] for x in (k * of_k, q * of_q / q.shape[-1] ** 0.5))
        decays = gates.log_decays(a, ring.steps.dtype)
        kept = torch.exp(decays)[:, :, None, None] * states
        strength = write_strengths(b).to(dtype)[..., None] * of_k.repeat_interleave(times, dim=1)
        at = (rows.buffers, position, exists)
        append(ring.x, strength * (v - (kept * read).sum(2)), *at)
        append(ring.B, tokens.k.index_select(0, token), *at)
        append(ring.steps, torch.stack([torch.ones_like(decays), decays], dim=1), *at)
        states = advanced(states, ring, rows.buffers, position, exists)
        out = (states * asked).sum(2)
        is_inexact = (exists & ((position + 1) % ring_len == 0))[:, None, None, None]
        inexact = cast_state_ref(states, pool.dtype, seed, position, after=1)
        states = torch.where(is_inexact, inexact.to(dtype), states)
        y.index_copy_(0, torch.where(exists, token, num_tokens), out.to(y.dtype))
    return y[:num_tokens]
