"""Reference of the SSD scan over packed rows (Mamba-2, Dao & Gu 2024, arXiv 2405.21060) and of its few-token form."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode_rows import DecodeRows
from ..packed_tokens import PackedTokens
from ..prefill_rows import PAD_SLOT, PrefillRows
from ..slots.reference_rounding import store_rounded_ref
from ..slots.reference_slots import along_first_dim, compute_dtype, load_slots, store_slots
from ..slots.rounded_states import RoundedStates
from .ssm_inputs import SSMTokens, SSMWeights


def ssd_scan_ref(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: PrefillRows,
    chunk_size: int,
    rounded: RoundedStates | None = None,
) -> Tensor:
    """Scan packed rows chunk by chunk, carrying each row's state from and to the pool.

    Computes the recurrence of `ssm_inputs` by the block decomposition of section 6. Every chunk is padded to
    `chunk_size`, so its bits depend on its tokens and incoming state alone: a row resumed at a chunk's end, in any
    packing, continues bit-equal. Writes the states at chunk and row ends into `ssm_pool` in place.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim].
        chunk_size: The longest chunk in `rows`.
        rounded: Where states at chunk ends go; None: to slots of `ssm_pool`.

    Returns:
        [tokens, heads, head_dim] in x's dtype; zeros past the last chunk.
    """
    x = tokens.x
    num_tokens, num_chunks = x.shape[0], rows.chunk_rows.shape[0]
    _store_empty_rows(ssm_pool, rows)
    y = x.new_zeros(num_tokens + 1, *x.shape[1:])  # the last row takes what is past a chunk's end
    if num_tokens == 0 or num_chunks == 0:
        return y[:num_tokens]
    dtype = compute_dtype(x)
    packed = (x, weights.time_steps(tokens.dt, dtype), tokens.B, tokens.C)
    decay, skip = weights.decay(dtype), weights.D.to(dtype)
    chunks = _chunk_slots(rows)
    steps = torch.arange(chunk_size, device=x.device)
    state = x.new_zeros(ssm_pool.shape[1:], dtype=dtype)
    for i in range(num_chunks):
        positions = chunks.starts[i] + steps
        inside = positions < chunks.ends[i]
        gathered = positions.clamp_max(num_tokens - 1)
        x_chunk, dt, B, C = (_gather_tokens(t, gathered, inside, dtype) for t in packed)
        initial = load_slots(ssm_pool, chunks.initial_slots[i : i + 1], dtype)[0]
        state = torch.where(chunks.is_first[i], initial, state)
        y_chunk, state = _scan_chunk(x_chunk, dt, B, C, decay, skip, state)
        y.index_copy_(0, torch.where(inside, positions, num_tokens), y_chunk.to(x.dtype))
        if rounded is None:
            store_slots(ssm_pool, chunks.stored_slots[i], state.expand(2, *state.shape))
        else:
            store_rounded_ref(rounded.values, rounded.scales, chunks.stored_slots[i, :1], state[None])
            store_slots(ssm_pool, chunks.stored_slots[i, 1:], state[None])
    return y[:num_tokens]


def state_verify_ref(tokens: SSMTokens, weights: SSMWeights, ssm_pool: Tensor, rows: DecodeRows) -> Tensor:
    """Advance each row's state over its base token and drafts, keep the state after each in place; return the outputs.

    Bit-equal to as many steps of one token each: between tokens a state is rounded to the pool's dtype.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim].

    Returns:
        [tokens, heads, head_dim] in x's dtype; zeros past the last row.
    """
    dtype, heads = compute_dtype(tokens.x), tokens.x.shape[1]
    A, D = weights.decay(dtype), weights.D.to(dtype)
    packed = PackedTokens(rows)
    x, dt, B, C = (packed.gather(t).to(dtype) for t in (tokens.x, tokens.dt, tokens.B, tokens.C))
    dt = weights.time_steps(dt, dtype)  # all four are [rows, max_len, ...]
    source = rows.columns.gather(1, (rows.accepted - 1).to(torch.int64)[:, None])[:, 0]
    states = load_slots(ssm_pool, source, dtype)  # [rows, heads, d_state, head_dim]
    outputs = []
    for j in range(rows.max_len):
        token, step, has_token = x[:, j], dt[:, j], packed.inside[:, j]
        b, c = _expand_groups(B[:, j], heads), _expand_groups(C[:, j], heads)  # [rows, heads, d_state]
        increment = b[:, :, :, None] * (step[:, :, None] * token)[:, :, None, :]
        states = torch.exp(step * A)[:, :, None, None] * states + increment
        outputs.append((states * c[:, :, :, None]).sum(2) + D[:, None] * token)
        store_slots(ssm_pool, torch.where(has_token, rows.columns[:, j], PAD_SLOT), states)
        states = states.to(ssm_pool.dtype).to(dtype)
    return packed.scatter(torch.stack(outputs, dim=1), tokens.x)


@dataclass(frozen=True, slots=True)
class _ChunkSlots:
    starts: Tensor  # [chunks] int64
    ends: Tensor  # [chunks] int64
    is_first: Tensor  # [chunks] bool: the chunk opens its row
    initial_slots: Tensor  # [chunks]: its row's
    stored_slots: Tensor  # [chunks, 2]: where the state at its end goes, as a boundary and as the row's last


def _chunk_slots(rows: PrefillRows) -> _ChunkSlots:
    starts, ends = rows.cu_chunks[:-1].to(torch.int64), rows.cu_chunks[1:].to(torch.int64)
    owner = rows.chunk_rows.to(torch.int64)
    is_first = starts == rows.cu_rows.index_select(0, owner)
    is_last = ends == rows.cu_rows.index_select(0, owner + 1)
    boundary_slots = torch.where(ends > starts, rows.chunk_slots, PAD_SLOT)
    final_slots = torch.where(is_last, rows.final_slots.index_select(0, owner), PAD_SLOT)
    stored_slots = torch.stack([boundary_slots, final_slots], dim=1)
    return _ChunkSlots(starts, ends, is_first, rows.initial_slots.index_select(0, owner), stored_slots)


def _store_empty_rows(ssm_pool: Tensor, rows: PrefillRows) -> None:
    is_empty = rows.cu_rows[1:] == rows.cu_rows[:-1]
    states = load_slots(ssm_pool, rows.initial_slots, ssm_pool.dtype)
    store_slots(ssm_pool, torch.where(is_empty, rows.final_slots, PAD_SLOT), states)


def _gather_tokens(packed: Tensor, positions: Tensor, inside: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a chunk's tokens [chunk_size, ...] in `dtype`; zeros past the chunk's end, whatever is there."""
    tokens = packed.index_select(0, positions)
    return torch.where(along_first_dim(inside, tokens), tokens, 0).to(dtype)


