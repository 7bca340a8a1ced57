"""Add the results of a step to the requests' records, and undo this if reporting the step fails."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.core.inference.inference_request import Status

from ..policy.requests import RunningRequest
from .generated_tokens import Addition, RecordMark, additions_of, complete_texts, is_reported, take_back
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
        self._additions: Sequence[Addition] = ()

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
        """Append the results that Megatron does not append: all tokens but the last, and all log-probs.

        If `detokenize` raises, nothing is appended to any request.
        """
        if self._step_result is not None:
            self._additions = additions_of(self._step_result, self._entries, self._states, detokenize)
        for addition in self._additions:
            addition.apply()

    def rest(self) -> dict[str, Any] | None:
        """Return the step's result without the log-probs that `append` added; None if the step computed nothing."""
        return None if self._step_result is None else {**self._step_result, "log_probs": None, "top_n_logprobs": None}

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
        for request_id, tokens in self._new_tokens():
            if request_id in continuing and request_id not in whole:
                take_back(self._newest(request_id), len(continuing[request_id].generated) - len(tokens))
        for addition in self._additions:
            if addition.request.request_id in self._entries.keys() - whole:
                addition.state.draft_counts = addition.drafts_before

    def _newest(self, request_id: int) -> Any:
        return self._entries[request_id].record.requests[-1]

    def _new_tokens(self) -> Iterable[tuple[int, Sequence[int]]]:
        if self._step_result is None:
            return ()
        return zip(self._step_result["active_request_ids"].tolist(), self._step_result["kept_tokens"], strict=True)
