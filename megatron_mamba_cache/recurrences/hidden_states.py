"""Hidden states of the tokens before a step's tokens, which a multi-token prediction head reads.

The hidden state of the last token before a step is in the request's state slot, as a window of one input: a decode step
stores the hidden states of all its tokens there, and the next step reads that of the last accepted token. Prompts store
the hidden state of the last token of a request and those before block boundaries.

Prompt kernel: each program handles a tile of channels and has one of three roles:

    row     the first token of a request, and its final slot, which may be its initial slot
    chunk   the last token of a chunk
    tile    packed tokens except the first of each request

Decode kernel: one program per request and tile of channels. Both are safe in CUDA graphs: no host sync, one launch, and
the grid depends only on the shapes of the arguments.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.kernel_language import only_if
from ..kernels.kernel_launches import launches_kernel
from .batches import PAD_SLOT, DecodeBatch, PrefillBatch, check_decode_batch, check_prefill_batch
from .batches import PackedTokens as PaddedTokens
from .conv.parts import count_up_to
from .interface import StateGroup, StateTensor
from .slot_copies import load_slots, store_slots

HIDDEN = "hidden"
TOKENS, MAX_WIDTH = 16, 1024
_PAD = tl.constexpr(PAD_SLOT)


def hidden_state_group(hidden_size: int, dtype: torch.dtype, num_drafts: int) -> StateGroup:
    """Return the state group of a model whose head reads the hidden state of the last token.

    Args:
        num_drafts: Maximum number of drafts in a step, whose hidden states a live slot holds as well.
    """
    tensor = StateTensor(HIDDEN, (1, hidden_size), dtype, motion="window", num_draft_inputs=num_drafts)
    return StateGroup((), (tensor,), is_of_model=True)


class _Rows(NamedTuple):
    """The tensors of a `PrefillBatch` that the kernel reads."""

    cu_seqlens: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    cu_chunks: Tensor
    chunk_slots: Tensor


class _Windows(NamedTuple):
    """A pool [slots, window, hidden] as a kernel argument."""

    pool: Tensor
    slot_stride: int
    time_stride: int


@triton.jit
def _begin_row(y, x, x_stride, windows, rows, row, channel, inside, HIDDEN_SIZE: tl.constexpr):
    start = tl.load(rows.cu_seqlens + row)
    end = tl.load(rows.cu_seqlens + row + 1)
    initial = tl.load(rows.initial_slots + row).to(tl.int64)
    final = tl.load(rows.final_slots + row).to(tl.int64)
    before = windows.pool + initial * windows.slot_stride + channel
    state = tl.load(before, mask=only_if(initial != _PAD, inside), other=0.0)
    tl.store(y + start.to(tl.int64) * HIDDEN_SIZE + channel, state, mask=only_if(end > start, inside))
    last = tl.load(x + (end - 1).to(tl.int64) * x_stride + channel, mask=only_if(end > start, inside), other=0.0)
    tl.debug_barrier()  # all threads must read before any writes, as the final slot may be the initial one
    state = tl.where(end > start, last, state)
    tl.store(windows.pool + final * windows.slot_stride + channel, state, mask=only_if(final != _PAD, inside))


@triton.jit
def _end_chunk(x, x_stride, ends, rows, chunk, channel, inside):
    start = tl.load(rows.cu_chunks + chunk)
    end = tl.load(rows.cu_chunks + chunk + 1)
    slot = tl.load(rows.chunk_slots + chunk).to(tl.int64)
    if (slot != _PAD) & (end > start):
        last = tl.load(x + (end - 1).to(tl.int64) * x_stride + channel, mask=inside, other=0.0)
        tl.store(ends.pool + slot * ends.slot_stride + channel, last, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_tokens"])
def _prompts_kernel(
    y, x, x_stride, windows, ends, rows, num_rows, num_chunks, num_tokens,
    HIDDEN_SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (HIDDEN_SIZE + WIDTH - 1) // WIDTH
    part = tl.program_id(0) // TILES
    channel = tl.program_id(0) % TILES * WIDTH + tl.arange(0, WIDTH)
    inside = channel < HIDDEN_SIZE
    if part < num_rows:
        _begin_row(y, x, x_stride, windows, rows, part, channel, inside, HIDDEN_SIZE)
    elif part < num_rows + num_chunks:
        _end_chunk(x, x_stride, ends, rows, part - num_rows, channel, inside)
    else:
        token = (part - num_rows - num_chunks) * TOKENS + tl.arange(0, TOKENS)
        row = count_up_to(rows.cu_seqlens + 1, num_rows, token)
        is_past = row == num_rows
        is_later = (token > tl.load(rows.cu_seqlens + row)) & ~is_past
        token = token.to(tl.int64)[:, None]
        exists = (token < num_tokens) & inside[None, :]
        before = tl.load(x + (token - 1) * x_stride + channel[None, :], mask=is_later[:, None] & exists, other=0.0)
        tl.store(y + token * HIDDEN_SIZE + channel[None, :], before, mask=(is_later | is_past)[:, None] & exists)


def previous_in_prompts(x: Tensor, pool: Tensor, rows: PrefillBatch, ends: Tensor | None = None) -> Tensor:
    """Return the hidden state of the token before each prompt token; store those of last tokens in slots, in place.

    Args:
        x: [tokens, hidden] hidden states of the packed tokens, channels contiguous.
        pool: [slots, window, hidden] in the dtype of `x`; only the first entry of a window is used.
        ends: Pool that contains `rows.chunk_slots`, shaped like `pool` except for the number of slots and the length of
            windows; None: `pool`.

    Returns:
        [tokens, hidden]; zeros before the first token of a text and after the last request.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `previous_in_prompts_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    ends = pool if ends is None else ends
    _check(x, pool)
    _check(x, ends)
    check_prefill_batch(rows, x.device)
    if not launches_kernel(x):
        return previous_in_prompts_ref(x, pool, rows, ends)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows, num_chunks, num_tokens = rows.final_slots.shape[0], rows.chunk_slots.shape[0], x.shape[0]
    width = _width(x)
    num_parts = num_rows + num_chunks + triton.cdiv(num_tokens, TOKENS)
    if num_parts:
        _prompts_kernel[(num_parts * triton.cdiv(x.shape[1], width),)](
            y=y,
            x=x,
            x_stride=x.stride(0),
            windows=_Windows(pool, *pool.stride()[:2]),
            ends=_Windows(ends, *ends.stride()[:2]),
            rows=_Rows(*(getattr(rows, name) for name in _Rows._fields)),
            num_rows=num_rows,
            num_chunks=num_chunks,
            num_tokens=num_tokens,
            HIDDEN_SIZE=x.shape[1],
            WIDTH=width,
            TOKENS=TOKENS,
            enable_fp_fusion=True,
        )
    return y


def previous_in_prompts_ref(x: Tensor, pool: Tensor, rows: PrefillBatch, ends: Tensor) -> Tensor:
    """Torch reference for `previous_in_prompts`; all initial states are read before any state is written."""
    num_rows = rows.final_slots.shape[0]
    if not num_rows or not len(x):
        return torch.zeros_like(x)
    initial = load_slots(pool[:, 0], rows.initial_slots, pool.dtype)
    starts, row_ends = rows.cu_seqlens[:-1].to(torch.int64), rows.cu_seqlens[1:].to(torch.int64)
    tokens = torch.arange(len(x), device=x.device)
    owner = torch.searchsorted(row_ends, tokens, right=True).clamp_max(num_rows - 1)
    is_first = (tokens == starts[owner])[:, None]
    before = torch.where(is_first, initial[owner], x[(tokens - 1).clamp_min(0)])
    y = torch.where((tokens < row_ends[-1])[:, None], before, 0)
    last = torch.where((row_ends > starts)[:, None], x[(row_ends - 1).clamp_min(0)], initial)
    store_slots(pool[:, 0], rows.final_slots, last)
    chunk_ends = rows.cu_chunks[1:].to(torch.int64)
    slots = torch.where(chunk_ends > rows.cu_chunks[:-1], rows.chunk_slots, PAD_SLOT)
    store_slots(ends[:, 0], slots, x[(chunk_ends - 1).clamp_min(0)])
    return y


@triton.jit
def _decode_kernel(
    y, x, x_stride, windows, columns, columns_stride, cu_tokens, accepted,
    HIDDEN_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < HIDDEN_SIZE
    slot = tl.load(columns + row * columns_stride).to(tl.int64)
    if slot != _PAD:
        start = tl.load(cu_tokens + row)
        end = tl.load(cu_tokens + row + 1)
        window = windows.pool + slot * windows.slot_stride + channel
        state = tl.load(window + (tl.load(accepted + row) - 1) * windows.time_stride, mask=inside, other=0.0)
        tl.debug_barrier()  # all threads must read before any writes
        for token in range(start, end):
            tl.store(y + tl.cast(token, tl.int64) * HIDDEN_SIZE + channel, state, mask=inside)
            state = tl.load(x + tl.cast(token, tl.int64) * x_stride + channel, mask=inside, other=0.0)
            tl.store(window + (token - start) * windows.time_stride, state, mask=inside)


def previous_in_decode(x: Tensor, pool: Tensor, rows: DecodeBatch) -> Tensor:
    """Return the hidden state of the token before each token of a decode step; store those of its tokens, in place.

    Args:
        x: [tokens, hidden] hidden states of the packed tokens, channels contiguous.
        pool: [slots, window, hidden] in the dtype of `x`. The state before a request's first token is at index
            accepted - 1 of the window in its slot of column 0, where the states of all its tokens are stored.

    Returns:
        [tokens, hidden]; zeros for padding.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `previous_in_decode_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    _check(x, pool, rows.max_len)
    check_decode_batch(rows, x.device)
    if not launches_kernel(x):
        return previous_in_decode_ref(x, pool, rows)
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    num_rows, width = rows.accepted.shape[0], _width(x)
    if num_rows and x.numel():
        _decode_kernel[(num_rows, triton.cdiv(x.shape[1], width))](
            y=y,
            x=x,
            x_stride=x.stride(0),
            windows=_Windows(pool, *pool.stride()[:2]),
            columns=rows.columns,
            columns_stride=rows.columns.stride(0),
            cu_tokens=rows.cu_tokens,
            accepted=rows.accepted,
            HIDDEN_SIZE=x.shape[1],
            WIDTH=width,
            enable_fp_fusion=True,
        )
    return y


