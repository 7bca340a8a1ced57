"""Matrix-vector product for one token: a linear layer with a fused activation.

Reading the weights dominates the run time. Layout: weights [outputs, inputs], inputs contiguous. Grid: one
program per ROWS outputs; it keeps as many weight loads in flight as its registers can hold. Weights do not depend on
the previous kernel, so a program loads its first weights before it waits for that kernel; on Hopper these loads overlap
with the end of that kernel. Accumulation is in fp32. Safe in CUDA graphs: no host sync, no atomics.
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
"""Number of weights per output that one iteration loads."""
MOST_INPUTS = 4 * _AT_ONCE
"""Maximum number of inputs; the loop over them is unrolled."""


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
    """Return True if `multiply_one_token` supports the inputs: one token in a 16-bit dtype, on a GPU."""
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
    """Return activation(x @ weight.T) for one token.

    `weight` must not be written by a kernel that may still be running.

    Args:
        x: [..., inputs], one token.
        weight: [outputs, inputs]; for `gated_silu` [2 * outputs, inputs], gates first.
        activation: Applied in fp32; the result is rounded once.
        dtype: Dtype of the result; None: the dtype of `x`.

    Returns:
        [..., outputs].

    Raises:
        ValueError: If the kernel would be launched, but `can_multiply_one_token` is False.

    Reference: `multiply_one_token_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(x):
        return multiply_one_token_ref(x, weight, activation, dtype)
    if not can_multiply_one_token(x, weight, activation):
        raise ValueError(
            f"x and weight must be contiguous and have the same 16-bit dtype, and x must hold one token of at most "
            f"{MOST_INPUTS} inputs; found x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        )
    inputs = weight.shape[1]
    outputs = weight.shape[0] // (2 if activation == "gated_silu" else 1)
    rows = 2 if inputs <= _AT_ONCE and activation != "gated_silu" else 1  # as many as fit in a program's registers
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
    """Torch reference for `multiply_one_token`; computes in fp32."""
    return activated_ref(F.linear(x.float(), weight.float()), activation).to(dtype or x.dtype)
