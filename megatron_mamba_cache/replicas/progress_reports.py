"""Report streamed tokens and the engine's state to the coordinator."""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from ..mcore.request_spec import PROMPT_SCORES
from ..mcore.request_states import tokens_after
from .front_end import CANCELS, FLUSHES, PROGRESS, STATE, STREAMS

if TYPE_CHECKING:
    from ..mcore.engine import MambaCacheEngine
    from .replica_link import ReplicaLink

_STATE_INTERVAL_S = 0.25


class ProgressReports:
    """Reporter of streamed tokens and engine state for one replica."""

    def __init__(self, engine: "MambaCacheEngine", link: "ReplicaLink") -> None:
        self._engine = engine
        self._link = link
        self._known: dict[int, int] = {}  # request id -> number of tokens reported
        self._state_at = 0.0
        self._last_state: dict[str, Any] = {}

    def send(self, request_ids: Iterable[int]) -> None:
        """Report the new tokens of these requests since the last report."""
        news = [(request_id, self._progress(request_id)) for request_id in request_ids if self._streams(request_id)]
        if news := [entry for entry in news if entry[1]["tokens"]]:
            self._link.send(msgpack.packb([PROGRESS, news]))
        # Updated after the send, so that tokens are reported again if it fails.
        self._known |= {request_id: progress["start"] + len(progress["tokens"]) for request_id, progress in news}
        self._known = {request_id: count for request_id, count in self._known.items() if self._streams(request_id)}

    def send_state(self) -> None:
        """Report the engine's state if it has changed, at most once every `_STATE_INTERVAL_S` seconds."""
        now, engine = time.monotonic(), self._engine
        if now - self._state_at < _STATE_INTERVAL_S or not engine.context.is_tensor_state_allocated:
            return
        self._state_at = now
        running = len(engine.context.running_requests)
        state = {
            "cache": engine.context.snapshot().as_dict(),
            "num_running": running,
            "num_waiting": len(engine.requests) - running,
            "weights_version": engine.context.weights_version,
        }
        if state != self._last_state:
            self._last_state = state
            self._link.send(msgpack.packb([STATE, state]))

    def _streams(self, request_id: int) -> bool:
        entry = self._engine.requests.get(request_id)
        return entry is not None and bool(getattr(entry.record[0].sampling_params, STREAMS, False))

    def _progress(self, request_id: int) -> dict[str, Any]:
        parts = self._engine.requests[request_id].record.requests
        counts = self._engine.counts_of(request_id)
        return progress_since(self._known.get(request_id, 0), parts, counts.cached_tokens) | counts.as_mapping()


def progress_since(start: int, parts: Sequence[Any], cached_tokens: int) -> dict[str, Any]:
    """Return a request's progress after its first `start` tokens; prompt log-probs are added to the first progress."""
    first = parts[0] if start == 0 else None
    sampling = getattr(first, "sampling_params", None)
    return {
        "start": start,
        "tokens": tokens_after(start, parts),
        "log_probs": tokens_after(start, parts, "generated_log_probs"),
        "alternatives": tokens_after(start, parts, "generated_top_n_logprobs"),
        "prompt_log_probs": getattr(first, "prompt_log_probs", None) or [],
        "prompt_alternatives": getattr(first, "prompt_top_n_logprobs", None) or [],
        "prompt_scores": getattr(sampling, PROMPT_SCORES, []),
        "cached_tokens": cached_tokens,
    }


def obeyed(engine: "MambaCacheEngine", request_id: int, sampling: Any) -> bool:
    """Execute a submission that is a cancel or a flush; return False for other submissions."""
    if getattr(sampling, CANCELS, False):
        engine.cancel_request(request_id)
        return True
    flush = getattr(sampling, FLUSHES, None)
    if flush is not None:
        engine.flush(*flush)
    return flush is not None
