"""Interface between the HTTP front end and the engines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NewType, Protocol

from ..grammars.compiler import Grammars
from ..mcore.step_report import failure_reason
from ..metrics import CacheSnapshot
from ..policy.request_settings import RequestSpec, ScoredToken

Ticket = NewType("Ticket", int)

EndReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress that one reply made in one step."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # one for each new token, if requested
    alternatives: tuple[Mapping[int, float], ...] = ()  # for each new token: log-probs of the best tokens, by id
    prompt_log_probs: tuple[float, ...] = ()  # for each prompt token but the first; sent with the first new token
    prompt_alternatives: tuple[Mapping[int, float], ...] = ()
    prompt_scores: tuple[ScoredToken, ...] = ()  # the prompt's log-probs with ranks and token ids
    cached_tokens: int = 0  # prompt tokens skipped at the request's first admission
    cached_tokens_from_host: int = 0  # number of cached tokens restored from host memory
    cached_tokens_from_disk: int = 0  # number of cached tokens restored from disk
    written_tokens: int = 0  # prompt tokens that the request added to the cache
    draft_tokens: int = 0  # draft tokens verified so far
    accepted_tokens: int = 0  # draft tokens accepted so far
    running_s: float = 0.0  # seconds since the request's first step started
    end: EndReason | None = None  # why the reply ends here; None while it continues
    error: str | None = None  # what went wrong, if `end` is "error"


@dataclass(frozen=True, slots=True)
class BackendState:
    """Snapshot of the engines' state."""

    is_ready: bool = False  # True after warmup
    failure: str | None = None  # why the engines no longer serve requests; None while they serve them
    cache: CacheSnapshot | None = None  # counters and memory use, summed over all engines; None before the first report
    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    weights_version: str = ""


class Backend(Protocol):
    """Interface to the engines. Call every method in the event loop; only `flush` and `stop` may wait for a step."""

    max_sequence_length: int
    """Maximum number of prompt and generated tokens in a request."""
    grammars: Grammars
    """Grammar compiler, usable from any thread."""

    async def start(self) -> None:
        """Start the engines' warmup; deliver later progress in the running event loop."""

    @property
    def state(self) -> BackendState:
        """Latest snapshot of the engines."""

    def error_of(self, spec: RequestSpec) -> str | None:
        """Return the reason why a request can never run; None if it can."""

    def submit(self, spec: RequestSpec, deliver: Callable[[Progress], None]) -> Ticket:
        """Queue a request and return its ticket.

        `deliver` is called in the event loop with the progress of each step. The last progress has an `end`.
        """

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request before the next step; do nothing if it has ended."""

    def fail_all(self, reason: str) -> None:
        """End every request with an error before the next step."""

    async def flush(self, weights_version: str | None) -> None:
        """Flush the cache; see `MambaCacheContext.flush`."""

    async def stop(self) -> None:
        """Stop the engines."""


@dataclass(slots=True)
class Listener:
    """Receiver of one request's progress."""

    deliver: Callable[[Progress], None]
    end_ids: frozenset[int]  # tokens that end the reply before its length limit
    num_tokens: int = 0  # number of generated tokens delivered so far

    @staticmethod
    def of(spec: RequestSpec, deliver: Callable[[Progress], None], end_ids: frozenset[int]) -> "Listener":
        """Return the listener for a request; `end_ids` are the model's end tokens."""
        own = end_ids if spec.sampling.termination_id is None else frozenset[int]()
        return Listener(deliver, own.union(spec.sampling.end_ids))


def by_id(named: Sequence[Mapping[str, float]]) -> tuple[dict[int, float], ...]:
    """Return log-prob mappings with their keys converted from decimal strings to token ids."""
    return tuple({int(token): value for token, value in best.items()} for best in named)


def ended(progress: Progress, end_ids: frozenset[int], newest: Any) -> Progress:
    """Return the last progress of a reply with the reason why the reply ended."""
    error = failure_reason(newest)
    if error is not None:
        return replace(progress, end="error", error=error)
    return replace(progress, end="stop" if progress.tokens and progress.tokens[-1] in end_ids else "length")
