"""Interface of the front end to the engines."""

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
    """Progress of one reply in one step."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # one for each new token, if requested
    alternatives: tuple[Mapping[int, float], ...] = ()  # likewise, the best tokens, id to log-prob
    prompt_log_probs: tuple[float, ...] = ()  # from the second token on; comes with the first new token
    prompt_alternatives: tuple[Mapping[int, float], ...] = ()
    prompt_scores: tuple[ScoredToken, ...] = ()  # likewise with ranks and ids
    cached_tokens: int = 0  # prompt tokens skipped at the request's first admission
    cached_tokens_from_host: int = 0  # of the cached ones, restored from host memory
    cached_tokens_from_disk: int = 0  # of the cached ones, restored from disk
    written_tokens: int = 0  # prompt tokens that the request has newly written to the cache
    draft_tokens: int = 0  # drafts verified so far
    accepted_tokens: int = 0  # of these, accepted
    running_s: float = 0.0  # seconds since the start of the first step that ran the request
    end: EndReason | None = None  # why the reply ends here; None while it continues
    error: str | None = None  # what went wrong, if `end` is "error"


@dataclass(frozen=True, slots=True)
class BackendState:
    """A snapshot of the engines."""

    is_ready: bool = False  # True if warmup is over
    failure: str | None = None  # why the engines no longer serve requests; None while they do
    cache: CacheSnapshot | None = None  # counters and owners, summed over all engines; None before the first report
    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    weights_version: str = ""


class Backend(Protocol):
    """The engines; call every method in the event loop. Only `flush` and `stop` may wait for a step."""

    max_sequence_length: int
    """Maximum prompt and generated tokens of a request."""
    grammars: Grammars
    """Compiler of grammars, usable from any thread."""

    async def start(self) -> None:
        """Start the engines' warmup; progress is delivered in the running event loop."""

    @property
    def state(self) -> BackendState:
        """The latest state."""

    def error_of(self, spec: RequestSpec) -> str | None:
        """Return the reason why a request can never run; None if it can."""

    def submit(self, spec: RequestSpec, deliver: Callable[[Progress], None]) -> Ticket:
        """Queue a request, which gets its id and time here.

        `deliver` is called in the event loop with each step's progress, the last with an `end`.
        """

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request before the next step; ignore one that has ended."""

    def fail_all(self, reason: str) -> None:
        """End every request with an error before the next step."""

    async def flush(self, weights_version: str | None) -> None:
        """Flush the cache, as `MambaCacheContext.flush`."""

    async def stop(self) -> None:
        """Stop the engines."""


@dataclass(slots=True)
class Listener:
    """The receiver of a request's progress."""

    deliver: Callable[[Progress], None]
    end_ids: frozenset[int]  # tokens that end it before its length limit
    num_tokens: int = 0  # generated tokens that have been delivered

    @staticmethod
    def of(spec: RequestSpec, deliver: Callable[[Progress], None], end_ids: frozenset[int]) -> "Listener":
        """Return the receiver of a request's progress; `end_ids` are the model's."""
        own = end_ids if spec.sampling.termination_id is None else frozenset[int]()
        return Listener(deliver, own.union(spec.sampling.end_ids))


def by_id(named: Sequence[Mapping[str, float]]) -> tuple[dict[int, float], ...]:
    """Return log-probs by token id from a record's digits."""
    return tuple({int(token): value for token, value in best.items()} for best in named)


def ended(progress: Progress, end_ids: frozenset[int], newest: Any) -> Progress:
    """Return a reply's last progress with the reason of its end."""
    error = failure_reason(newest)
    if error is not None:
        return replace(progress, end="error", error=error)
    return replace(progress, end="stop" if progress.tokens and progress.tokens[-1] in end_ids else "length")