def previous_in_decode_ref(x: Tensor, pool: Tensor, rows: DecodeBatch) -> Tensor:
    """Torch reference for `previous_in_decode`."""
    if not len(x) or not len(rows.accepted):
        return torch.zeros_like(x)
    tokens, slots, max_len = PaddedTokens(rows), rows.columns[:, 0], rows.max_len
    inputs, windows = tokens.gather(x), load_slots(pool, slots, pool.dtype)
    kept = _last_of(windows, rows.accepted)
    y = tokens.scatter(torch.cat((kept[:, None], inputs[:, :-1]), dim=1), x)
    store_slots(pool[:, :max_len], slots, torch.where(tokens.inside[:, :, None], inputs, windows[:, :max_len]))
    return y


def last_hidden_states(pool: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
    """Return the hidden state of each decode request's last token, [requests, hidden]; zeros for padding.

    Args:
        pool: [slots, window, hidden].
        slots: [requests] int32 live slots.
        accepted: [requests] int32 number of tokens that each request accepted in the last step.
    """
    return _last_of(load_slots(pool, slots, pool.dtype), accepted)


def _last_of(windows: Tensor, accepted: Tensor) -> Tensor:
    index = (accepted.to(torch.int64) - 1).clamp(0, windows.shape[1] - 1)
    return windows.gather(1, index[:, None, None].expand(-1, 1, windows.shape[2]))[:, 0]


def _width(x: Tensor) -> int:
    return min(MAX_WIDTH, triton.next_power_of_2(max(x.shape[1], 1)))


def _check(x: Tensor, pool: Tensor, window_len: int = 1) -> None:
    """Raise a `ValueError` unless hidden states and pool match, and windows hold at least `window_len` of them."""
    if x.dim() != 2 or pool.dim() != 3 or pool.shape[2] != x.shape[1] or pool.shape[1] < window_len:
        raise ValueError(
            f"x must have shape [tokens, hidden] and pool [slots, at least {window_len}, hidden], found x "
            f"{tuple(x.shape)} and pool {tuple(pool.shape)}"
        )
    if pool.dtype != x.dtype or pool.device != x.device:
        raise ValueError(
            f"x and pool must have the same dtype and device, found {x.dtype} on {x.device} and {pool.dtype} on "
            f"{pool.device}"
        )
    if not x[:1].is_contiguous() or not pool[:1, :1].is_contiguous():
        raise ValueError(f"channels of x and pool must be contiguous, found strides {x.stride()} and {pool.stride()}")
