"""Per-head RMS norm followed by a gate, in one pass: RMSNorm(y) * weight * silu(z), as in a Gated DeltaNet mixer.

All heads share one weight vector. Layout: tokens may be strided, channels are contiguous. Grid: a program holds several
heads, possibly from different tokens, in registers; results do not depend on how many heads share a program. Arithmetic
is in fp32, but the normalized values, and their products with the weights, are rounded to the dtype of `y`. Safe in
CUDA graphs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel, wants_gradient
from ..overlap import await_inputs, overlapping
from .reference_norm import norm_and_gate_ref

_TILE_LEN = 1024
"""Minimum number of elements per program; smaller heads share a program."""


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_and_gate_kernel(
    y, z, weight, out, num_tokens, y_stride, z_stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    index = tl.program_id(0) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]  # head number over all tokens
    token = (index // HEADS).to(tl.int64)
    element = tl.arange(0, WIDTH)[None, :]
    channel = index % HEADS * HEAD_DIM + element
    inside = (token < num_tokens) & (element < HEAD_DIM)  # [TILE_HEADS, WIDTH]
    values = tl.load(y + token * y_stride + channel, mask=inside, other=0).to(tl.float32)
    scale = tl.load(weight + element, mask=element < HEAD_DIM, other=0).to(tl.float32)
    mean = tl.sum(values * values, axis=1, keep_dims=True) / HEAD_DIM
    normed = (values * (1 / tl.sqrt(mean + eps))).to(out.dtype.element_ty).to(tl.float32)
    scaled = (normed * scale).to(out.dtype.element_ty).to(tl.float32)
    gate = tl.load(z + token * z_stride + channel, mask=inside, other=0).to(tl.float32)
    gated = scaled * (gate / (1 + tl.exp(-gate)))
    tl.store(out + token * (HEADS * HEAD_DIM) + channel, gated.to(out.dtype.element_ty), mask=inside)


def norm_and_gate(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each head of `y`, times `weight` and silu(z).

    Results are bit-identical for any batch size. float64 inputs, and inputs that need a gradient, use the reference.

    Args:
        y, z: [tokens, heads * head_dim]; channels contiguous.
        weight: [head_dim], shared by all heads.

    Returns:
        [tokens, heads * head_dim], contiguous, in y's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `norm_and_gate_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(y, z, weight)
    if not launches_kernel(y) or not is_computed_in_fp32(y) or wants_gradient(y, z, weight):
        return norm_and_gate_ref(y, z, weight, eps)
    num_tokens, channels = y.shape
    out = torch.empty(num_tokens, channels, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    head_dim = weight.shape[0]
    width = triton.next_power_of_2(head_dim)
    tile_heads = max(1, _TILE_LEN // width)
    _norm_and_gate_kernel[(triton.cdiv(num_tokens * (channels // head_dim), tile_heads),)](
        y=y,
        z=z,
        weight=weight,
        out=out,
        num_tokens=num_tokens,
        y_stride=y.stride(0),
        z_stride=z.stride(0),
        eps=eps,
        HEADS=channels // head_dim,
        HEAD_DIM=head_dim,
        WIDTH=width,
        TILE_HEADS=tile_heads,
        num_warps=max(4, min(16, width // 256)),
        enable_fp_fusion=True,
        **overlapping(y.device),
    )
    return out


def _check(y: Tensor, z: Tensor, weight: Tensor) -> None:
    if y.dim() != 2 or y.shape != z.shape or weight.dim() != 1 or not len(weight) or y.shape[1] % len(weight):
        raise ValueError(
            "y and z must have shape [tokens, heads * head_dim] and weight [head_dim]; "
            f"found y {tuple(y.shape)}, z {tuple(z.shape)}, weight {tuple(weight.shape)}"
        )
    if not y.dtype == z.dtype == weight.dtype:
        dtypes = f"y {y.dtype}, z {z.dtype}, weight {weight.dtype}"
        raise ValueError(f"y, z and weight must have the same dtype, found {dtypes}")
    if y.shape[1] > 1 and not (y.stride(1) == z.stride(1) == 1 and weight.is_contiguous()):
        strides = f"y {y.stride()}, z {z.stride()}, weight {weight.stride()}"
        raise ValueError(f"channels must be contiguous, found strides {strides}")
    if not y.device == z.device == weight.device:
        devices = f"y on {y.device}, z on {z.device}, weight on {weight.device}"
        raise ValueError(f"y, z and weight must be on the same device, found {devices}")
