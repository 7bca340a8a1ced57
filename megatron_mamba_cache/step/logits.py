"""Find the tokens of a step that need logits, and write the settings and random numbers for sampling from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling.row_tiles import SamplingRows
from ..kernels.sampling.verification import VerifyLogits
from ..policy.logits_settings import PLAIN_LOGITS
from ..policy.random_counter import DrawPurpose, counter_uniform
from ..policy.request_settings import SamplingSettings
from ..policy.requests import RunningRequest
from .buffers import FOLLOWED_UNIFORMS, StepBuffers

_Record = TypeVar("_Record", bound=Any)


class Draws(IntEnum):
    """Sampling methods for a step, from most specialized to most general; if several fit, they give the same tokens."""

    BEST = 0  # all requests greedy
    ALL_TOKENS = 1  # some requests sample from all tokens
    KEPT_TOKENS = 2  # some requests sample with top-k or top-p

    @staticmethod
    def of(requests: Iterable[RunningRequest]) -> "Draws":
        """Return the most specialized method that can sample for all requests."""
        return max((_draws_of(request.spec.sampling) for request in requests), default=Draws.BEST)


def _draws_of(sampling: SamplingSettings) -> Draws:
    if sampling.is_greedy:
        return Draws.BEST
    return Draws.KEPT_TOKENS if sampling.top_k or 0 < sampling.top_p < 1 else Draws.ALL_TOKENS


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Tokens whose logits are needed (each request's last token and the tokens before drafts), and sampling inputs.

    Everything except `starts`, `draws`, `end_tokens` and the `any_*` flags is a device tensor.
    """

    tokens: Tensor  # [logits] int32 index among the packed tokens
    starts: tuple[int, ...]  # [requests + 1] first logits row of each request, and the number of rows
    verify: VerifyLogits
    temperature: Tensor  # [logits] float32
    top_k: Tensor  # [logits] int32
    top_p: Tensor  # [logits] float32
    uniforms: Tensor  # [logits] float64 in [0, 1)
    accept_uniforms: Tensor  # [logits] float64, written only if drafts were sampled from distributions
    residual_uniforms: Tensor  # [logits] float64, as above
    draws: Draws
    any_changed: bool  # True if a request changes its logits, other than by a grammar mask
    any_scored: bool  # True if a request asked for log-probabilities
    end_tokens: frozenset[int]  # tokens that may end a request: end tokens, and last tokens of stop strings

    def clone(self) -> "StepLogits":
        """Return a copy that later steps cannot overwrite."""
        return replace(with_own_tensors(self), verify=with_own_tensors(self.verify))

    def sampling(self, logits: Tensor) -> SamplingRows:
        """Return these logits, [n, vocab], with the sampling settings of the first n rows; further rows are padding."""
        settings = (setting[: len(logits)] for setting in (self.temperature, self.top_k, self.top_p))
        return SamplingRows(logits, *settings)


def with_own_tensors(record: _Record) -> _Record:
    """Return a copy of the dataclass with cloned tensors."""
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: value.clone() for name, value in found.items() if isinstance(value, Tensor)})


def write_logits(
    requests: Sequence[RunningRequest], buffers: StepBuffers, purpose: DrawPurpose, *, draws_ratios: bool
) -> None:
    """Write the buffer sections that `view_logits` reads. The section `cu_query` must be written before."""
    starts, num_requests = logits_starts(requests), len(requests)
    cu_logits = buffers.host("cu_logits")[: num_requests + 1]
    cu_logits[:] = starts
    of_request = np.repeat(np.arange(num_requests, dtype=np.int32), np.diff(cu_logits))
    buffers.host("logit_requests")[: starts[-1]] = of_request
    without_logits = buffers.host("cu_query")[1 : num_requests + 1] - cu_logits[1:]  # cumulative number
    buffers.host("logit_tokens")[: starts[-1]] = np.arange(starts[-1], dtype=np.int32) + without_logits[of_request]
    _write_sampling(requests, buffers, starts[-1], purpose, draws_ratios=draws_ratios)


def _write_sampling(
    requests: Sequence[RunningRequest],
    buffers: StepBuffers,
    num_logits: int,
    purpose: DrawPurpose,
    *,
    draws_ratios: bool,
) -> None:
    """Write each request's sampling settings and random numbers, with a fast path if all requests are greedy."""
    num_requests = len(requests)
    names = ["uniforms", "accept_uniforms", "residual_uniforms"][: 3 if draws_ratios else 1]
    temperature, top_p = (buffers.host(name).view(np.float32)[:num_requests] for name in ("temperature", "top_p"))
    top_k = buffers.host("top_k")[:num_requests]
    if Draws.of(requests) is Draws.BEST:
        temperature[:], top_k[:], top_p[:] = 0.0, 1, 0.0
        for name in names:
            buffers.host(name).view(np.float64)[:num_logits] = 0.0
        return
    settings = [request.spec.sampling for request in requests]
    temperature[:] = [s.temperature for s in settings]
    top_k[:] = [s.top_k for s in settings]
    top_p[:] = [s.top_p for s in settings]
    for name, purpose_of in zip(names, (purpose, DrawPurpose.ACCEPT, DrawPurpose.RESIDUAL), strict=False):
        write_uniforms(name, purpose_of, requests, buffers)


