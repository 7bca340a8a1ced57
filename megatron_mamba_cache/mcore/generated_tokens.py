"""Add the results of a step to Megatron's records; each request gets all of its results or none."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.inference.inference_request import Status
from torch import Tensor

from ..policy.request_settings import ScoredToken
from ..policy.requests import RunningRequest
from ..step.prompt_log_probs import alternatives_by_text, named_alternatives
from .request_spec import PROMPT_SCORES
from .request_states import RequestState, tokens_after

_BY_TOKEN = ("generated_tokens", "tpot", "generated_log_probs", "generated_top_n_logprobs")
_LOG_PROBS = ("prompt_log_probs", "generated_log_probs")
_TOP_N = ("prompt_top_n_logprobs", "generated_top_n_logprobs")


@dataclass(slots=True)  # frozen objects take three times as long to make
class Addition:
    """Log-probs that a step computed for one request.

    Args:
        request: Newest Megatron request in its record.
        num_tokens: Number of tokens that the step generated; 0 while the prefill is unfinished.
        log_probs: Log-probs of the prompt tokens, if requested, followed by those of the generated tokens.
        top_n: Log-probs of the most probable tokens at the same positions, keyed by the token's text, or by its id if
            `LogProbSettings.names_ids` is set; None if not requested.
        prompt_top_n: Number of alternatives to each prompt token in a reply; None if prompt scores are not requested.
        scored: Scores of the prompt tokens from the second on, if this step completes them; otherwise empty.
    """

    request: Any
    num_tokens: int
    log_probs: Sequence[float]
    top_n: Sequence[dict[str, float]] | None
    prompt_top_n: int | None
    scored: Sequence[ScoredToken] = ()

    def apply(self) -> None:
        """Append the log-probs to the record."""
        request = self.request
        for names, entries in ((_LOG_PROBS, self.log_probs), (_TOP_N, self.top_n)):
            if entries is not None:
                of_prompt, generated = (_list_of(request, name) for name in names)
                num_prompt = len(entries) - self.num_tokens
                generated.extend(entries[num_prompt:])
                if not request.sampling_params.skip_prompt_log_probs:
                    of_prompt.extend(entries[:num_prompt])
        if self.scored and self.prompt_top_n is not None:
            setattr(request.sampling_params, PROMPT_SCORES, [score.cut(self.prompt_top_n) for score in self.scored])


@dataclass(frozen=True, slots=True)
class RecordMark:
    """Snapshot of a request's record before the report of the step in which it ends."""

    entry: Any  # Megatron's `RequestEntry`
    request: Any  # newest request in the record
    num_tokens: int
    num_events: int

    @staticmethod
    def of(entry: Any) -> "RecordMark":
        """Return a snapshot of a request's current record."""
        newest = entry.record.requests[-1]
        return RecordMark(entry, newest, len(newest.generated_tokens), len(newest.events))

    def take_back(self) -> None:
        """Restore the record from the snapshot; do nothing if the record has a newer part."""
        if self.entry.record.requests[-1] is not self.request:
            return
        take_back(self.request, self.num_tokens)
        del self.request.events[self.num_events :]
        self.request.generated_length, self.request.status = None, Status.ACTIVE_AND_GENERATING_TOKENS


def append_tokens(
    entries: Mapping[int, Any], request_ids: Sequence[int], tokens: Sequence[Sequence[int]], seconds: Sequence[float]
) -> None:
    """Append new tokens to the requests, with their times: the last token of a step gets the step's time, others 0.

    Args:
        entries: Megatron's entries by request id.
        tokens: [requests][tokens] new tokens of each request.
        seconds: Time of the last of these tokens, if they include the step's last token; otherwise empty.
    """
    times: dict[int, Sequence[float]] = {}
    for request_id, new in zip(request_ids, tokens, strict=True):
        if not (number := len(new)):
            continue
        request = entries[request_id].record.requests[-1]
        if number not in times:
            times[number] = [*[0.0] * (number - len(seconds)), *seconds]
        request.generated_tokens.extend(new)
        if request.tpot is None:
            request.tpot = []
        request.tpot.extend(times[number])


