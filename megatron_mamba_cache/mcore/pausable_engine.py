"""Engine operations for rollouts: pause and resume generation, and abort requests but keep their tokens."""

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron.core.inference.inference_request import DynamicInferenceRequestRecord, Status
from typing_extensions import override

from .generated_tokens import complete_texts
from .request_states import complete_parts, tokens_after
from .suspendable_engine import SuspendableEngine

ABORTED = "aborted"
"""Sampling parameter, set to True in the record of an aborted request."""


class GeneratedTokens(NamedTuple):
    """Tokens that a request has generated, and their log-probabilities; without them if it did not ask for any."""

    tokens: list[int]
    log_probs: list[float]

    @staticmethod
    def of(record: DynamicInferenceRequestRecord) -> "GeneratedTokens":
        """Return all generated tokens of a record."""
        parts = record.requests
        return GeneratedTokens(tokens_after(0, parts), tokens_after(0, parts, "generated_log_probs"))


class PausableEngine(SuspendableEngine):
    """Base class of `MambaCacheEngine`; all ranks of a model must make the same calls. Calls may be repeated."""

    paused: asyncio.Event  # Megatron's, which a coordinator's signals set and clear too

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume_generation`."""
        return self.paused.is_set()

    def pause(self) -> None:
        """Start no step until `resume_generation`. Requests keep their states, and new requests are queued.

        From another thread than that of `run_engine`, this waits until the step in progress has ended. From a coroutine
        in its loop, that step still ends after the call. An overlapped step has been computed when this returns; its
        tokens are reported by the first step after `resume_generation`.
        """
        self._runs_in.between_steps(self._pause)

    def resume_generation(self) -> None:
        """Continue after `pause`, with the model's current weights."""
        self._runs_in.call(self.paused.clear)

    def abort(self, request_ids: Iterable[int]) -> list[GeneratedTokens]:
        """End requests between steps, running or not, and return the tokens that each has generated.

        Each request's future gets its record, with the parameter `aborted` set. Blocks, slots and cached prefixes are
        treated as in `cancel_request`. An id that is not in the engine has no tokens.

        Raises:
            RuntimeError: If a step is being computed; nothing has changed then.
        """
        return self._runs_in.between_steps(lambda: [self._abort(request_id) for request_id in request_ids])

    @override
    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to compute or report; see `MambaCacheEngine`."""
        return self.owes_step or (not self.is_paused and super().has_unfinished_requests())

    @override
    async def async_step(self) -> Any:
        """Run one step; if the engine is paused, only report failed requests.

        A paused engine still runs the step that other expert-parallel ranks may have launched; see `owes_step`.
        """
        if self.is_paused and not (self.use_coordinator or self.owes_step):
            return await self.async_bookkeep(None, {"kv_stats": None}, 0.0, self.step_count)
        return await super().async_step()

    @property
    def owes_step(self) -> bool:
        """True if expert-parallel ranks may have launched the next step; run it before waiting for these ranks."""
        return self.context.is_tensor_state_allocated and self.context.runner.sharing.is_owed

    def take_aborted(self, request_id: int) -> DynamicInferenceRequestRecord | None:
        """Remove a request; return its record, which is also its future's result, or None for an unknown id."""
        entry = self._remove(request_id)
        if entry is None:
            return None
        record = entry.record
        complete_parts(record)
        record[0].sampling_params.add_attributes(
            {ABORTED: True, "weights_versions": self._states.counts_of(request_id).versions}
        )
        if record[-1].status is not Status.FAILED:
            record[-1].status = Status.COMPLETED
        for part in record.requests:
            part.generated_length = len(part.generated_tokens)
        if not self.use_coordinator:
            complete_texts(record, self.controller.tokenizer.detokenize)
        if not entry.future.done():
            entry.future.set_result(record)
        return record

    def _pause(self) -> None:
        self.paused.set()
        self.context.note_change()  # a step in progress launches no further step
        if self.context.overlapped_step is not None and not self.owes_step:
            self.context.runner.overlapped_steps.wait()

    def _abort(self, request_id: int) -> GeneratedTokens:
        record = self.take_aborted(request_id)
        return GeneratedTokens([], []) if record is None else GeneratedTokens.of(record)
