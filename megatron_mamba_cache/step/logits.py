"""Which tokens of a step yield logits, and with which settings and random numbers each is sampled."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling.row_tiles import SamplingRows
from ..kernels.sampling.verification import VerifyLogits
from ..policy.logits_settings import PLAIN_LOGITS
from ..policy.random_counter import DrawPurpose, counter_uniform
from ..policy.request_settings import SamplingSettings
from ..policy.requests import RunningRequest
from .buffers import StepBuffers


class Draws(IntEnum):
    """How the tokens of a step are drawn; each way can draw what those before it draw, with the same tokens."""

    BEST = 0  # all rows greedy
    ALL_TOKENS = 1  # some are sampled, from all tokens
    KEPT_TOKENS = 2  # some are sampled from what top-k or top-p keeps

    @staticmethod
    def of(rows: Iterable[RunningRequest]) -> "Draws":
        """Return the first way that draws for all rows."""
        return max((_draws_of(row.spec.sampling) for row in rows), default=Draws.BEST)


def _draws_of(sampling: SamplingSettings) -> Draws:
    if sampling.is_greedy:
        return Draws.BEST
    return Draws.KEPT_TOKENS if sampling.top_k or 0 < sampling.top_p < 1 else Draws.ALL_TOKENS


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The tokens whose logits are wanted, each row's last and those that drafts follow, and how each is sampled.

    Device tensors, but for `starts`, `draws` and what any of the rows asks for.
    """

    tokens: Tensor  # [logits] int32 packed index
    starts: tuple[int, ...]  # [rows + 1]
    verify: VerifyLogits
    temperature: Tensor  # [logits] float32
    top_k: Tensor  # [logits] int32
    top_p: Tensor  # [logits] float32
    uniforms: Tensor  # [logits] float64 in [0, 1)
    accept_uniforms: Tensor  # [logits] float64, filled where drafts come with distributions
    residual_uniforms: Tensor  # likewise
    draws: Draws
    any_changed: bool  # whether a row changes its logits first, other than by barring tokens as its grammar says
    any_scored: bool  # whether a row wants log-probs

    def clone(self) -> "StepLogits":
        """Return a copy that later steps do not overwrite."""
        cu_logits, draft_ids = self.verify.cu_logits.clone(), self.verify.draft_ids.clone()
        return replace(
            self,
            tokens=self.tokens.clone(),
            verify=replace(self.verify, cu_logits=cu_logits, draft_ids=draft_ids),
            temperature=self.temperature.clone(),
            top_k=self.top_k.clone(),
            top_p=self.top_p.clone(),
            uniforms=self.uniforms.clone(),
            accept_uniforms=self.accept_uniforms.clone(),
            residual_uniforms=self.residual_uniforms.clone(),
        )

    def sampling(self, logits: Tensor) -> SamplingRows:
        """Return the first n logits, [n, vocab], as tokens are drawn from them; what is left out is padding."""
        settings = (setting[: len(logits)] for setting in (self.temperature, self.top_k, self.top_p))
        return SamplingRows(logits, *settings)


def write_logits(
    rows: Sequence[RunningRequest], buffers: StepBuffers, purpose: DrawPurpose, *, draws_ratios: bool
) -> None:
    """Write the sections of the buffers that `view_logits` reads; their `cu_query` is written before."""
    starts, num_rows = logits_starts(rows), len(rows)
    cu_logits = buffers.host("cu_logits")[: num_rows + 1]
    cu_logits[:] = starts
    of_row = np.repeat(np.arange(num_rows, dtype=np.int32), np.diff(cu_logits))
    buffers.host("logit_rows")[: starts[-1]] = of_row
    without_logits = buffers.host("cu_query")[1 : num_rows + 1] - cu_logits[1:]  # tokens up to each row's end
    buffers.host("logit_tokens")[: starts[-1]] = np.arange(starts[-1], dtype=np.int32) + without_logits[of_row]
    _write_sampling(rows, buffers, starts[-1], purpose, draws_ratios=draws_ratios)


