"""Causal convolution with SiLU for packed prefill requests; windows are read from and written to state slots.

    history = initial window, x;  y[j] = SiLU(sum over k of weight[k] * history[j + k] + bias)

The last d_conv - 1 inputs of a request are written to its final slot, and those of a chunk to the chunk's slot.

The final slot of a request may be its initial slot, so the program that reads the initial window also writes the final
window. Each program handles a tile of channels and has one of three roles:

    row     the first d_conv - 1 tokens of a request, which are the only ones to read the initial window, and all
            windows that include inputs from it
    chunk   the window at the end of a chunk, if it contains only inputs of this step
    tile    packed tokens, except the first d_conv - 1 of each request; slower if they belong to several requests

Safe in CUDA graphs: no host sync, one launch, and the grid depends only on the shapes of the arguments.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_language import appended
from ...kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from ...kernels.overlap import await_inputs, await_launcher, overlapping, release
from ..batches import PrefillBatch, check_prefill_batch
from .parts import (
    ConvInputs,
    ConvWindows,
    begin_row,
    check_conv,
    convolve_part,
    convolve_run,
    count_up_to,
    end_chunk,
    load_bias,
    load_taps,
    weigh_and_activate,
)
from .reference import causal_conv_ref


@dataclass(frozen=True, slots=True)
class ConvTiling:
    """Tile sizes of the convolution kernel; they do not affect the result.

    Args:
        tokens, channels: Numbers of tokens and channels per tile; powers of two.
        at_once: Number of tokens whose inputs are loaded together; must divide `tokens`.
        num_warps: Number of warps per program.
    """

    tokens: int
    channels: int
    at_once: int
    num_warps: int


TILING = ConvTiling(tokens=16, channels=512, at_once=8, num_warps=4)
_MAX_REGISTERS = 128  # registers per thread, so that four programs of four warps fit on a multiprocessor


class _Rows(NamedTuple):
    """The tensors of a `PrefillBatch` that the kernel reads."""

    cu_seqlens: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    cu_chunks: Tensor
    chunk_requests: Tensor
    chunk_slots: Tensor


@triton.jit
def _convolve_mixture(
    y, inputs, weight, bias, rows, num_rows, num_tokens, first_token, channel,
    CONV_DIM: tl.constexpr, D_CONV: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Convolve a tile whose tokens belong to several requests, except the first D_CONV - 1 of each; zero padding."""
    token = first_token + tl.arange(0, TOKENS)
    row = count_up_to(rows.cu_seqlens + 1, num_rows, token)
    is_past = row == num_rows
    # For padding tokens, this loads the end of the last request.
    in_row = token - tl.load(rows.cu_seqlens + row)
    is_mine = (in_row >= D_CONV - 1) & ~is_past
    token = token.to(tl.int64)[:, None]
    inside = (channel < CONV_DIM)[None, :]
    taps = load_taps(weight, channel, CONV_DIM, D_CONV)
    offset = load_bias(bias, channel, CONV_DIM)[None, :]

    history = ()
    rows_of_taps = ()
    for k in tl.static_range(D_CONV):
        at = inputs.x + (token - (D_CONV - 1 - k)) * inputs.token_stride + channel[None, :]
        x = tl.load(at, mask=is_mine[:, None] & (token < num_tokens) & inside, other=0.0)
        history = appended(history, x.to(tl.float32))
        rows_of_taps = appended(rows_of_taps, taps[k][None, :])
    out = weigh_and_activate(history, rows_of_taps, offset, D_CONV)
    out = tl.where(is_past[:, None], 0.0, out)
    tl.store(
        y + token * CONV_DIM + channel[None, :], out, mask=(is_mine | is_past)[:, None] & (token < num_tokens) & inside
    )


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_tokens"])
def _causal_conv_kernel(
    y, inputs, weight, bias, windows, ends, rows, num_rows, num_chunks, num_tokens,
    CONV_DIM: tl.constexpr, D_CONV: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, CHANNELS: tl.constexpr,
    READS_EARLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if READS_EARLY:
        release(OVERLAPS)
    else:
        await_inputs(OVERLAPS)
    TILES: tl.constexpr = (CONV_DIM + CHANNELS - 1) // CHANNELS
    if ends is None:
        ends = windows
    part = tl.program_id(0) // TILES
    channel = tl.program_id(0) % TILES * CHANNELS + tl.arange(0, CHANNELS)
    if part < num_rows:
        if D_CONV > 1:
            begin_row(y, inputs, weight, bias, windows, ends, rows, part, num_chunks, channel, CONV_DIM, D_CONV)
    elif part < num_rows + num_chunks:
        if D_CONV > 1:
            end_chunk(inputs, ends, rows, part - num_rows, channel, CONV_DIM, D_CONV - 1)
    else:
        first_token = (part - num_rows - num_chunks) * TOKENS
        row = count_up_to(rows.cu_seqlens + 1, num_rows, first_token)
        low = tl.load(rows.cu_seqlens + row)
        last = tl.load(rows.cu_seqlens + num_rows)
        high = tl.load(rows.cu_seqlens + row + 1, mask=row < num_rows, other=0)
        high = tl.where(row < num_rows, high, last)
        if (first_token - low >= D_CONV - 1) & (first_token + TOKENS <= high):
            convolve_run(y, inputs, weight, bias, first_token, channel, CONV_DIM, D_CONV, TOKENS, AT_ONCE)
        elif (first_token + TOKENS <= high) | (high == last):
            convolve_part(
                y, inputs, weight, bias, low, high, num_tokens, first_token, channel, CONV_DIM, D_CONV, TOKENS, AT_ONCE
            )
        else:
            for begin in range(first_token, first_token + TOKENS, 4):  # few per iteration; these tiles are rare
                _convolve_mixture(
                    y, inputs, weight, bias, rows, num_rows, num_tokens, begin, channel, CONV_DIM, D_CONV, 4
                )
    if READS_EARLY:
        await_launcher(OVERLAPS)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    rows: PrefillBatch,
    tiling: ConvTiling = TILING,
    *,
    ends: Tensor | None = None,
    after_cut: bool = False,
) -> Tensor:
    """Convolve packed requests causally and apply SiLU; read initial windows from the pool and store final ones.

    The last d_conv - 1 inputs of each request are written to its final slot, and those of each chunk to its chunk slot,
    in place. A token's result is bit-identical for any split into chunks and for any other requests in the batch.

    Args:
        x: [tokens, conv_dim]; any stride between tokens.
        weight: [conv_dim, d_conv]; the last column applies to the newest input.
        bias: [conv_dim].
        conv_pool: [slots, window, conv_dim], oldest input first, channels contiguous; only the first d_conv - 1 inputs
            of a window are used.
        ends: Pool that contains `rows.chunk_slots`, shaped like `conv_pool` except for the number of slots; None:
            `conv_pool`.
        after_cut: True if the previous launch is `cut_rows`; both kernels then run concurrently.

    Returns:
        [tokens, conv_dim] in the dtype of `x`; zeros after the last request.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `causal_conv_ref`, which runs for float64 inputs. CUDA-graph safe: no host sync, one launch, grid fixed
    at capture.
    """
    check_conv(x, weight, bias, conv_pool, weight.shape[1] - 1)
    if ends is not None:
        check_conv(x, weight, bias, ends, weight.shape[1] - 1)
    check_prefill_batch(rows, x.device)
    if not launches_kernel(x) or not is_computed_in_fp32(x, conv_pool):
        return causal_conv_ref(x, weight, bias, conv_pool, rows, ends)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[1] > 0:
        _launch(y, x, weight, bias, conv_pool, ends, rows, tiling, after_cut=after_cut)
    return y


