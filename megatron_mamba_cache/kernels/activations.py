"""Activation functions applied between the two GEMMs of a feed-forward layer.

This package's GEMM kernels apply the activation themselves, before they round. The kernels below apply it to the result
of another library's GEMM. For `gated_silu`, torch would need two launches and would read the non-contiguous halves
without vectorized loads. Layout: contiguous; the input of `gated_silu` is [tokens, 2 * width], gates first. Safe in
CUDA graphs: no host sync.
"""

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .kernel_launches import is_computed_in_fp32, launches_kernel, wants_gradient
from .overlap import await_inputs, overlapping

Activation = Literal["none", "squared_relu", "gated_silu"]
"""Name of an activation; the input of `gated_silu` is twice as wide as its output: gates, then gated values."""


def activated_ref(products: Tensor, activation: Activation) -> Tensor:
    """Apply the activation to a GEMM's result; return [..., outputs]."""
    if activation == "squared_relu":
        return products.relu().square()
    if activation == "gated_silu":
        gates, others = products.chunk(2, dim=-1)
        return F.silu(gates) * others
    return products


_SILU_WIDTH = 1024


@triton.jit
def _gated_silu_kernel(products, out, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):
    await_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = element < OUTPUTS
    gates = tl.load(products + token * (2 * OUTPUTS) + element, mask=inside, other=0).to(tl.float32)
    others = tl.load(products + token * (2 * OUTPUTS) + OUTPUTS + element, mask=inside, other=0).to(tl.float32)
    activated = gates / (1 + tl.exp(-gates)) * others
    tl.store(out + token * OUTPUTS + element, activated.to(out.dtype.element_ty), mask=inside)


def gated_silu(products: Tensor) -> Tensor:
    """Return silu(gates) * values, computed in fp32 and rounded once.

    Args:
        products: [..., 2 * outputs]; gates, then values.

    Returns:
        [..., outputs] in the dtype of `products`.

    Raises:
        ValueError: If the last dimension is odd.

    Reference: `gated_silu_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if products.shape[-1] % 2:
        raise ValueError(
            f"the last dimension of products (gates, then values) must be even, found {products.shape[-1]}"
        )
    if (
        not launches_kernel(products)
        or not is_computed_in_fp32(products)
        or not products.is_contiguous()
        or wants_gradient(products)
    ):
        return gated_silu_ref(products)
    outputs = products.shape[-1] // 2
    out = torch.empty(*products.shape[:-1], outputs, dtype=products.dtype, device=products.device)
    if out.numel():
        width = min(_SILU_WIDTH, triton.next_power_of_2(outputs))
        grid = (out.numel() // outputs, triton.cdiv(outputs, width))
        _gated_silu_kernel[grid](
            products=products,
            out=out,
            OUTPUTS=outputs,
            WIDTH=width,
            num_warps=4,
            enable_fp_fusion=True,
            **overlapping(products.device),
        )
    return out


def gated_silu_ref(products: Tensor) -> Tensor:
    """Torch reference for `gated_silu`."""
    dtype = torch.promote_types(products.dtype, torch.float32)
    return activated_ref(products.to(dtype), "gated_silu").to(products.dtype)


_RELU_WIDTH = 2048


@triton.jit
def _squared_relu_kernel(x, out, count, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):
    await_inputs(OVERLAPS)
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + element, mask=element < count, other=0).to(tl.float32)
    value = tl.maximum(value, 0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + element, (value * value).to(out.dtype.element_ty), mask=element < count)


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 in x's dtype, computed in fp32.

    Reference: `squared_relu_ref`, which is bit-identical. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(x) or not is_computed_in_fp32(x) or not x.is_contiguous():
        return squared_relu_ref(x)
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _RELU_WIDTH),)
        _squared_relu_kernel[grid](
            x=x,
            out=out,
            count=x.numel(),
            WIDTH=_RELU_WIDTH,
            num_warps=4,
            enable_fp_fusion=True,
            **overlapping(x.device),
        )
    return out


def squared_relu_ref(x: Tensor) -> Tensor:
    """Torch reference for `squared_relu`; Megatron's function would recompile for each number of tokens."""
    return F.relu(x).square()
