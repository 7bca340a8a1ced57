"""Which tokens of a step yield logits, and with which settings and random numbers each is sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling.verification import VerifyLogits
from ..policy.logits_settings import PLAIN_LOGITS
from ..policy.random_counter import DrawPurpose, counter_uniform
from ..policy.requests import RunningRequest
from .buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The tokens whose logits are wanted, each row's last and those that drafts follow, and how each is sampled.

    Device tensors, but for `starts`, `all_greedy` and `any_changed`.
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
    all_greedy: bool
    any_changed: bool  # whether a row changes its logits first, other than by barring tokens as its grammar says


def write_logits(
    rows: Sequence[RunningRequest], buffers: StepBuffers, purpose: DrawPurpose, *, draws_ratios: bool
) -> None:
    """Write the sections of the buffers that `view_logits` reads."""
    starts, num_rows = logits_starts(rows), len(rows)
    counts = np.diff(starts)
    buffers.host("cu_logits")[: num_rows + 1] = starts
    buffers.host("logit_rows")[: starts[-1]] = np.repeat(np.arange(num_rows, dtype=np.int32), counts)
    without_logits = np.fromiter((row.scheduled for row in rows), np.int64, num_rows) - counts
    before = np.repeat(np.cumsum(without_logits), counts)  # tokens without logits, up to the row's end
    buffers.host("logit_tokens")[: starts[-1]] = before + np.arange(starts[-1])
    _write_sampling(rows, buffers, starts[-1], purpose, draws_ratios=draws_ratios)


def _write_sampling(
    rows: Sequence[RunningRequest], buffers: StepBuffers, num_logits: int, purpose: DrawPurpose, *, draws_ratios: bool
) -> None:
    """Write each row's settings and random numbers; if all rows are greedy, constants, which is faster."""
    num_rows, names = len(rows), ["uniforms", *(["accept_uniforms", "residual_uniforms"] if draws_ratios else [])]
    temperature, top_p = (buffers.host(name).view(np.float32)[:num_rows] for name in ("temperature", "top_p"))
    top_k = buffers.host("top_k")[:num_rows]
    if all_greedy(rows):
        temperature[:], top_k[:], top_p[:] = 0.0, 1, 0.0
        for name in names:
            buffers.host(name).view(np.float64)[:num_logits] = 0.0
        return
    settings = [row.spec.sampling for row in rows]
    temperature[:] = [s.temperature for s in settings]
    top_k[:] = [s.top_k for s in settings]
    top_p[:] = [s.top_p for s in settings]
    for name, drawn_for in zip(names, (purpose, DrawPurpose.ACCEPT, DrawPurpose.RESIDUAL), strict=False):
        _write_uniforms(name, drawn_for, rows, buffers)


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
        all_greedy=all_greedy(rows),
        any_changed=any_changed(rows),
    )


def all_greedy(rows: Sequence[RunningRequest]) -> bool:
    """Return whether no row needs a random number."""
    return all(row.spec.sampling.is_greedy for row in rows)


def any_changed(rows: Sequence[RunningRequest]) -> bool:
    """Return whether a row changes the model's logits before its token is drawn; a grammar only bars tokens."""
    return any(row.spec.sampling.logits is not PLAIN_LOGITS for row in rows)


def any_masked(rows: Sequence[RunningRequest]) -> bool:
    """Return whether a row follows a grammar."""
    return any(row.spec.sampling.grammar for row in rows)


def logits_starts(rows: Sequence[RunningRequest]) -> tuple[int, ...]:
    """Return where each row's logits begin, [rows + 1]; a row without tokens has none."""
    return (0, *accumulate(1 + len(row.drafts) if row.scheduled else 0 for row in rows))


def _write_uniforms(section: str, purpose: DrawPurpose, rows: Sequence[RunningRequest], buffers: StepBuffers) -> None:
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
