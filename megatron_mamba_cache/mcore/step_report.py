"""Add the results of a step to the requests' records, and undo this if reporting the step fails."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.core.inference.inference_request import Status

from ..policy.requests import RunningRequest
from .generated_tokens import RecordMark, additions_of, complete_texts, is_reported, take_back
from .request_states import RequestState


def failure_reason(request: Any) -> str | None:
    """Return the reason why a request failed; None if it did not fail."""
    if request.status is not Status.FAILED:
        return None
    errors = [event.payload for event in request.events if event.payload is not None]
    return (
        str(getattr(errors[-1], "message", None) or errors[-1])
        if errors
        else "the request failed, but no reason was recorded"
    )


class StepReport:
    """Transfer of one step's results to the requests' records, which can be undone if a part of it fails.

    Args:
        step_result: Result from the controller; None if the step computed nothing.
        entries: Engine's requests by id; Megatron removes requests that end.
        states: State that the engine keeps for these requests.
    """

    def __init__(
        self, step_result: Mapping[str, Any] | None, entries: Mapping[int, Any], states: Mapping[int, RequestState]
    ) -> None:
        self._step_result = step_result
        self._entries = entries
        self._states = states
        self._leaving: dict[int, RecordMark] = {}
        self._has_drafts = step_result is not None and any(step_result["num_drafts"])
        self._has_counted = False  # True after the step's drafts are counted

    def mark_leaving(self, failed_ids: Iterable[int]) -> list[Any]:
        """Take snapshots of the records of requests that end, fail or are evicted in this step; return their entries.

        Args:
            failed_ids: Ids of failed requests that are not part of the step.
        """
        leaving = list(failed_ids)
        if self._step_result is not None:
            leaving += self._step_result["finished_request_ids"].tolist()
            evicted = self._step_result.get("evict_request_ids")
            leaving += [] if evicted is None else evicted.tolist()
        self._leaving = {request_id: RecordMark.of(self._entries[request_id]) for request_id in leaving}
        return [mark.entry for mark in self._leaving.values()]

    def append(self, detokenize: Callable[[list[int]], str]) -> None:
        """Count the step's drafts and append its log-probs. If `detokenize` raises, no request gets any of them."""
        if self._step_result is not None and self._step_result["log_probs"]:
            for addition in additions_of(self._step_result, self._entries, self._states, detokenize):
                addition.apply()
        for request_id, tokens, num_drafts in self._new_tokens() if self._has_drafts else ():
            if num_drafts:
                state = self._states[request_id]
                state.num_drafted += num_drafts
                state.num_accepted += len(tokens) - 1
        self._has_counted = True

    def rest(self) -> Mapping[str, Any] | None:
        """Return the step's result without the log-probs that `append` added; None if the step computed nothing."""
        if self._step_result is None or not self._step_result["log_probs"]:
            return self._step_result
        return {**self._step_result, "log_probs": None, "top_n_logprobs": None}

    def ended(self, detokenize: Callable[[list[int]], str] | None) -> list[Any]:
        """Complete the futures and texts of requests that Megatron has already removed; return their records.

        Args:
            detokenize: Function that converts token ids to text; None if another process does this.
        """
        entries = [mark.entry for request_id, mark in self._leaving.items() if request_id not in self._entries]
        for entry in entries:
            if detokenize is not None:
                complete_texts(entry.record, detokenize)
            if not entry.future.done():
                entry.future.set_result(entry.record)
        return [entry.record for entry in entries]

    def take_back(self, requests: Iterable[RunningRequest], failed_ids: Iterable[int]) -> None:
        """Remove the step's results from every record, except for continuing requests whose record is complete.

        Args:
            requests: Requests that continue after the step.
            failed_ids: Ids of failed requests that are not part of the step.
        """
        for request_id in self._leaving.keys() & self._entries.keys() - set(failed_ids):
            self._leaving[request_id].take_back()
        continuing = {request.request_id: request for request in requests}
        whole = {
            request_id for request_id, request in continuing.items() if is_reported(request, self._newest(request_id))
        }
        for request_id, tokens, num_drafts in self._new_tokens():
            if request_id in continuing and request_id not in whole:
                take_back(self._newest(request_id), len(continuing[request_id].generated) - len(tokens))
            if num_drafts and self._has_counted and request_id in self._entries and request_id not in whole:
                self._states[request_id].num_drafted -= num_drafts
                self._states[request_id].num_accepted -= len(tokens) - 1

    def _newest(self, request_id: int) -> Any:
        return self._entries[request_id].record.requests[-1]

    def _new_tokens(self) -> Iterable[tuple[int, Sequence[int], int]]:
        if self._step_result is None:
            return ()
        result = self._step_result
        return zip(result["active_request_ids"].tolist(), result["kept_tokens"], result["num_drafts"], strict=True)