def additions_of(
    step_result: Mapping[str, Any],
    entries: Mapping[int, Any],
    states: Mapping[int, RequestState],
    detokenize: Callable[[list[int]], str],
) -> list[Addition]:
    """Return the additions for requests with log-probs in the step, without applying them.

    Args:
        entries: Megatron's entries by request id.
        detokenize: Function that converts token ids to text, for top-n tokens; its exceptions propagate.
    """
    log_probs: Sequence[Sequence[float] | None] = step_result["log_probs"]
    top_n: Mapping[int, Sequence[tuple[Tensor, Tensor]]] = step_result["top_n_logprobs"] or {}
    prompts = step_result.get("prompt_log_probs") or {}
    found = []
    steps = zip(step_result["active_request_ids"].tolist(), step_result["kept_tokens"], log_probs, strict=True)
    for index, (request_id, tokens, chosen) in enumerate(steps):
        if chosen is None:
            continue
        request, settings = entries[request_id].record.requests[-1], states[request_id].candidate.spec.log_probs
        best = None
        if index in top_n or index in prompts:
            text_of = str if settings.names_ids else partial(_text_of, detokenize)
        if index in top_n:
            best = [alternatives_by_text(ids.tolist(), values.tolist(), text_of) for values, ids in top_n[index]]
        if scored := prompts.get(index):
            chosen = [*(token.log_prob for token in scored), *chosen]
            if best is not None:
                best = [*named_alternatives(scored, len(top_n[index][0][1]), text_of), *best]
        found.append(Addition(request, len(tokens), chosen, best, settings.prompt_top_n, scored or ()))
    return found


def is_reported(running: RunningRequest, request: Any) -> bool:
    """Return whether a request's record contains the times, log-probs and top-n tokens of all its computed tokens."""
    num_tokens, settings = len(running.generated), running.spec.log_probs
    if any(len(getattr(request, name) or ()) != num_tokens for name in _BY_TOKEN[:2]):
        return False
    pending = 0 if num_tokens else len(running.scored)  # prompt scores are reported with the first token
    num_indices = num_tokens if settings.skip_prompt else running.computed - pending
    wanted = [names for names, is_wanted in ((_LOG_PROBS, settings.wanted), (_TOP_N, settings.top_n)) if is_wanted]
    return all(sum(len(getattr(request, name) or ()) for name in names) == num_indices for names in wanted)


def take_back(request: Any, num_known: int) -> None:
    """Delete a request's generated tokens after the first `num_known`, with their log-probs and times.

    If `num_known` is 0, the prompt's log-probs are deleted too.
    """
    for name in _BY_TOKEN:
        if (entries := getattr(request, name)) is not None:
            del entries[num_known:]
    if not num_known:
        request.prompt_log_probs = request.prompt_top_n_logprobs = None


def complete_texts(record: Any, detokenize: Callable[[list[int]], str]) -> None:
    """Add missing texts to the parts of a record; skip a text if detokenization fails."""
    for request in record.requests:
        with suppress(Exception):  # the record is reported anyway, and contains the reply's tokens
            if request.prompt is None:
                request.prompt = detokenize(request.prompt_tokens.tolist())
            if request.generated_text is None:
                request.generated_text = detokenize(request.generated_tokens)
    with suppress(Exception):
        join_texts(record, detokenize)


def join_texts(record: Any, detokenize: Callable[[list[int]], str]) -> None:
    """Store the text of all tokens of an interrupted request in its first part and clear the other parts.

    Megatron detokenizes each part separately, but a character may start in one part and end in the next.
    """
    first, *others = record.requests
    if others:
        first.generated_text = detokenize(tokens_after(0, record.requests))
        for request in others:
            request.generated_text = ""


def _list_of(request: Any, name: str) -> list[Any]:
    if getattr(request, name) is None:
        setattr(request, name, [])
    entries: list[Any] = getattr(request, name)
    return entries


def _text_of(detokenize: Callable[[list[int]], str], token: int) -> str:
    return detokenize([token])
