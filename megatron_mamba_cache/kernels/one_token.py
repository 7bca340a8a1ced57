"""Matrix-vector product of one token with a linear layer's weights, with a fused activation.

Reading the weights takes all the time. Layout: weights [outputs, inputs], inputs contiguous. Grid: a program for ROWS
outputs, with as many weights in flight at once as fit in registers. Weights do not depend on the previous kernel, so a
program loads the first of them before it waits for that kernel's results: on Hopper this overlaps with short kernels.
Accumulation is fp32. Graph safe: no host sync, no atomics.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .activations import Activation, activated_ref
from .kernel_launches import launches_kernel
from .overlap import await_written, let_next_begin, overlapping

_AT_ONCE = 8192
"""Weights of an output loaded at once."""
MOST_INPUTS = 4 * _AT_ONCE
"""Most inputs for an unrolled loop over the weights."""


@triton.jit
def _one_token_kernel(
    x, weight, out,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_next_begin(OVERLAPS)
    row, element = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = weight + tl.minimum(row, OUTPUTS - 1).to(tl.int64)[:, None] * INPUTS + element[None, :]
    inside = element < INPUTS
    weights = tl.load(pointers, mask=inside[None, :], other=0)
    if ACTIVATION == "gated_silu":
        pointers += OUTPUTS * INPUTS
        others = tl.load(pointers, mask=inside[None, :], other=0)
    await_written(OVERLAPS)
    given = tl.load(x + element, mask=inside, other=0).to(tl.float32)[None, :]
    products = weights.to(tl.float32) * given
    for begin in tl.static_range(WIDTH, INPUTS, WIDTH):
        inside = begin + element < INPUTS
        weights = tl.load(pointers + begin, mask=inside[None, :], other=0)
        given = tl.load(x + begin + element, mask=inside, other=0).to(tl.float32)[None, :]
        products += weights.to(tl.float32) * given
    total = tl.sum(products, axis=1)
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    if ACTIVATION == "gated_silu":
        total = total / (1 + tl.exp(-total)) * tl.sum(others.to(tl.float32) * given, axis=1)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


def can_multiply_one_token(x: Tensor, weight: Tensor, activation: Activation = "none") -> bool:
    """Return True if `multiply_one_token` is faster than a GEMM: for one 16-bit token on a GPU."""
    return (
        launches_kernel(x)
        and x.numel() == weight.shape[1] <= (_AT_ONCE if activation == "gated_silu" else MOST_INPUTS)
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def multiply_one_token(
    x: Tensor, weight: Tensor, activation: Activation = "none", dtype: torch.dtype | None = None
) -> Tensor:
    """Return activation(x @ weight.T) for one token; the weights must not be written by kernels that may still run.

    Args:
        x: [..., inputs], one token.
        weight: [outputs, inputs]; [2 * outputs, inputs] for `gated_silu`: gates first.
        activation: Computed in fp32, before the only rounding.
        dtype: Of the result; None: x's.

    Returns:
        [..., outputs].

    Raises:
        ValueError: If `can_multiply_one_token` is False of tensors that a kernel computes.

    Reference: `multiply_one_token_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(x):
        return multiply_one_token_ref(x, weight, activation, dtype)
    if not can_multiply_one_token(x, weight, activation):
        raise ValueError(
            f"need one contiguous token of at most {MOST_INPUTS} inputs in the weights' 16-bit dtype, found "
            f"{tuple(x.shape)} {x.dtype} and weights {tuple(weight.shape)} {weight.dtype}"
        )
    inputs = weight.shape[1]
    outputs = weight.shape[0] // (2 if activation == "gated_silu" else 1)
    rows = 2 if inputs <= _AT_ONCE and activation != "gated_silu" else 1  # a program's weights fit in its registers
    out = torch.empty(*x.shape[:-1], outputs, dtype=dtype or x.dtype, device=x.device)
    _one_token_kernel[(triton.cdiv(outputs, rows),)](
        x=x,
        weight=weight,
        out=out,
        INPUTS=inputs,
        OUTPUTS=outputs,
        ACTIVATION=activation,
        ROWS=rows,
        WIDTH=min(triton.next_power_of_2(inputs), _AT_ONCE),
        num_warps=4 if inputs <= _AT_ONCE else 8,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return out


def multiply_one_token_ref(
    x: Tensor, weight: Tensor, activation: Activation = "none", dtype: torch.dtype | None = None
) -> Tensor:
    """Torch twin of `multiply_one_token`, in fp32."""
    return activated_ref(F.linear(x.float(), weight.float()), activation).to(dtype or x.dtype)