def view_logits(requests: Sequence[RunningRequest], token_ids: Tensor, buffers: StepBuffers) -> StepLogits:
    """Return device views of the sections that `write_logits` writes; `token_ids`, [tokens], are the input tokens."""
    starts, num_requests = logits_starts(requests), len(requests)
    num_logits, max_drafts = starts[-1], max((len(request.drafts) for request in requests), default=0)
    device = buffers.device
    tokens = device("logit_tokens")[:num_logits]
    settings = [
        device("temperature")[:num_requests].view(torch.float32),
        device("top_k")[:num_requests],
        device("top_p")[:num_requests].view(torch.float32),
    ]
    following = token_ids
    if max_drafts:
        settings = [setting.index_select(0, device("logit_requests")[:num_logits]) for setting in settings]
        following = token_ids.index_select(0, (tokens + 1).clamp_max(token_ids.shape[0] - 1))
    temperature, top_k, top_p = settings
    return StepLogits(
        tokens=tokens,
        starts=starts,
        verify=VerifyLogits(
            cu_logits=device("cu_logits")[: num_requests + 1], draft_ids=following[:num_logits], max_drafts=max_drafts
        ),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        uniforms=device("uniforms")[: 2 * num_logits].view(torch.float64),
        accept_uniforms=device("accept_uniforms")[: 2 * num_logits].view(torch.float64),
        residual_uniforms=device("residual_uniforms")[: 2 * num_logits].view(torch.float64),
        draws=Draws.of(requests),
        any_changed=any_changed(requests),
        any_scored=any_scored(requests),
        end_tokens=end_tokens(requests),
    )


def any_changed(requests: Sequence[RunningRequest]) -> bool:
    """Return whether any request changes logits before sampling, other than by a grammar mask."""
    return any(request.spec.sampling.logits is not PLAIN_LOGITS for request in requests)


def any_masked(requests: Sequence[RunningRequest]) -> bool:
    """Return whether any request has a grammar."""
    return any([request.spec.sampling.grammar for request in requests])  # a list is faster than a generator here


def any_scored(requests: Sequence[RunningRequest]) -> bool:
    """Return whether any request asked for log-probabilities."""
    return any(request.spec.log_probs.wanted for request in requests)


def end_tokens(requests: Sequence[RunningRequest]) -> frozenset[int]:
    """Return the tokens that may end any of these requests: end tokens, and last tokens of stop strings."""
    return frozenset[int]().union(*[request.spec.sampling.last_ids for request in requests])


def logits_starts(requests: Sequence[RunningRequest]) -> tuple[int, ...]:
    """Return the first logits row of each request and the total number of rows, [requests + 1]."""
    return (0, *accumulate(1 + len(request.drafts) if request.scheduled else 0 for request in requests))


def write_next_uniforms(requests: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    """Write random numbers for one-token decode requests, at the positions given by the section `computed`."""
    uniforms = buffers.host("uniforms").view(np.float64)
    for index, (request, computed) in enumerate(
        zip(requests, buffers.host("computed")[: len(requests)].tolist(), strict=True)
    ):
        if not request.spec.sampling.is_greedy:
            uniforms[index] = counter_uniform(request.spec.sampling.seed, computed + 1, DrawPurpose.SAMPLE)


def write_followed_uniforms(requests: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    """Write the random numbers for all positions that the step after this one may sample; see `FollowedRows`."""
    sections = [buffers.host(name).view(np.float64) for name in FOLLOWED_UNIFORMS]
    at = 0
    for request in requests:
        sampling, count = request.spec.sampling, request.scheduled
        if not sampling.is_greedy:
            first = request.computed + 2
            numbers = [counter_uniform(sampling.seed, first + i, DrawPurpose.SAMPLE) for i in range(2 * count - 1)]
            sections[0][at : at + count], sections[1][at : at + count - 1] = numbers[:count], numbers[count:]
        at += count


def write_uniforms(
    section: str, purpose: DrawPurpose, requests: Sequence[RunningRequest], buffers: StepBuffers
) -> None:
    """Write a random number for each sampled token, computed from the request's seed, the position and `purpose`."""
    uniforms = buffers.host(section).view(np.float64)
    at = 0
    for request in requests:
        sampling, count = request.spec.sampling, 1 + len(request.drafts) if request.scheduled else 0
        first = request.computed + request.scheduled - len(request.drafts)
        uniforms[at : at + count] = [
            0.0 if sampling.is_greedy else counter_uniform(sampling.seed, first + index, purpose)
            for index in range(count)
        ]
        at += count
