"""Lossless verification of drafts on the device, without a host sync.

A request's rows of logits are for consecutive positions: after its base token, after its first draft, and so on. Both
ops return [requests, 2 + max_drafts] int64. Column 0 is the number a >= 1 of tokens that the request emits. The next a
columns are these tokens: first the accepted drafts, then one sampled token. Further columns hold arbitrary valid token
ids. A request without rows of logits is padding: its column 0 is 1, and its token is arbitrary.
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
    """Assignment of rows of logits to requests, and the drafts to verify; all tensors are on the same device.

    Args:
        cu_logits: [requests + 1] int32; request r has the rows cu_logits[r] to cu_logits[r + 1] - 1: one after its base
            token, then one after each draft. Rows after the last request are padding.
        draft_ids: [logits] int64; the draft that follows each row; arbitrary for a request's last row.
        max_drafts: Maximum number of drafts per request.
    """

    cu_logits: Tensor
    draft_ids: Tensor
    max_drafts: int


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """Distributions from which drafts were sampled; all tensors are on the same device.

    Args:
        probabilities: [distributions, vocab] floating point.
        index: [logits] int32; index of the distribution for the draft that follows each row of logits; -1 if that draft
            was not sampled, or there is no draft.
    """

    probabilities: Tensor
    index: Tensor


@dataclass(frozen=True, slots=True)
class RatioUniforms:
    """Random numbers for `accept_by_ratio`: [logits] float64 in [0, 1) each, independent of each other and of drafts.

    After a rejection, a later step verifies the following positions again; it may use the same random numbers.

    Args:
        accept: Compared with the acceptance probability of the draft that follows each row.
        residual: Used to sample the replacement of a rejected draft.
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
    """Accept drafts x sampled from q with probability min(1, p(x) / q(x)), and other drafts if they equal `tokens`.

    If the first rejected draft of a request was sampled, it is replaced by a sample from the normalized residual
    max(p - q, 0), or from p if rounding makes the residual 0. Otherwise the request ends with the entry of `tokens` at
    that position. If a request has no sampled drafts, the result equals that of `accept_matching`. A token with
    p(x) = 0 is never accepted. Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
    Decoding", algorithm 1.

    Args:
        tokens: [logits] int64; sampled from `probabilities` in each row, with other random numbers than `uniforms`.
        probabilities: [logits, vocab] float64; p in each row, see `token_probabilities`.

    Returns:
        [requests, 2 + max_drafts] int64, as described at the top of the module.
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
    last = windows.logits.gather(1, num_kept[:, None])[:, 0]  # [requests]: row of the last emitted token's logits
    wanted = probabilities[last]
    residual = (wanted - sampling.probabilities[distribution[last]]).clamp_min(0)  # not normalized
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, wanted)
    final = torch.where(is_sampled[last], sample_weighted(residual, uniforms.residual[last]), tokens[last])
    is_kept = torch.arange(1 + rows.max_drafts, device=tokens.device) < num_kept[:, None]
    emitted = torch.where(is_kept, rows.draft_ids[windows.logits], final[:, None])
    return torch.cat((1 + num_kept[:, None], emitted), dim=1)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Indices of each request's rows of logits, [requests, 1 + max_drafts] int64; arbitrary after its last row."""

    logits: Tensor
    num_drafts: Tensor  # [requests]; -1 for a request without rows of logits

    @classmethod
    def of(cls, rows: VerifyLogits, num_logits: int) -> "_Windows":
        columns = torch.arange(1 + rows.max_drafts, device=rows.cu_logits.device)
        starts = rows.cu_logits[:-1].to(torch.int64)
        num_drafts = rows.cu_logits[1:] - starts - 1
        return cls((starts[:, None] + columns).clamp_max(num_logits - 1), num_drafts)

    def count_leading(self, holds: Tensor) -> Tensor:
        """Count the drafts of each request before the first for which `holds` [logits] is False; [requests] int64."""
        columns = torch.arange(self.logits.shape[1], device=holds.device)
        kept = holds[self.logits] & (columns < self.num_drafts[:, None])
        return kept.to(torch.int64).cumprod(dim=1).sum(dim=1)


_COLUMNS = 16
"""Maximum number of tokens per request for which one compiled kernel supports any number of drafts."""


@triton.jit(
    do_not_specialize=["num_logits", "most"],
    do_not_specialize_on_alignment=["tokens", "draft_ids", "cu_logits", "outcome"],
)
def _accept_kernel(
    tokens, draft_ids, cu_logits, outcome, num_logits, most, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Accept the drafts of one request; `most` is the maximum number of tokens per request."""
    await_inputs(OVERLAPS)
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    start = tl.load(cu_logits + row)
    is_draft = column < tl.load(cu_logits + row + 1) - start - 1
    index = tl.minimum(start + column, num_logits - 1)
    token = tl.load(tokens + index)
    draft = tl.load(draft_ids + index, mask=is_draft, other=0)
    num_kept = tl.min(tl.where(is_draft & (token == draft), COLUMNS, column), axis=0)  # the last column holds no draft
    outcome += row.to(tl.int64) * (1 + most)
    tl.store(outcome, 1 + num_kept.to(tl.int64))
    tl.store(outcome + 1 + column, token, mask=column < most)


def accept_matching(tokens: Tensor, rows: VerifyLogits) -> Tensor:
    """Accept drafts while they equal the token sampled at their position; replace the first mismatch by that token.

    This is rejection sampling for a draft x that is fixed before the token t ~ p is sampled: x is accepted with
    probability P(t = x) = p(x), and its replacement has the distribution of t given t != x, which is the normalized
    residual. In each case t is emitted. It depends only on the preceding text and on the random number for its
    position, so the tokens equal those of a run without drafts.

    Args:
        tokens: [logits] int64, contiguous; the token sampled from each row, or the most probable token if greedy.

    Returns:
        [requests, 2 + max_drafts] int64, as described at the top of the module.

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
