"""Causal convolution for decode steps: a base token and drafts per request; the window is advanced in place.

A request's window is in the slot in column 0; its last inputs may be in a separate buffer (`DraftInputs`). Before the
step the window begins at input `accepted` - 1, after it at the start of the slot:

    history = window, x;  y[j] = SiLU(sum over k of weight[k] * history[j + k] + bias);  stored = history[1:]

Grid: one program per request and tile of channels, and for each tile one that zeroes the outputs after the last
request. A program reads the window before it writes, and processes its tokens in order. Safe in CUDA graphs: no host
sync, one launch, and the grid depends only on the shapes of the arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_language import appended, only_if
from ...kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from ...kernels.overlap import await_then_release, overlapping
from ..batches import PAD_SLOT, DecodeBatch, DecodeView, check_decode_batch
from ..draft_inputs import DraftInputs, check_draft_inputs, kernel_draft_inputs
from .parts import ConvInputs, ConvWindows, check_conv, load_bias, load_taps, weigh_and_activate
from .reference import conv_verify_ref


@dataclass(frozen=True, slots=True)
class ConvVerifyTiling:
    """Tile sizes of the kernel; they do not affect the result.

    Args:
        channels: Number of channels per program, a power of two.
        num_warps: Number of warps per program.
    """

    channels: int
    num_warps: int


TILING = ConvVerifyTiling(channels=512, num_warps=2)
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "columns_stride"])
def _conv_verify_kernel(
    y, inputs, weight, bias, windows, drafts, rows, num_rows, num_tokens, columns_stride,
    CONV_DIM: tl.constexpr, D_CONV: tl.constexpr, CHANNELS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of one request for a tile of channels. Long because it has many arguments."""
    await_then_release(OVERLAPS)
    TILES: tl.constexpr = (CONV_DIM + CHANNELS - 1) // CHANNELS
    row = tl.program_id(0) // TILES
    is_row = row < num_rows
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    live = tl.load(rows.columns + row.to(tl.int64) * columns_stride, mask=is_row, other=_PAD)
    accepted = tl.load(rows.accepted + row, mask=is_row, other=1)

    channel = tl.program_id(0) % TILES * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < CONV_DIM
    if live == _PAD:
        for token in range(start, end):
            tl.store(y + tl.cast(token, tl.int64) * CONV_DIM + channel, tl.zeros_like(channel), mask=inside)
        return

    stored = windows.pool + live.to(tl.int64) * windows.slot_stride + channel
    if drafts is not None:
        tail = drafts.pool + tl.load(drafts.buffers + row).to(tl.int64) * drafts.ring_stride + channel
    window = ()
    for k in tl.static_range(D_CONV - 1):
        time = accepted - 1 + k
        if drafts is None:
            old = tl.load(stored + time * windows.time_stride, mask=inside, other=0.0)
        else:
            is_in_tail = time >= D_CONV - 1
            old = tl.load(stored + time * windows.time_stride, mask=only_if(~is_in_tail, inside), other=0.0)
            later = tail + (time - (D_CONV - 1)) * drafts.time_stride
            old = tl.where(is_in_tail, tl.load(later, mask=only_if(is_in_tail, inside), other=0.0), old)
        window = appended(window, old.to(tl.float32))
    taps = load_taps(weight, channel, CONV_DIM, D_CONV)
    offset = load_bias(bias, channel, CONV_DIM)
    tl.debug_barrier()  # all threads must read the window before any thread overwrites it
    if start < end:
        for k in tl.static_range(1, D_CONV - 1):
            tl.store(stored + (k - 1) * windows.time_stride, window[k], mask=inside)
    for token in range(start, end):
        at = tl.cast(token, tl.int64)
        x = tl.load(inputs.x + at * inputs.token_stride + channel, mask=inside, other=0.0).to(tl.float32)
        out = weigh_and_activate(appended(window, x), taps, offset, D_CONV)
        tl.store(y + at * CONV_DIM + channel, out, mask=inside)
        # Inputs from earlier steps were rounded to the pool's dtype, so round the inputs of this step too.
        kept = x.to(windows.pool.dtype.element_ty)
        time = D_CONV - 2 + token - start
        if drafts is None:
            tl.store(stored + time * windows.time_stride, kept, mask=only_if(time >= 0, inside))
        else:
            is_draft = token > start
            tl.store(stored + time * windows.time_stride, kept, mask=only_if((time >= 0) & ~is_draft, inside))
            tl.store(tail + (token - start - 1) * drafts.time_stride, kept, mask=only_if(is_draft, inside))
        window = appended(window, kept.to(tl.float32))[1:]


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    rows: DecodeBatch,
    tiling: ConvVerifyTiling = TILING,
    *,
    drafts: DraftInputs | None = None,
) -> Tensor:
    """Convolve the base token and drafts of each request, apply SiLU, and advance the window in place.

    The result is bit-identical to separate steps of one token each. For padding, outputs are zeros and nothing is
    written. Inputs in a window after those of the new tokens are unchanged.

    Args:
        x: [tokens, conv_dim]; any stride between tokens.
        weight: [conv_dim, d_conv]; the last column applies to the newest input.
        bias: [conv_dim].
        conv_pool: [slots, window, conv_dim], channels contiguous; window is at least d_conv - 2 + rows.max_len, or
            d_conv - 1 if `drafts` is given.
        drafts: Buffers for at least rows.max_len - 1 further inputs per window; None: slots hold whole windows.

    Returns:
        [tokens, conv_dim] in the dtype of `x`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `conv_verify_ref`, which runs for float64 inputs. CUDA-graph safe: no host sync, one launch, grid fixed
    at capture.
    """
    check_decode_batch(rows, x.device)
    _check_windows(x, weight, bias, conv_pool, rows, drafts)
    if not launches_kernel(x) or not is_computed_in_fp32(x, conv_pool):
        return conv_verify_ref(x, weight, bias, conv_pool, rows, drafts=drafts)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        _launch(y, x, weight, bias, conv_pool, rows, tiling, drafts)
    return y


def _check_windows(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, rows: DecodeBatch, drafts: DraftInputs | None
) -> None:
    of_row = weight.shape[-1] - 2 + rows.max_len
    if drafts is None:
        check_conv(x, weight, bias, conv_pool, of_row)
        return
    check_conv(x, weight, bias, conv_pool, weight.shape[-1] - 1)
    check_draft_inputs(drafts, conv_pool, rows.accepted.shape[0])
    if drafts.inputs.shape[1] < rows.max_len - 1:
        raise ValueError(
            f"need draft inputs [buffers, drafts, conv_dim] for at least {rows.max_len - 1} drafts, "
            f"found {tuple(drafts.inputs.shape)}"
        )


def _launch(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    rows: DecodeBatch,
    tiling: ConvVerifyTiling,
    drafts: DraftInputs | None,
) -> None:
    conv_dim, d_conv = weight.shape
    num_rows, channels = rows.accepted.shape[0], min(tiling.channels, triton.next_power_of_2(conv_dim))
    _conv_verify_kernel[((num_rows + 1) * triton.cdiv(conv_dim, channels),)](
        y=y,
        inputs=ConvInputs(x, x.stride(0)),
        weight=weight,
        bias=bias,
        windows=ConvWindows(conv_pool, *conv_pool.stride()[:2]),
        drafts=kernel_draft_inputs(drafts),
        rows=DecodeView(rows.cu_tokens, rows.columns, rows.accepted),
        num_rows=num_rows,
        num_tokens=x.shape[0],
        columns_stride=rows.columns.stride(0),
        CONV_DIM=conv_dim,
        D_CONV=d_conv,
        CHANNELS=channels,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
