"""Lossless verification of a step's drafts on the device, without a host sync.

The logits rows of a request are for consecutive positions: the token after the base token, after the first draft, and
so on. Both ops return [requests, 2 + max_drafts] int64: the number a >= 1 of tokens that a request emits (the base
token counts as accepted), then those a tokens, accepted drafts first; entries past them are unspecified, but valid ids.
A request without logits rows is padding: it accepts 1 and emits anything.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .sampling import sample_weighted


@dataclass(frozen=True, slots=True)
class VerifyLogits:
    """The logits rows of each request of a step; tensors on the ops' device.

    Args:
        cu_logits: [requests + 1] int32; request r has the logits rows [cu_logits[r], cu_logits[r + 1]): one after its
            base token, then one after each draft. Rows past the last request are padding.
        draft_ids: [logits] int64; the draft that follows logits row i; anything at a request's last one.
        max_drafts: The most drafts that any request has.
    """

    cu_logits: Tensor
    draft_ids: Tensor
    max_drafts: int


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """The distributions that drafts were sampled from; tensors on the ops' device.

    Args:
        probabilities: [distributions, vocab] floating point.
        index: [logits] int32; the distribution of the draft following logits row i; -1 for a draft that was not
            sampled, and if none follows.
    """

    probabilities: Tensor
    index: Tensor


@dataclass(frozen=True, slots=True)
class RatioUniforms:
    """Random numbers of ratio acceptance: [logits] float64 in [0, 1) each, independent of drafts and each other.

    A position is verified again if a draft before it was rejected; its numbers may then be the same.
    """

    accept: Tensor
    residual: Tensor


def accept_matching_ref(tokens: Tensor, rows: VerifyLogits) -> Tensor:
    """Torch reference for `accept_matching`."""
    if tokens.shape[0] == 0:
        nothing = tokens.new_zeros(len(rows.cu_logits) - 1, 2 + rows.max_drafts)
        nothing[:, :1] = 1
        return nothing
    windows = _Windows.of(rows, tokens.shape[0])
    num_kept = windows.count_leading(tokens == rows.draft_ids)
    return torch.cat((1 + num_kept[:, None], tokens[windows.logits]), dim=1)


def accept_by_ratio(
    tokens: Tensor, probabilities: Tensor, rows: VerifyLogits, sampling: DraftDistributions, uniforms: RatioUniforms
) -> Tensor:
    """Accept each sampled draft x ~ q with probability min(1, p(x) / q(x)), and any other draft if it matches.

    The first sampled draft of a request that is rejected is replaced by a token of the normalised residual max(p - q,
    0), or of p if rounding leaves none; a request whose drafts are all accepted, or whose rejected draft was not
    sampled, ends with the token sampled there. Without sampled drafts a request gets what `accept_matching` gives it. A
    token of p(x) = 0 is never accepted. Source: Leviathan et al. 2023, "Fast Inference from Transformers via
    Speculative Decoding", algorithm 1.

    Args:
        tokens: [logits] int64; sampled from `probabilities` at every logits row, with further random numbers.
        probabilities: [logits, vocab] float64, the p of every logits row; see `token_probabilities`.

    Returns:
        [requests, 2 + max_drafts] int64, see the module.
    """
    if tokens.shape[0] == 0 or sampling.probabilities.shape[0] == 0:
        return accept_matching_ref(tokens, rows)
    windows = _Windows.of(rows, tokens.shape[0])
    is_sampled, distribution = sampling.index >= 0, sampling.index.clamp_min(0).to(torch.int64)
    drafts = torch.where(is_sampled, rows.draft_ids, 0)
    p = probabilities.gather(1, drafts[:, None])[:, 0]
    q = sampling.probabilities[distribution, drafts].to(torch.float64)
    holds = torch.where(is_sampled, uniforms.accept * q < p, tokens == rows.draft_ids)
    num_kept = windows.count_leading(holds)
    last = windows.logits.gather(1, num_kept[:, None])[:, 0]  # [rows]: logits rows of the last emitted tokens
    wanted = probabilities[last]
    residual = (wanted - sampling.probabilities[distribution[last]]).clamp_min(0)  # not normalised
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, wanted)
    final = torch.where(is_sampled[last], sample_weighted(residual, uniforms.residual[last]), tokens[last])
    is_kept = torch.arange(1 + rows.max_drafts, device=tokens.device) < num_kept[:, None]
    emitted = torch.where(is_kept, rows.draft_ids[windows.logits], final[:, None])
    return torch.cat((1 + num_kept[:, None], emitted), dim=1)


@dataclass(frozen=True, slots=True)
class _Windows:
    """The logits rows of each request: [requests, 1 + max_drafts] int64; past a request's end arbitrary, in bounds."""

    logits: Tensor
    num_drafts: Tensor  # [rows]; -1 in a row without logits rows

    @classmethod
    def of(cls, rows: VerifyLogits, num_logits: int) -> "_Windows":
        columns = torch.arange(1 + rows.max_drafts, device=rows.cu_logits.device)
        starts = rows.cu_logits[:-1].to(torch.int64)
        num_drafts = rows.cu_logits[1:] - starts - 1
        return cls((starts[:, None] + columns).clamp_max(num_logits - 1), num_drafts)

    def count_leading(self, holds: Tensor) -> Tensor:
        """Count each request's drafts before the first that does not hold; `holds` [logits] bool; [rows] int64."""
        columns = torch.arange(self.logits.shape[1], device=holds.device)
        kept = holds[self.logits] & (columns < self.num_drafts[:, None])
        return kept.to(torch.int64).cumprod(dim=1).sum(dim=1)


_COLUMNS = 16
"""Tokens of a row up to which one compiled kernel serves any number of drafts."""


@triton.jit(
    do_not_specialize=["num_logits", "most"],
    do_not_specialize_on_alignment=["tokens", "draft_ids", "cu_logits", "outcome"],
)
def _accept_kernel(
    tokens, draft_ids, cu_logits, outcome, num_logits, most, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Accept a request's drafts; `most` tokens of a row have logits."""
    await_inputs(OVERLAPS)
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    start = tl.load(cu_logits + row)
    is_draft = column < tl.load(cu_logits + row + 1) - start - 1
    index = tl.minimum(start + column, num_logits - 1)
    token = tl.load(tokens + index)
    draft = tl.load(draft_ids + index, mask=is_draft, other=0)
    num_kept = tl.min(tl.where(is_draft & (token == draft), COLUMNS, column), axis=0)  # the last column is no draft
    outcome += row.to(tl.int64) * (1 + most)
    tl.store(outcome, 1 + num_kept.to(tl.int64))
    tl.store(outcome + 1 + column, token, mask=column < most)


def accept_matching(tokens: Tensor, rows: VerifyLogits) -> Tensor:
    """Accept the drafts that equal the tokens sampled at their positions; the first other one is replaced.

    This is rejection sampling for a draft x that is fixed before the position's token t ~ p is sampled: x is accepted
    with probability P(t = x) = p(x), and its replacement has the distribution of t given t != x, which is the
    normalised residual. Either way t itself is emitted, and t depends only on the text before it and the position's own
    random number, so the tokens are those of a run without drafts.

    Args:
        tokens: [logits] int64, contiguous; sampled, or the most probable one, at every logits row.

    Returns:
        [requests, 2 + max_drafts] int64, see the module.

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
