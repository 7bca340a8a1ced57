"""The product of one token with a linear layer's weights.

Reading the weights takes all the time. Layout: weights [outputs, inputs], inputs contiguous. Grid: a program ROWS
outputs, all of whose weights are in flight at once. Weights do not depend on the kernel before, so a program loads them
before it waits for that kernel's results: on Hopper they are on their way while short kernels run. Accumulation is
fp32. Graph safe: no host sync, no atomics.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_written, let_next_begin, overlapping

_ROWS = 2
MOST_INPUTS = 8192
"""Inputs that fit in a program's registers, for each of its outputs."""


@triton.jit
def _one_token_kernel(
    x,
    weight,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    row, element = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    places = weight + tl.minimum(row, OUTPUTS - 1).to(tl.int64)[:, None] * INPUTS + element[None, :]
    weights = tl.load(places, mask=(element < INPUTS)[None, :], other=0)
    await_written(OVERLAPS)
    given = tl.load(x + element, mask=element < INPUTS, other=0)
    total = tl.sum(weights.to(tl.float32) * given.to(tl.float32)[None, :], axis=1)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


def can_multiply_one_token(x: Tensor, weight: Tensor) -> bool:
    """Return whether `multiply_one_token` takes less time than a matrix product: for one token in 16 bits, on a GPU."""
    return (
        launches_kernel(x)
        and x.numel() == weight.shape[1] <= MOST_INPUTS
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def multiply_one_token(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T for one token; the weights must not be written by kernels that may still run.

    Args:
        x: [..., inputs], one token.
        weight: [outputs, inputs].

    Returns:
        [..., outputs] in x's dtype.

    Raises:
        ValueError: If `can_multiply_one_token` is False of tensors that a kernel computes.

    Reference: `multiply_one_token_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(x):
        return multiply_one_token_ref(x, weight)
    if not can_multiply_one_token(x, weight):
        raise ValueError(
            f"need one contiguous token of at most {MOST_INPUTS} inputs in the weights' 16-bit dtype, found "
            f"{tuple(x.shape)} {x.dtype} and weights {tuple(weight.shape)} {weight.dtype}"
        )
    outputs, inputs = weight.shape
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    _one_token_kernel[(triton.cdiv(outputs, _ROWS),)](
        x=x,
        weight=weight,
        out=out,
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=_ROWS,
        WIDTH=triton.next_power_of_2(inputs),
        num_warps=4,
        **overlapping(x.device),
    )
    return out


def multiply_one_token_ref(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, computed in fp32; see `multiply_one_token`."""
    return F.linear(x.float(), weight.float()).to(x.dtype)
