"""Which drafts of a step equal the tokens sampled at their positions, in one launch.

Layout: logits rows of a row are consecutive. Grid: a program a row. Graph safe: no host sync.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .verification import VerifyLogits, accept_matching_ref

__all__ = ["accept_matching", "accept_matching_ref"]

_COLUMNS = 16
"""Tokens of a row up to which one compiled kernel serves any number of drafts."""


@triton.jit(
    do_not_specialize=["num_logits", "most"],
    do_not_specialize_on_alignment=["tokens", "draft_ids", "cu_logits", "outcome"],
)
def _accept_kernel(
    tokens, draft_ids, cu_logits, outcome, num_logits, most, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Accept a row's drafts; `most` tokens of a row have logits."""
    await_inputs(OVERLAPS)
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    start = tl.load(cu_logits + row)
    is_draft = column < tl.load(cu_logits + row + 1) - start - 1
    place = tl.minimum(start + column, num_logits - 1)
    token = tl.load(tokens + place)
    draft = tl.load(draft_ids + place, mask=is_draft, other=0)
    num_kept = tl.min(tl.where(is_draft & (token == draft), COLUMNS, column), axis=0)  # the last column is no draft
    outcome += row.to(tl.int64) * (1 + most)
    tl.store(outcome, 1 + num_kept.to(tl.int64))
    tl.store(outcome + 1 + column, token, mask=column < most)


def accept_matching(tokens: Tensor, rows: VerifyLogits) -> Tensor:
    """Accept the drafts that equal the token sampled at their position; the first that does not is replaced by it.

    This is rejection sampling for drafts x that are fixed before the position's t ~ p is drawn: x is accepted with
    probability P(t = x) = p(x), which is min(1, p(x) / q(x)) for the point mass q at x, and what replaces it is t
    given t != x, whose law is the normalised residual max(p - q, 0). Either way t itself is emitted, and t depends
    only on the text before it and the position's own random number, so the tokens are those of a run without drafts.

    Args:
        tokens: [logits] int64, contiguous; sampled, or the most probable one, at every logits row.

    Returns:
        [rows, 2 + max_drafts] int64, see `verification`.

    Reference: `accept_matching_ref`. CUDA-graph safe: no host sync, one launch.
    """
    num_rows, most = len(rows.cu_logits) - 1, 1 + rows.max_drafts
    if not launches_kernel(tokens) or not len(tokens) or not num_rows:
        return accept_matching_ref(tokens, rows)
    outcome = tokens.new_empty(num_rows, 1 + most)
    _accept_kernel[(num_rows,)](
        tokens=tokens,
        draft_ids=rows.draft_ids,
        cu_logits=rows.cu_logits,
        outcome=outcome,
        num_logits=len(tokens),
        most=most,
        COLUMNS=max(_COLUMNS, triton.next_power_of_2(most)),
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(tokens.device),
    )
    return outcome
