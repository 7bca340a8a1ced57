"""Interface between the HTTP front end and the engines."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NewType, Protocol

from ..grammars.compiler import Grammars
from ..mcore.pausable_engine import ABORTED
from ..mcore.step_report import failure_reason
from ..metrics import CacheSnapshot
from ..policy.kept_tokens import TokenRoutes
from ..policy.request_settings import RequestSpec, ScoredToken

Ticket = NewType("Ticket", int)

EndReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens that one step added to a reply, and the counters of its request so far."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()  # log-prob of each new token; empty unless requested
    alternatives: tuple[Mapping[int, float], ...] = ()  # top-n log-probs for each new token, by token id
    prompt_log_probs: tuple[float, ...] = ()  # of all prompt tokens but the first; sent with the first new token
    prompt_alternatives: tuple[Mapping[int, float], ...] = ()
    prompt_scores: tuple[ScoredToken, ...] = ()  # the prompt's log-probs, with ranks and token ids
    cached_tokens: int = 0  # number of prompt tokens that needed no prefill at the first admission
    cached_tokens_from_host: int = 0  # number of cached tokens restored from host memory
    cached_tokens_from_disk: int = 0  # number of cached tokens restored from disk
    written_tokens: int = 0  # number of prompt tokens that the request added to the cache
    draft_tokens: int = 0  # number of draft tokens verified so far
    accepted_tokens: int = 0  # number of draft tokens accepted so far
    routes: TokenRoutes | str | None = None  # routed experts, in a request's last progress; may be encoded already
    running_s: float = 0.0  # seconds since the start of the request's first step
    end: EndReason | None = None  # why the reply has ended; None while it continues
    error: str | None = None  # error message; set only if `end` is "error"


@dataclass(frozen=True, slots=True)
class BackendState:
    """Snapshot of the engines' readiness, load and counters."""

    is_ready: bool = False  # True after warmup
    failure: str | None = None  # why the engines have stopped serving requests; None while they serve
    cache: CacheSnapshot | None = None  # counters summed over all engines; None before the first report
    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    weights_version: str = ""
    is_paused: bool = False  # True if the engines queue requests and run no step until they are resumed


class Backend(Protocol):
    """Interface to the engines. Call all methods in the event loop.

    Only `flush`, `pause`, `resume`, `abort` and `stop` may wait until the current step ends.
    """

    max_sequence_length: int
    """Maximum number of prompt and generated tokens in a request."""
    grammars: Grammars
    """Grammar compiler, usable from any thread."""

    async def start(self) -> None:
        """Start the engines without waiting for their warmup; the current event loop will run `deliver` callbacks."""

    @property
    def state(self) -> BackendState:
        """Latest snapshot of the engines."""

    def error_of(self, spec: RequestSpec) -> str | None:
        """Return the reason why a request can never run; None if it can run."""

    def submit(self, spec: RequestSpec, deliver: Callable[[Progress], None]) -> Ticket:
        """Queue a request; return a ticket that identifies it.

        `deliver` is called in the event loop after each step that adds tokens. Only the last `Progress` has `end` set.
        """

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request before the next step; do nothing if it has ended."""

    def fail_all(self, reason: str) -> None:
        """End every request before the next step, with `reason` as the error message."""

    async def flush(self, weights_version: str | None) -> None:
        """Make all cached prefixes unreachable, and change the weights version unless it is None."""

    async def pause(self) -> None:
        """Finish the current steps and run no others until `resume`; requests keep their states. May be repeated."""

    async def resume(self) -> None:
        """Continue after `pause`. May be repeated."""

    async def abort(self, tickets: Collection[Ticket]) -> None:
        """End requests with the end reason "abort" and the tokens that they have; ignore those that have ended."""

    async def stop(self) -> None:
        """Stop the engines."""


@dataclass(slots=True)
class Listener:
    """Callback that receives one request's progress, with the number of tokens delivered to it."""

    deliver: Callable[[Progress], None]
    end_ids: frozenset[int]  # token ids that end the reply
    num_tokens: int = 0  # number of generated tokens delivered so far

    @staticmethod
    def of(spec: RequestSpec, deliver: Callable[[Progress], None], end_ids: frozenset[int]) -> "Listener":
        """Return the listener for a request; `end_ids` are the model's end-of-sequence tokens."""
        own = end_ids if spec.sampling.termination_id is None else frozenset[int]()
        return Listener(deliver, own.union(spec.sampling.end_ids))


def by_id(named: Sequence[Mapping[str, float]]) -> tuple[dict[int, float], ...]:
    """Convert the keys of log-prob mappings from decimal strings to token ids."""
    return tuple({int(token): value for token, value in best.items()} for best in named)


def ended(progress: Progress, end_ids: frozenset[int], record: Any) -> Progress:
    """Return `progress`, a reply's last, with `end` and `error` set.

    `record` is Megatron's, which holds the error if the request failed. A last token in `end_ids` means "stop", any
    other "length", unless the request was aborted.
    """
    error = failure_reason(record[-1])
    if error is not None:
        return replace(progress, end="error", error=error)
    if getattr(record[0].sampling_params, ABORTED, False):
        return replace(progress, end="abort")
    return replace(progress, end="stop" if progress.tokens and progress.tokens[-1] in end_ids else "length")
