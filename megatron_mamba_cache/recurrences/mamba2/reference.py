"""Torch references for the SSD scan (Mamba-2, Dao & Gu 2024, arXiv 2405.21060) and for decode steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.reference import along_first_dim, compute_dtype
from ..batches import PAD_SLOT, DecodeBatch, PackedTokens, PrefillBatch
from ..quantized_states import QuantizedStates, store_quantized_ref
from ..slot_copies import load_slots, store_empty_requests, store_slots
from ..stochastic_rounding import ScanRoundingRef, cast_state_ref
from .inputs import SSMTokens, SSMWeights

_CHUNKS_AT_ONCE = 16
"""Number of chunks whose state-independent terms are computed together; limits the memory for scores."""


def ssd_scan_ref(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: PrefillBatch,
    chunk_size: int,
    quantized: QuantizedStates | None = None,
    seed: int | None = None,
) -> Tensor:
    """Torch reference for `ssd_scan`; uses the block decomposition of section 6.

    Chunks are padded to `chunk_size`, so the result for a chunk depends only on its tokens and initial state.
    """
    x = tokens.x
    num_tokens, num_chunks = x.shape[0], rows.chunk_requests.shape[0]
    store_empty_requests(ssm_pool, rows)
    y = x.new_zeros(num_tokens + 1, *x.shape[1:])  # the additional last row receives padding
    if num_tokens == 0 or num_chunks == 0:
        return y[:num_tokens]
    dtype = compute_dtype(x)
    packed = (x, weights.time_steps(tokens.dt, dtype), tokens.B, tokens.C)
    decay, skip = weights.decay(dtype), weights.D.to(dtype)
    chunks = _chunk_slots(rows)
    rounding = ScanRoundingRef.of(rows, ssm_pool, seed, rows.chunk_requests, chunks.ends)
    state = x.new_zeros(ssm_pool.shape[1:], dtype=dtype)
    for first in range(0, num_chunks, _CHUNKS_AT_ONCE):
        group = slice(first, first + _CHUNKS_AT_ONCE)
        positions = chunks.starts[group, None] + torch.arange(chunk_size, device=x.device)
        inside = positions < chunks.ends[group, None]
        gathered = positions.clamp_max(num_tokens - 1)
        initial = load_slots(ssm_pool, chunks.initial_slots[group], dtype)
        x_chunks, dt, B, C = (_gather_tokens(t, gathered, inside, dtype) for t in packed)
        scan = _scan_chunks(x_chunks, dt, B, C, decay, skip)
        outputs, ends = scan.carry(state, initial, chunks.is_first, first, rounding)
        state = ends[-1]
        y.index_copy_(0, torch.where(inside, positions, num_tokens).flatten(), outputs.flatten(0, 1).to(x.dtype))
        _store_ends(ssm_pool, chunks.stored_slots[group], rounding.stored(ends, group), ends, quantized)
    return y[:num_tokens]


def state_verify_ref(
    tokens: SSMTokens, weights: SSMWeights, ssm_pool: Tensor, rows: DecodeBatch, seed: int | None = None
) -> Tensor:
    """Torch reference for `state_verify`; rounds to the pool's dtype after each token."""
    dtype, heads = compute_dtype(tokens.x), tokens.x.shape[1]
    A, D = weights.decay(dtype), weights.D.to(dtype)
    packed = PackedTokens(rows)
    x, dt, B, C = (packed.gather(t).to(dtype) for t in (tokens.x, tokens.dt, tokens.B, tokens.C))
    dt = weights.time_steps(dt, dtype)  # x, dt, B and C are [requests, max_len, ...]
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))  # consecutive heads share a group
    decays, scaled = torch.exp(dt * A), dt[:, :, :, None] * x
    source = rows.columns.gather(1, (rows.accepted - 1).to(torch.int64)[:, None])[:, 0]
    states = load_slots(ssm_pool, source, dtype)  # [requests, heads, d_state, head_dim]
    outputs, kept = [], []
    for j in range(rows.max_len):
        states = decays[:, j, :, None, None] * states + B[:, j, :, :, None] * scaled[:, j, :, None, :]
        outputs.append((states * C[:, j, :, :, None]).sum(2))
        kept.append(cast_state_ref(states, ssm_pool.dtype, seed, rows.computed, after=j + 1))
        states = kept[-1].to(dtype)
    slots = torch.where(packed.inside, rows.columns[:, : rows.max_len], PAD_SLOT)
    store_slots(ssm_pool, slots.flatten(), torch.stack(kept, dim=1).flatten(0, 1))
    return packed.scatter(torch.stack(outputs, dim=1) + D[:, None] * x, tokens.x)


@dataclass(frozen=True, slots=True)
class _ChunkSlots:
    starts: Tensor  # [chunks] int64
    ends: Tensor  # [chunks] int64
    is_first: Tensor  # [chunks] bool: True for the first chunk of a request
    initial_slots: Tensor  # [chunks]: slot of the request's initial state
    stored_slots: Tensor  # [chunks, 2]: slots for the state at the chunk's end: boundary slot, then final slot


