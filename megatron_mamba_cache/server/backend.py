"""What the front end needs of the engines behind it, wherever they run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NewType, Protocol

from ..metrics import CacheSnapshot

Ticket = NewType("Ticket", int)

EndReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how its reply is drawn.

    Args:
        prompt: Token ids.
        max_tokens: To generate at most, at least 1.
        temperature, top_k, top_p: 0 switches top_k and top_p off; temperature 0 or top_k 1 is greedy.
        seed: Of its random numbers.
        tenant: Whose prefixes it shares.
        num_log_probs: Alternatives for each token whose log-probs are wanted; 0 is the chosen token's alone, None none.
        scores_prompt: Whether log-probs of the prompt are wanted too; the whole of it is computed then.
        ignores_end: Whether to go on behind the tokenizer's end tokens.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    tenant: str = ""
    num_log_probs: int | None = None
    scores_prompt: bool = False
    ignores_end: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step added to a reply.

    Args:
        tokens: New token ids.
        log_probs: Of each of them, if wanted.
        alternatives: The best tokens in the place of each, text to log-prob, if wanted.
        prompt_log_probs, prompt_alternatives: Those of the prompt from its second token on, with the first new token.
        cached_tokens: Prompt tokens that were skipped at its first admission.
        draft_tokens, accepted_tokens: Drafts verified for it so far, and those kept.
        running_s: Seconds since the step began that ran it first.
        end: Why the reply ends here; None: it goes on.
        error: With the reason "error", what went wrong.
    """

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    alternatives: tuple[Mapping[str, float], ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    prompt_alternatives: tuple[Mapping[str, float], ...] = ()
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    running_s: float = 0.0
    end: EndReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BackendState:
    """One look at the engines.

    Args:
        is_ready: Whether warmup is over.
        failure: Why they serve nobody any more.
        cache: Counters and owners, all engines together; None before they have told.
        num_running, num_waiting: Requests.
        generated_tokens: Since the start.
    """

    is_ready: bool = False
    failure: str | None = None
    cache: CacheSnapshot | None = None
    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    weights_version: str = ""


class Backend(Protocol):
    """The engines. Every method is called in the front end's event loop; none waits for a step, but for `flush`."""

    max_sequence_length: int
    """Prompt and generated tokens of a request, at most."""

    async def start(self) -> None:
        """Start the engines' warmup; what is delivered arrives in the running event loop."""

    @property
    def state(self) -> BackendState:
        """The latest state."""

    def fault_of(self, request: GenerationRequest) -> str | None:
        """Return why a request can never run; None if it can."""

    def submit(self, request: GenerationRequest, deliver: Callable[[Progress], None]) -> Ticket:
        """Queue a request; `deliver` is called in the event loop for what each step adds, the last time with an end."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request before the next step; nothing is delivered any more. One that has ended is passed over."""

    def fail_all(self, reason: str) -> None:
        """End every request with an error before the next step."""

    async def flush(self, weights_version: str | None) -> None:
        """Make what is cached unreachable; see `MambaCacheContext.flush`."""

    async def stop(self) -> None:
        """End the engines."""