def _scan_chunk(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs [chunk_size, heads, head_dim] and the state after it [heads, d_state, head_dim]."""
    heads = x.shape[1]
    x, dt, B, C = (t.transpose(0, 1).contiguous() for t in (x, dt, B, C))  # heads or groups first
    # [heads, chunk_size]: log decay since the chunk's start; in fp32, differences of long sums would lose digits.
    cumulative = torch.cumsum(dt.double() * A.double()[:, None], dim=1)
    difference = cumulative[:, :, None] - cumulative[:, None, :]  # [heads, target, source]
    future = torch.ones(difference.shape[1:], dtype=torch.bool, device=x.device).triu(1)
    decay = torch.exp(difference.masked_fill(future, float("-inf")).to(dt.dtype))
    scores = (C @ B.transpose(1, 2)).repeat_interleave(heads // B.shape[0], dim=0)
    B, C = (t.repeat_interleave(heads // t.shape[0], dim=0) for t in (B, C))
    scaled = dt[:, :, None] * x

    y = (scores * decay) @ scaled
    y = y + torch.exp(cumulative.to(dt.dtype))[:, :, None] * (C @ state)
    y = y + D[:, None, None] * x

    total = cumulative[:, -1:]
    weighted = B * torch.exp((total - cumulative).to(dt.dtype))[:, :, None]  # [heads, chunk_size, d_state]
    state = torch.exp(total.to(dt.dtype))[:, :, None] * state + weighted.transpose(1, 2) @ scaled
    return y.transpose(0, 1), state


def _expand_groups(per_group: Tensor, heads: int) -> Tensor:
    """Repeat [rows, groups, d_state] to [rows, heads, d_state]: consecutive heads share a group."""
    return per_group.repeat_interleave(heads // per_group.shape[1], dim=1)
