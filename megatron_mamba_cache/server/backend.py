"""The front end's interface to the engines, wherever they run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NewType, Protocol

from ..grammars.compiler import Grammars
from ..metrics import CacheSnapshot
from ..policy.logits_settings import PLAIN_LOGITS, LogitsSettings
from ..policy.request_settings import PromptBreakpoint, ScoredToken

Ticket = NewType("Ticket", int)

EndReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and the sampling settings of its reply.

    Args:
        max_tokens: The most tokens to generate; at least 1.
        temperature, top_k, top_p: 0 switches top_k and top_p off; temperature 0 or top_k 1 is greedy.
        tenant: Tenant whose prefixes it shares.
        num_log_probs: Alternatives with log-probs for each token; 0 gives only the chosen token's, None gives none.
        scores_prompt: Whether to return log-probs of the prompt too, which computes the whole prompt.
        prompt_top_n: The best tokens to return in the place of each prompt token, with ranks; None for none, not even
            its own rank. It computes the whole prompt too.
        ignores_end: Whether to continue after the tokenizer's end tokens.
        stop_token_ids: Further tokens that end it.
        logits: How the model's logits are changed before a token is drawn.
        grammar: What the reply has to follow, as `grammars.forms` writes it; "" for nothing.
        breakpoints: Where other prompts are expected to part from this one.
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
    prompt_top_n: int | None = None
    ignores_end: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logits: LogitsSettings = PLAIN_LOGITS
    grammar: str = ""
    breakpoints: tuple[PromptBreakpoint, ...] = ()

    @property
    def wants_log_probs(self) -> bool:
        """True when the engine has to compute log-probs of any token."""
        return self.num_log_probs is not None or self.prompt_top_n is not None

    @property
    def computes_prompt(self) -> bool:
        """True when every token of the prompt has to be computed, cached or not."""
        return self.scores_prompt or self.prompt_top_n is not None


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step added to a reply.

    Args:
        log_probs: One for each new token, if requested.
        alternatives: The most probable tokens for each new token, id to log-prob, if requested.
        prompt_log_probs, prompt_alternatives: Those of the prompt from its second token on, with the first new token.
        prompt_scores: The same with ranks and ids, if requested.
        cached_tokens: Prompt tokens that were skipped at the request's first admission.
        cached_tokens_from_host, cached_tokens_from_disk: Of these, those that came back for it from there.
        written_tokens: Prompt tokens that the request has newly written to the cache.
        draft_tokens, accepted_tokens: Drafts verified so far, and those accepted.
        running_s: Seconds since the start of the first step that ran the request.
        end: Why the reply ends here; None while it continues.
        error: What went wrong, if `end` is "error".
    """

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    alternatives: tuple[Mapping[int, float], ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    prompt_alternatives: tuple[Mapping[int, float], ...] = ()
    prompt_scores: tuple[ScoredToken, ...] = ()
    cached_tokens: int = 0
    cached_tokens_from_host: int = 0
    cached_tokens_from_disk: int = 0
    written_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    running_s: float = 0.0
    end: EndReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BackendState:
    """A snapshot of the engines.

    Args:
        is_ready: Whether warmup is over.
        failure: Why the engines no longer serve requests; None while they do.
        cache: Counters and owners, summed over all engines; None before the first report.
    """

    is_ready: bool = False
    failure: str | None = None
    cache: CacheSnapshot | None = None
    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    weights_version: str = ""


class Backend(Protocol):
    """The engines. Call every method in the front end's event loop; only `flush` and `stop` may wait for a step."""

    max_sequence_length: int
    """The most prompt and generated tokens of a request."""
    grammars: Grammars
    """What replies may have to follow; compiling one takes a moment, on any thread."""

    async def start(self) -> None:
        """Start the engines' warmup; progress is delivered in the running event loop."""

    @property
    def state(self) -> BackendState:
        """The latest state."""

    def fault_of(self, request: GenerationRequest) -> str | None:
        """Return why a request can never run; None if it can."""

    def submit(self, request: GenerationRequest, deliver: Callable[[Progress], None]) -> Ticket:
        """Queue a request; `deliver` is called in the event loop with each step's progress, the last with an `end`."""

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request before the next step and deliver nothing more; ignore one that has ended."""

    def fail_all(self, reason: str) -> None:
        """End every request with an error before the next step."""

    async def flush(self, weights_version: str | None) -> None:
        """Make everything cached unreachable; see `MambaCacheContext.flush`."""

    async def stop(self) -> None:
        """Stop the engines."""
