"""The gated SiLU, between the products of a feed-forward layer.

Layout: products [tokens, 2 * width], gates first, contiguous. Grid: (tokens, parts of a token's outputs). Torch takes
two launches, and as neither half is contiguous, each goes through them element by element. Graph safe: no host sync.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import activated_ref
from ..kernel_launches import is_computed_in_fp32, launches_kernel, wants_gradient
from ..overlap import await_inputs, overlapping

_WIDTH = 1024


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
    """Return silu(gates) * others, computed in fp32 and rounded once.

    Args:
        products: [..., 2 * outputs], gates first.

    Returns:
        [..., outputs] in the products' dtype.

    Raises:
        ValueError: If there is a gate without an output.

    Reference: `gated_silu_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if products.shape[-1] % 2:
        raise ValueError(f"need as many gates as outputs, found {products.shape[-1]} of both together")
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
        width = min(_WIDTH, triton.next_power_of_2(outputs))
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
    """Return silu(gates) * others; see `gated_silu`."""
    dtype = torch.promote_types(products.dtype, torch.float32)
    return activated_ref(products.to(dtype), "gated_silu").to(products.dtype)