def _chunk_slots(rows: PrefillBatch) -> _ChunkSlots:
    starts, ends = rows.cu_chunks[:-1].to(torch.int64), rows.cu_chunks[1:].to(torch.int64)
    owner = rows.chunk_requests.to(torch.int64)
    is_first = starts == rows.cu_seqlens.index_select(0, owner)
    is_last = ends == rows.cu_seqlens.index_select(0, owner + 1)
    boundary_slots = torch.where(ends > starts, rows.chunk_slots, PAD_SLOT)
    final_slots = torch.where(is_last, rows.final_slots.index_select(0, owner), PAD_SLOT)
    stored_slots = torch.stack([boundary_slots, final_slots], dim=1)
    return _ChunkSlots(starts, ends, is_first, rows.initial_slots.index_select(0, owner), stored_slots)


def _gather_tokens(packed: Tensor, positions: Tensor, inside: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather the tokens of chunks, [chunks, chunk_size, ...], in `dtype`; padding is zero."""
    tokens = packed.index_select(0, positions.flatten())
    return torch.where(along_first_dim(inside.flatten(), tokens), tokens, 0).to(dtype).unflatten(0, positions.shape)


def _store_ends(
    ssm_pool: Tensor, slots: Tensor, states: Tensor, exact: Tensor, quantized: QuantizedStates | None
) -> None:
    """Write the states at chunk ends [chunks, ...] to their boundary and final slots [chunks, 2].

    Args:
        exact: The states before they are cast to the pool's dtype, from which they are quantized.
    """
    if quantized is None:
        store_slots(ssm_pool, slots.flatten(), states.repeat_interleave(2, dim=0))
    else:
        store_quantized_ref(quantized, slots[:, 0], exact)
        store_slots(ssm_pool, slots[:, 1], states)


@dataclass(frozen=True, slots=True)
class _ChunkScan:
    """Terms of a scan that do not depend on the state, per chunk; heads or groups come before tokens.

    Matmuls run on one chunk at a time, in new tensors, because rounding on CPUs depends on batch size and alignment.
    """

    B: Tensor  # [chunks, groups, chunk_size, d_state]
    C: Tensor  # [chunks, groups, chunk_size, d_state]
    decay: Tensor  # [chunks, heads, target, source]: decay between two tokens
    scaled: Tensor  # [chunks, heads, chunk_size, head_dim]: x times the time steps
    reach: Tensor  # [chunks, heads, chunk_size, 1]: decay of the initial state up to each token
    left: Tensor  # [chunks, heads, chunk_size, 1]: decay from each token to the end of the chunk
    kept: Tensor  # [chunks, heads, 1, 1]: decay of the initial state over the whole chunk
    skipped: Tensor  # [chunks, heads, chunk_size, head_dim]: skip connection D * x

    def carry(
        self, state: Tensor, initial: Tensor, is_first: Tensor, first: int, rounding: ScanRoundingRef
    ) -> tuple[Tensor, Tensor]:
        """Carry the state through the chunks; the first chunk of a request starts from `initial` [chunks, ...].

        Args:
            is_first: [all chunks] bool; those of this group begin at index `first`.

        Returns:
            The outputs [chunks, chunk_size, heads, head_dim], and the states after each chunk.
        """
        within, reached, ends = [], [], []
        times = self.scaled.shape[1] // self.B.shape[1]
        for i in range(initial.shape[0]):
            state = torch.where(is_first[first + i], initial[i], state)
            B, C, scaled = self.B[i].clone(), self.C[i].clone(), self.scaled[i].clone()
            scores = (C @ B.transpose(1, 2)).repeat_interleave(times, dim=0)
            within.append((scores * self.decay[i]) @ scaled)
            reached.append(C.repeat_interleave(times, dim=0) @ state)
            weighted = B.repeat_interleave(times, dim=0) * self.left[i]
            state = rounding.within(self.kept[i] * state + weighted.transpose(1, 2) @ scaled, first + i)
            ends.append(state)
        outputs = torch.stack(within) + self.reach * torch.stack(reached) + self.skipped
        return outputs.transpose(1, 2), torch.stack(ends)


def _scan_chunks(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor) -> _ChunkScan:
    """Compute the state-independent terms; inputs are [chunks, chunk_size, heads or groups, ...]."""
    x, dt, B, C = (t.transpose(1, 2).contiguous() for t in (x, dt, B, C))
    # [chunks, heads, chunk_size]: log decay since the chunk's start, in fp64 because differences are taken below.
    cumulative = torch.cumsum(dt.double() * A.double()[:, None], dim=2)
    difference = cumulative[:, :, :, None] - cumulative[:, :, None, :]  # [chunks, heads, target, source]
    future = torch.ones(difference.shape[2:], dtype=torch.bool, device=x.device).triu(1)
    total = cumulative[:, :, -1:]
    return _ChunkScan(
        B=B,
        C=C,
        decay=torch.exp(difference.masked_fill(future, float("-inf")).to(dt.dtype)),
        scaled=dt[:, :, :, None] * x,
        reach=torch.exp(cumulative.to(dt.dtype))[:, :, :, None],
        left=torch.exp((total - cumulative).to(dt.dtype))[:, :, :, None],
        kept=torch.exp(total.to(dt.dtype))[:, :, :, None],
        skipped=D[:, None, None] * x,
    )
