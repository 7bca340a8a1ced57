"""Report the tokens of streamed requests and the engine's state to the coordinator."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgpack

from ..mcore.request_spec import PROMPT_SCORES
from ..mcore.request_states import tokens_after
from .front_end import ABORTS, CANCELS, FLUSHES, PROGRESS, STATE, STREAMS

if TYPE_CHECKING:
    from ..mcore.engine import MambaCacheEngine
    from .replica_link import ReplicaLink

_STATE_INTERVAL_S = 0.25


class ProgressReports:
    """Sends one replica's newly generated tokens and engine state to the coordinator."""

    def __init__(self, engine: "MambaCacheEngine", link: "ReplicaLink") -> None:
        self._engine = engine
        self._link = link
        self._known: dict[int, int] = {}  # request id -> number of tokens reported
        self._state_at = 0.0
        self._last_state: dict[str, Any] = {}

    def send(self, request_ids: Iterable[int]) -> None:
        """Send the tokens that streamed requests among `request_ids` have generated since the last report."""
        news = [(request_id, self._progress(request_id)) for request_id in request_ids if self._streams(request_id)]
        if news := [entry for entry in news if entry[1]["tokens"]]:
            self._link.send(msgpack.packb([PROGRESS, news]))
        # Updated after the send, so that tokens are reported again if it fails.
        self._known |= {request_id: progress["start"] + len(progress["tokens"]) for request_id, progress in news}
        self._known = {request_id: count for request_id, count in self._known.items() if self._streams(request_id)}

    def send_state(self) -> None:
        """Send counters and numbers of requests if they have changed, at most every `_STATE_INTERVAL_S` seconds."""
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
            "is_paused": engine.is_paused,
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
    """Return a request's tokens from index `start` on, with their log-probs, as the body of a progress message.

    If `start` is 0, the body also contains the log-probs of the prompt.

    Args:
        parts: Megatron's request objects for the parts of the reply, in order.
    """
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


def obeyed(engine: "MambaCacheEngine", request_id: int, sampling: Any, reply: Callable[[list[Any]], None]) -> bool:
    """Execute a submission if it is a cancel, an abort or a flush, and return True; otherwise return False.

    Args:
        reply: Sends the records of aborted requests.
    """
    if getattr(sampling, CANCELS, False):
        engine.cancel_request(request_id)
        return True
    if getattr(sampling, ABORTS, False):
        record = engine.take_aborted(request_id)
        reply([] if record is None else [record])
        return True
    flush = getattr(sampling, FLUSHES, None)
    if flush is not None:
        engine.flush(*flush)
    return flush is not None