def _write_sampling(
    rows: Sequence[RunningRequest], buffers: StepBuffers, num_logits: int, purpose: DrawPurpose, *, draws_ratios: bool
) -> None:
    """Write each row's settings and random numbers; if all rows are greedy, constants, which is faster."""
    num_rows, names = len(rows), ["uniforms", *(["accept_uniforms", "residual_uniforms"] if draws_ratios else [])]
    temperature, top_p = (buffers.host(name).view(np.float32)[:num_rows] for name in ("temperature", "top_p"))
    top_k = buffers.host("top_k")[:num_rows]
    if Draws.of(rows) is Draws.BEST:
        temperature[:], top_k[:], top_p[:] = 0.0, 1, 0.0
        for name in names:
            buffers.host(name).view(np.float64)[:num_logits] = 0.0
        return
    settings = [row.spec.sampling for row in rows]
    temperature[:] = [s.temperature for s in settings]
    top_k[:] = [s.top_k for s in settings]
    top_p[:] = [s.top_p for s in settings]
    for name, drawn_for in zip(names, (purpose, DrawPurpose.ACCEPT, DrawPurpose.RESIDUAL), strict=False):
        write_uniforms(name, drawn_for, rows, buffers)


def view_logits(rows: Sequence[RunningRequest], token_ids: Tensor, buffers: StepBuffers) -> StepLogits:
    """Return the device views of what `write_logits` wrote, per logits row; `token_ids` [tokens] are the step's."""
    starts, num_rows = logits_starts(rows), len(rows)
    num_logits, max_drafts = starts[-1], max((len(row.drafts) for row in rows), default=0)
    device = buffers.device
    tokens = device("logit_tokens")[:num_logits]
    settings = [
        device("temperature")[:num_rows].view(torch.float32),
        device("top_k")[:num_rows],
        device("top_p")[:num_rows].view(torch.float32),
    ]
    following = token_ids
    if max_drafts:
        settings = [setting.index_select(0, device("logit_rows")[:num_logits]) for setting in settings]
        following = token_ids.index_select(0, (tokens + 1).clamp_max(token_ids.shape[0] - 1))
    temperature, top_k, top_p = settings
    return StepLogits(
        tokens=tokens,
        starts=starts,
        verify=VerifyLogits(
            cu_logits=device("cu_logits")[: num_rows + 1], draft_ids=following[:num_logits], max_drafts=max_drafts
        ),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        uniforms=device("uniforms")[: 2 * num_logits].view(torch.float64),
        accept_uniforms=device("accept_uniforms")[: 2 * num_logits].view(torch.float64),
        residual_uniforms=device("residual_uniforms")[: 2 * num_logits].view(torch.float64),
        draws=Draws.of(rows),
        any_changed=any_changed(rows),
        any_scored=any_scored(rows),
    )


def any_changed(rows: Sequence[RunningRequest]) -> bool:
    """Return whether a row changes the model's logits before its token is drawn; a grammar only bars tokens."""
    return any(row.spec.sampling.logits is not PLAIN_LOGITS for row in rows)


def any_masked(rows: Sequence[RunningRequest]) -> bool:
    """Return whether a row follows a grammar."""
    return any([row.spec.sampling.grammar for row in rows])  # asked twice a step; a generator is slower


def any_scored(rows: Sequence[RunningRequest]) -> bool:
    """Return whether a row wants log-probs."""
    return any(row.spec.log_probs.wanted for row in rows)


def logits_starts(rows: Sequence[RunningRequest]) -> tuple[int, ...]:
    """Return where each row's logits begin, [rows + 1]; a row without tokens has none."""
    return (0, *accumulate(1 + len(row.drafts) if row.scheduled else 0 for row in rows))


def write_next_uniforms(rows: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    """Write the random numbers of rows that decode one token each, from the computed tokens that the buffers hold."""
    uniforms = buffers.host("uniforms").view(np.float64)
    for index, (row, computed) in enumerate(zip(rows, buffers.host("computed")[: len(rows)].tolist(), strict=True)):
        if not row.spec.sampling.is_greedy:
            uniforms[index] = counter_uniform(row.spec.sampling.seed, computed + 1, DrawPurpose.SAMPLE)


def write_uniforms(section: str, purpose: DrawPurpose, rows: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    """Write each sampled token's random number, a function of its request's seed, its position and the purpose."""
    uniforms = buffers.host(section).view(np.float64)
    at = 0
    for row in rows:
        sampling, count = row.spec.sampling, 1 + len(row.drafts) if row.scheduled else 0
        first = row.computed + row.scheduled - len(row.drafts)
        uniforms[at : at + count] = [
            0.0 if sampling.is_greedy else counter_uniform(sampling.seed, first + index, purpose)
            for index in range(count)
        ]
        at += count
