"""Torch reference for replayed states, one token at a time; it supports float64 and does not synchronize on a GPU."""

import torch
from torch import Tensor

from ....kernels.reference import compute_dtype
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.reference import advanced, append, fold_and_replay
from ...replay.ring import ReplayRing
from ..inputs import SSMTokens, SSMWeights


def state_replay_ref(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    seed: int | None = None,
) -> Tensor:
    """Torch reference for `state_replay`."""
    num_tokens, heads = tokens.x.shape[:2]
    y = tokens.x.new_zeros(num_tokens + 1, *tokens.x.shape[1:])  # the additional last token receives padding
    if rows.slots.shape[0] == 0 or num_tokens == 0:
        return y[:num_tokens]
    dtype = compute_dtype(tokens.x)
    D = weights.D.to(dtype)
    is_row = rows.slots != PAD_SLOT
    states = fold_and_replay(ssm_pool, ring, rows, ring_len, dtype, seed)

    starts, ends = rows.cu_tokens[:-1].to(torch.int64), rows.cu_tokens[1:].to(torch.int64)
    each = torch.arange(rows.max_tokens, device=starts.device)
    exists = is_row[:, None] & (starts[:, None] + each < ends[:, None])  # [requests, max_tokens]
    token, position = (starts[:, None] + each).clamp_max(num_tokens - 1), rows.computed[:, None] + each
    at = (rows.buffers[:, None].expand_as(token).flatten(), position.flatten(), exists.flatten())
    dt = weights.time_steps(tokens.dt.index_select(0, token.flatten()), ring.steps.dtype)
    append(ring.x, tokens.x.index_select(0, token.flatten()), *at)
    append(ring.B, tokens.B.index_select(0, token.flatten()), *at)
    append(ring.steps, torch.stack([dt, dt * weights.decay(dt.dtype)], dim=1), *at)
    x, c = (packed.index_select(0, token.flatten()).to(dtype) for packed in (tokens.x, tokens.C))
    c = c.repeat_interleave(heads // c.shape[1], dim=1).unflatten(0, token.shape)
    outputs = []
    for t in range(rows.max_tokens):
        states = advanced(states, ring, rows.buffers, position[:, t], exists[:, t])
        outputs.append((states * c[:, t, :, :, None]).sum(2))
    padded = torch.stack(outputs, dim=1).flatten(0, 1) + D[:, None] * x
    y.index_copy_(0, torch.where(exists, token, num_tokens).flatten(), padded.to(y.dtype))
    return y[:num_tokens]
