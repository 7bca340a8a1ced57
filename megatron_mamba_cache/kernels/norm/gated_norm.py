"""Group RMS norm with or without a gate, in one pass.

RMSNorm(y * silu(z)) over groups of channels is the last norm of a Mamba2 mixer; RMSNorm(y) over all channels is the
first op of a layer.

Layout: tokens may be strided, channels are contiguous. Grid: a program holds one large group or several small groups in
registers; results do not depend on how many groups share a program. Arithmetic is in fp32. Safe in CUDA graphs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel, wants_gradient
from ..overlap import await_inputs, overlapping
from .reference_norm import gated_group_norm_ref

_TILE_LEN = 1024
"""Minimum number of elements per program; smaller groups share a program."""


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_group_norm_kernel(
    y, z, weight, out, num_tokens, y_stride, z_stride, eps, offset,
    CHANNELS: tl.constexpr, GROUP_SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, IS_GATED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    NUM_GROUPS: tl.constexpr = CHANNELS // GROUP_SIZE
    index = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)[:, None]  # group number over all tokens
    token = (index // NUM_GROUPS).to(tl.int64)
    element = tl.arange(0, WIDTH)[None, :]
    channel = index % NUM_GROUPS * GROUP_SIZE + element
    inside = (token < num_tokens) & (element < GROUP_SIZE)  # [GROUPS, WIDTH]
    values = tl.load(y + token * y_stride + channel, mask=inside, other=0).to(tl.float32)
    if IS_GATED:
        gate = tl.load(z + token * z_stride + channel, mask=inside, other=0).to(tl.float32)
        values *= gate / (1 + tl.exp(-gate))
    scale = tl.load(weight + channel, mask=inside, other=0).to(tl.float32) + offset
    mean = tl.sum(values * values, axis=1, keep_dims=True) / GROUP_SIZE
    normed = values * (1 / tl.sqrt(mean + eps)) * scale
    tl.store(out + token * CHANNELS + channel, normed.to(out.dtype.element_ty), mask=inside)


def gated_group_norm(
    y: Tensor, z: Tensor | None, weight: Tensor, group_size: int, eps: float, offset: float = 0.0
) -> Tensor:
    """Return RMSNorm(y * silu(z)), or RMSNorm(y) without `z`, over groups of channels, times (weight + offset).

    Results are bit-identical for any batch size. float64 inputs, and inputs that need a gradient, use the reference.

    Args:
        y, z: [tokens, channels]; channels contiguous.
        weight: [channels].
        group_size: Number of channels per group; must divide the number of channels.
        offset: Added to the weights in fp32; 1 for a zero-centered norm.

    Returns:
        [tokens, channels], contiguous, in y's dtype.

    Raises:
        ValueError: If shapes, strides or devices disagree.

    Reference: `gated_group_norm_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(y, z, weight, group_size)
    if not launches_kernel(y) or y.dtype == torch.float64 or wants_gradient(y, z, weight):
        return gated_group_norm_ref(y, z, weight, group_size, eps, offset)
    num_tokens, channels, width = *y.shape, triton.next_power_of_2(group_size)
    out = torch.empty(num_tokens, channels, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    groups = max(1, _TILE_LEN // width)
    _gated_group_norm_kernel[(triton.cdiv(num_tokens * (channels // group_size), groups),)](
        y=y,
        z=y if z is None else z,
        weight=weight,
        out=out,
        num_tokens=num_tokens,
        y_stride=y.stride(0),
        z_stride=(y if z is None else z).stride(0),
        eps=eps,
        offset=offset,
        CHANNELS=channels,
        GROUP_SIZE=group_size,
        WIDTH=width,
        GROUPS=groups,
        IS_GATED=z is not None,
        num_warps=max(4, min(16, width // 256)),
        enable_fp_fusion=True,
        **overlapping(y.device),
    )
    return out


def _check(y: Tensor, z: Tensor | None, weight: Tensor, group_size: int) -> None:
    z = y if z is None else z
    if y.dim() != 2 or y.shape != z.shape or weight.shape != y.shape[1:]:
        raise ValueError(
            "y and z (if given) must have shape [tokens, channels] and weight [channels]; "
            f"found y {tuple(y.shape)}, z {tuple(z.shape)}, weight {tuple(weight.shape)}"
        )
    if group_size < 1 or y.shape[1] % group_size:
        raise ValueError(f"group_size must divide the {y.shape[1]} channels, found {group_size}")
    if y.shape[1] > 1 and not y.stride(1) == z.stride(1) == weight.stride(0) == 1:
        strides = f"y {y.stride()}, z {z.stride()}, weight {weight.stride()}"
        raise ValueError(f"channels must be contiguous, found strides {strides}")
    if not y.device == z.device == weight.device:
        devices = f"y on {y.device}, z on {z.device}, weight on {weight.device}"
        raise ValueError(f"y, z and weight must be on the same device, found {devices}")
