"""Torch references for the gated delta rule, token by token, for prefill and for decode steps with drafts."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.reference import compute_dtype
from ..batches import PAD_SLOT, DecodeBatch, PackedTokens, PrefillBatch
from ..quantized_states import QuantizedStates, store_quantized_ref
from ..slot_copies import load_slots, store_empty_requests, store_slots
from ..stochastic_rounding import ScanRoundingRef, cast_state_ref
from .inputs import EPS, DeltaTokens, GateWeights, write_strengths

_TOKENS_AT_ONCE = 64
"""Number of tokens whose states are kept in memory before the states at boundaries are stored."""


def delta_scan_ref(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    rows: PrefillBatch,
    quantized: QuantizedStates | None = None,
    seed: int | None = None,
) -> Tensor:
    """Run the gated delta rule over packed requests, token by token; store states in place.

    The result for a request is bit-identical in any batch. States at chunk ends and request ends are stored.

    Args:
        pool: [slots, value heads, key_dim, value_dim].
        quantized: Storage for states at chunk ends, in `rows.chunk_slots`; None: these are slots of `pool`.

    Returns:
        [tokens, value heads, value_dim] in the dtype of `v`; zeros after the last chunk.
    """
    store_empty_requests(pool, rows)
    num_tokens, num_chunks = tokens.v.shape[0], rows.chunk_requests.shape[0]
    if num_tokens == 0 or num_chunks == 0:
        return torch.zeros_like(tokens.v, memory_format=torch.contiguous_format)
    dtype = compute_dtype(tokens.v)
    steps, positions = _Steps(tokens, gates, dtype), _token_slots(rows, num_tokens)
    rounding = ScanRoundingRef.of(rows, pool, seed, positions.requests, positions.ends)
    state = torch.zeros(pool.shape[1:], dtype=dtype, device=pool.device)
    outputs = []
    for first in range(0, num_tokens, _TOKENS_AT_ONCE):
        group = slice(first, first + _TOKENS_AT_ONCE)
        states = []
        for token, initial in enumerate(load_slots(pool, positions.initial_slots[group], dtype).unbind(), first):
            state, y = steps.advance(torch.where(positions.is_first[token], initial, state), token)
            state = rounding.within(state, token)
            states.append(state)
            outputs.append(y)
        ends = torch.stack(states)
        if quantized is None:
            store_slots(pool, positions.boundary_slots[group], rounding.stored(ends, group))
        else:
            store_quantized_ref(quantized, positions.boundary_slots[group], ends)
        store_slots(pool, positions.final_slots[group], rounding.stored(ends, group))
    return torch.where(positions.exists[:, None, None], torch.stack(outputs), 0).to(tokens.v.dtype)


def delta_verify_ref(
    tokens: DeltaTokens, gates: GateWeights, pool: Tensor, rows: DecodeBatch, seed: int | None = None
) -> Tensor:
    """Advance the state of each request over its base token and drafts; store the state after each token in place.

    The result is bit-identical to separate single-token steps: both use the pool's dtype between tokens.

    Args:
        pool: [slots, value heads, key_dim, value_dim].

    Returns:
        [tokens, value heads, value_dim] in the dtype of `v`; zeros after the last request.
    """
    dtype = compute_dtype(tokens.v)
    packed = PackedTokens(rows)
    padded = DeltaTokens(
        *(packed.gather(t).transpose(0, 1) for t in (tokens.q, tokens.k, tokens.v, tokens.b, tokens.a))
    )
    steps = _Steps(padded, gates, dtype)
    source = rows.columns.gather(1, (rows.accepted - 1).to(torch.int64)[:, None])[:, 0]
    states = load_slots(pool, source, dtype)  # [requests, value heads, key_dim, value_dim]
    outputs, kept = [], []
    for token in range(rows.max_len):
        states, y = steps.advance(states, token)
        outputs.append(y)
        kept.append(cast_state_ref(states, pool.dtype, seed, rows.computed, after=token + 1))
        states = kept[-1].to(dtype)
    slots = torch.where(packed.inside, rows.columns[:, : rows.max_len], PAD_SLOT)
    store_slots(pool, slots.flatten(), torch.stack(kept, dim=1).flatten(0, 1))
    return packed.scatter(torch.stack(outputs, dim=1), tokens.v)


class _TokenSlots(NamedTuple):
    """State slots for each packed token, [tokens]; PAD_SLOT if a token has no such slot.

    Args:
        exists: False after the last request.
        requests: Index of the token's request.
        ends: Packed position after the token.
        is_first: True for the first token of a request.
        initial_slots: Slot of the state before the token, if the token is the first of its request.
        boundary_slots: Slot for the state after the token, if the token is the last of its chunk.
        final_slots: Slot for the state after the token, if the token is the last of its request.
    """

    exists: Tensor
    requests: Tensor
    ends: Tensor
    is_first: Tensor
    initial_slots: Tensor
    boundary_slots: Tensor
    final_slots: Tensor


def _token_slots(rows: PrefillBatch, num_tokens: int) -> _TokenSlots:
    num_chunks = rows.chunk_requests.shape[0]
    positions = torch.arange(num_tokens, device=rows.cu_seqlens.device)
    chunk_ends, cu_seqlens = rows.cu_chunks[1:].to(torch.int64), rows.cu_seqlens.to(torch.int64)
    chunk = torch.searchsorted(chunk_ends, positions, right=True)
    exists = chunk < num_chunks
    chunk = chunk.clamp_max(num_chunks - 1)
    row = rows.chunk_requests.index_select(0, chunk).to(torch.int64)
    is_first = exists & (positions == cu_seqlens.index_select(0, row))
    is_last = exists & (positions + 1 == cu_seqlens.index_select(0, row + 1))
    is_end = exists & (positions + 1 == chunk_ends.index_select(0, chunk))
    return _TokenSlots(
        exists=exists,
        requests=row,
        ends=positions + 1,
        is_first=is_first,
        initial_slots=torch.where(is_first, rows.initial_slots.index_select(0, row), PAD_SLOT),
        boundary_slots=torch.where(is_end, rows.chunk_slots.index_select(0, chunk), PAD_SLOT),
        final_slots=torch.where(is_last, rows.final_slots.index_select(0, row), PAD_SLOT),
    )


class _Steps:
    """Inputs for each token's state update: normalized q and k, beta and decays; tokens are the first dimension."""

    def __init__(self, tokens: DeltaTokens, gates: GateWeights, dtype: torch.dtype) -> None:
        times = tokens.v.shape[-2] // tokens.q.shape[-2]
        q, k = (_normalized(t.to(dtype)).repeat_interleave(times, dim=-2) for t in (tokens.q, tokens.k))
        self._q = (q / q.shape[-1] ** 0.5)[..., None].unbind()
        self._k = k[..., None].unbind()
        self._v = tokens.v.to(dtype).unbind()
        self._beta = write_strengths(tokens.b).to(dtype)[..., None].unbind()
        self._decay = torch.exp(gates.log_decays(tokens.a, dtype))[..., None, None].unbind()

    def advance(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Apply one token; return the new state [..., value heads, key_dim, value_dim] and the token's output."""
        state = state * self._decay[token]
        correction = (self._v[token] - (state * self._k[token]).sum(-2)) * self._beta[token]
        state = state + self._k[token] * correction[..., None, :]
        return state, (state * self._q[token]).sum(-2)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
