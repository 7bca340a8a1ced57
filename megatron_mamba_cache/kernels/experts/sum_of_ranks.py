"""The sum of what several ranks' experts add to each token.

Layout: the parts of all ranks, one after another, each with as many rows as the ranks exchange. Grid: a program a token
and WIDTH of its outputs, which adds the ranks' rows in their order, in fp32: always the same sum. Graph safe: no host
sync, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from .reference_experts import sum_of_ranks_ref

__all__ = ["sum_of_ranks", "sum_of_ranks_ref"]

_SUM_WIDTH = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _sum_of_ranks_kernel(
    parts,
    addend,
    out,
    num_rows,
    HAS_ADDEND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < OUTPUTS
    total = tl.zeros([WIDTH], tl.float32)
    for rank in range(RANKS):
        row = rank * num_rows + token
        total += tl.load(parts + row * OUTPUTS + column, mask=inside, other=0).to(tl.float32)
    if HAS_ADDEND:
        total += tl.load(addend + token * OUTPUTS + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * OUTPUTS + column, total.to(out.dtype.element_ty), mask=inside)


def sum_of_ranks(parts: Tensor, num_tokens: int, addend: Tensor | None = None) -> Tensor:
    """Return the sum over ranks of the first rows of each part.

    Args:
        parts: [ranks, rows, outputs], contiguous.
        num_tokens: At most the number of rows.
        addend: [tokens, outputs], contiguous, added to the sum; None for none.

    Returns:
        [tokens, outputs] in the parts' dtype; summed in fp32.

    Reference: `sum_of_ranks_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(parts) or not is_computed_in_fp32(parts):
        return sum_of_ranks_ref(parts, num_tokens, addend)
    num_ranks, num_rows, outputs = parts.shape
    out = torch.empty(num_tokens, outputs, dtype=parts.dtype, device=parts.device)
    if out.numel() == 0:
        return out
    _sum_of_ranks_kernel[(num_tokens, triton.cdiv(outputs, _SUM_WIDTH))](
        parts=parts,
        addend=parts if addend is None else addend,
        out=out,
        num_rows=num_rows,
        HAS_ADDEND=addend is not None,
        OUTPUTS=outputs,
        RANKS=num_ranks,
        WIDTH=_SUM_WIDTH,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