def _launch(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    ends: Tensor | None,
    rows: PrefillBatch,
    tiling: ConvTiling,
    *,
    after_cut: bool,
) -> None:
    conv_dim, d_conv = weight.shape
    num_rows, num_chunks, num_tokens = rows.final_slots.shape[0], rows.chunk_slots.shape[0], x.shape[0]
    channels = min(tiling.channels, triton.next_power_of_2(conv_dim))
    num_parts = num_rows + num_chunks + triton.cdiv(num_tokens, tiling.tokens)
    if num_parts == 0:
        return
    _causal_conv_kernel[(num_parts * triton.cdiv(conv_dim, channels),)](
        y=y,
        inputs=ConvInputs(x, x.stride(0)),
        weight=weight,
        bias=bias,
        windows=ConvWindows(conv_pool, *conv_pool.stride()[:2]),
        ends=None if ends is None else ConvWindows(ends, *ends.stride()[:2]),
        rows=_Rows(*(getattr(rows, name) for name in _Rows._fields)),
        num_rows=num_rows,
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        CONV_DIM=conv_dim,
        D_CONV=d_conv,
        TOKENS=tiling.tokens,
        AT_ONCE=tiling.at_once,
        CHANNELS=channels,
        READS_EARLY=after_cut,
        num_warps=tiling.num_warps,
        maxnreg=_MAX_REGISTERS,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
