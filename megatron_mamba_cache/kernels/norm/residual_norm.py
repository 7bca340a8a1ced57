"""Fused residual add and RMS norm between two layers.

Layout: contiguous tokens. Grid: one program per token, which holds its channels in registers. The sum is rounded before
it is normalized, so both results are bit-identical to separate passes. Arithmetic is in fp32. Safe in CUDA graphs: no
host sync.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_written, let_next_begin, overlapping
from .reference_norm import add_and_norm_ref


@triton.jit
def _add_and_norm_kernel(
    output, residual, weight, total, normed, multiplier, eps, offset,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_next_begin(OVERLAPS)
    channel = tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    index = tl.program_id(0).to(tl.int64) * CHANNELS + channel
    scale = tl.load(weight + channel, mask=inside, other=0).to(tl.float32) + offset
    await_written(OVERLAPS)
    added = tl.load(output + index, mask=inside, other=0).to(tl.float32)
    kept = tl.load(residual + index, mask=inside, other=0).to(tl.float32)
    cast = (added * multiplier).to(total.dtype.element_ty).to(tl.float32)
    cast = (kept + cast).to(total.dtype.element_ty)
    tl.store(total + index, cast, mask=inside)
    values = cast.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / CHANNELS
    tl.store(normed + index, (values * (1 / tl.sqrt(mean + eps)) * scale).to(normed.dtype.element_ty), mask=inside)


def add_and_norm(
    output: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum residual + multiplier * output, and its RMS norm times (weight + offset).

    Results are bit-identical for any batch size.

    Args:
        output, residual: [..., channels], contiguous.
        weight: [channels]; must not be written by a kernel that may still be running.
        offset: Added to the weights in fp32; 1 for a zero-centered norm.

    Returns:
        The sum and the norm, each [..., channels], contiguous, in the residual's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `add_and_norm_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(output, residual, weight)
    if not launches_kernel(residual) or not is_computed_in_fp32(residual):
        return add_and_norm_ref(output, residual, weight, eps, multiplier, offset)
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    channels = weight.shape[0]
    width = triton.next_power_of_2(channels)
    if residual.numel():
        _add_and_norm_kernel[(residual.numel() // channels,)](
            output=output,
            residual=residual,
            weight=weight,
            total=total,
            normed=normed,
            multiplier=multiplier,
            eps=eps,
            offset=offset,
            CHANNELS=channels,
            WIDTH=width,
            num_warps=max(4, min(16, width // 256)),
            enable_fp_fusion=True,
            **overlapping(residual.device),
        )
    return total, normed


def _check(output: Tensor, residual: Tensor, weight: Tensor) -> None:
    if output.shape != residual.shape or output.dtype != residual.dtype or weight.shape != residual.shape[-1:]:
        raise ValueError(
            "output and residual must have the same dtype and shape [..., channels], and weight [channels]; found "
            f"output {tuple(output.shape)} {output.dtype}, residual {tuple(residual.shape)} {residual.dtype}, weight "
            f"{tuple(weight.shape)}"
        )
    if not (output.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()):
        strides = f"output {output.stride()}, residual {residual.stride()}, weight {weight.stride()}"
        raise ValueError(f"output, residual and weight must be contiguous, found strides {strides}")
    if not output.device == residual.device == weight.device:
        devices = f"output on {output.device}, residual on {residual.device}, weight on {weight.device}"
        raise ValueError(f"output, residual and weight must be on the same device, found {devices}")
