"""The square of ReLU, between the products of a feed-forward layer.

Layout: any contiguous tensor. Grid: a program WIDTH elements. Torch's own takes two launches, and a decode step has
dozens of them. Graph safe: no host sync.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_inputs, overlapping

_WIDTH = 2048


@triton.jit
def _squared_relu_kernel(x, out, count, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):
    await_inputs(OVERLAPS)
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + element, mask=element < count, other=0).to(tl.float32)
    value = tl.maximum(value, 0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + element, (value * value).to(out.dtype.element_ty), mask=element < count)


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 in x's dtype, computed in fp32.

    Reference: `squared_relu_ref`, with the same bits. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(x) or not is_computed_in_fp32(x) or not x.is_contiguous():
        return squared_relu_ref(x)
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _WIDTH),)
        _squared_relu_kernel[grid](
            x=x,
            out=out,
            count=x.numel(),
            WIDTH=_WIDTH,
            num_warps=4,
            enable_fp_fusion=True,
            **overlapping(x.device),
        )
    return out


def squared_relu_ref(x: Tensor) -> Tensor:
    """Return the square of ReLU; Megatron's own is compiled again for each number of tokens."""
    return F.relu(x).square()
