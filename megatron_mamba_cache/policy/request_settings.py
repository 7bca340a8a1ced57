"""Immutable settings of a request: sampling, log-probabilities, cache breakpoints."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from struct import error as PackError
from struct import pack_into
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .logits_settings import PLAIN_LOGITS, LogitsSettings


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings and end conditions of a request.

    Args:
        temperature, top_k, top_p: Temperature 0 or top_k 1 selects greedy decoding; top_k 0 and top_p 0 mean no limit.
        seed: Seed of the request's counter-based random numbers.
        termination_id: Token that ends the request; -1 for none; None for the tokenizer's end token.
        stop_words: Token sequences of the stop strings that end the request.
        logits: Changes to the model's logits before a token is sampled.
        grammar: Grammar that the generated text must follow, serialized by `grammars.forms`; "" for none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    termination_id: int | None = -1
    stop_words: tuple[tuple[int, ...], ...] = ()
    logits: LogitsSettings = PLAIN_LOGITS
    grammar: str = ""

    @property
    def changes_logits(self) -> bool:
        """True if settings or a grammar change the logits before a token is sampled."""
        return self.logits is not PLAIN_LOGITS or bool(self.grammar)

    @property
    def is_greedy(self) -> bool:
        """True if sampling needs no random numbers."""
        return self.top_k == 1 or self.temperature == 0.0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids of the stop strings that are a single token."""
        return tuple(word[0] for word in self.stop_words if len(word) == 1)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end the request."""
        end = self.termination_id
        return self.stop_token_ids if end is None or end < 0 else (*self.stop_token_ids, end)

    @property
    def last_ids(self) -> tuple[int, ...]:
        """All tokens with which the request may end: end tokens, and the last token of each stop string."""
        return (*self.end_ids, *(word[-1] for word in self.stop_words))


@dataclass(frozen=True, slots=True)
class LogProbSettings:
    """Log-probabilities to return for a request: for generated tokens, prompt tokens and their alternatives.

    Args:
        top_n: Number of alternatives for each generated token, returned as text.
        prompt_top_n: Number of alternatives for each prompt token, returned with ids and ranks; None returns neither
            alternatives nor ranks.
        names_ids: True to return the `top_n` alternatives as decimal ids instead of text.
    """

    wanted: bool = False
    skip_prompt: bool = False
    top_n: int = 0
    prompt_top_n: int | None = None
    names_ids: bool = False

    @property
    def of_prompt(self) -> bool:
        """True if log-probabilities for the prompt are requested."""
        return self.wanted and not self.skip_prompt

    @property
    def most_of_prompt(self) -> int:
        """Number of alternatives that must be computed for each prompt token."""
        return max(self.top_n, self.prompt_top_n or 0)


class ScoredToken(NamedTuple):
    """Log-probability and rank of a prompt token, and its alternatives in descending order of probability.

    Args:
        rank: 1 plus the number of more probable tokens.
    """

    log_prob: float
    rank: int
    best_log_probs: tuple[float, ...] = ()
    best_ids: tuple[int, ...] = ()

    def cut(self, top_n: int) -> "ScoredToken":
        """Return a copy with only the `top_n` most likely alternatives."""
        return ScoredToken(self.log_prob, self.rank, self.best_log_probs[:top_n], self.best_ids[:top_n])


class PromptBreakpoint(NamedTuple):
    """A position at which other prompts are expected to diverge from this prompt; a state is cached before it.

    Args:
        keep_s: Number of seconds after the request's arrival for which that state has raised eviction priority.
    """

    position: int
    keep_s: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """Immutable description of a request: its prompt, limits and settings.

    Args:
        prompt: [prompt_len] int64 token ids, never empty.
        max_len: Maximum total number of prompt and generated tokens.
        tenant: Salt that separates the cached prefixes of this tenant from those of other tenants.
        num_replayed: Number of tokens at the end of the prompt that the request generated before an interruption.
        breakpoints: A state is cached at the last block boundary at or before each breakpoint.
        arrived_s: Arrival time in seconds, on the clock used for all requests; 0 if unknown.
        returns_routes: True to return the routed experts of its tokens, False not to; None if the engine records them.
    """

    request_id: int
    prompt: npt.NDArray[np.int64]
    max_len: int
    sampling: SamplingSettings
    tenant: str = ""
    log_probs: LogProbSettings = LogProbSettings()
    num_replayed: int = 0
    breakpoints: tuple[PromptBreakpoint, ...] = ()
    arrived_s: int = 0
    returns_routes: bool | None = None
    prompt_len: int = field(init=False)  # cached, because it is read many times per step

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_len", len(self.prompt))

    def __deepcopy__(self, _memo: object) -> "RequestSpec":
        """Return this object itself: it is immutable, and Megatron deep-copies the parameters that contain it."""
        return self

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens to generate after the prompt."""
        return self.max_len - self.prompt_len

    @property
    def may_skip(self) -> bool:
        """True if prefill may start from a cached state; False if prompt log-probabilities are requested."""
        return not self.log_probs.of_prompt

    def continued(self, generated: Sequence[int]) -> "RequestSpec":
        """Return the spec to resume an interrupted request, with the generated tokens appended to the prompt."""
        if len(generated) == self.num_replayed:
            return self
        prompt = np.concatenate((self.prompt[: self.prompt_len - self.num_replayed], np.array(generated, np.int64)))
        log_probs = replace(self.log_probs, skip_prompt=True)  # those of the prompt are already returned
        return replace(self, prompt=prompt, num_replayed=len(generated), log_probs=log_probs)

    def as_mapping(self) -> dict[str, Any]:
        """Return all fields except id and prompt in types that msgpack serializes; `mcore.request_spec` reads them."""
        log_probs = self.log_probs
        return {
            **asdict(self.sampling),
            "num_tokens_to_generate": self.max_tokens,
            "tenant": self.tenant,
            "return_log_probs": log_probs.wanted,
            "skip_prompt_log_probs": log_probs.skip_prompt,
            "top_n_logprobs": log_probs.top_n,
            "top_n_by_id": log_probs.names_ids,
            "prompt_top_n": log_probs.prompt_top_n,
            "breakpoints": self.breakpoints,
            "arrived_s": self.arrived_s,
            "returns_routes": self.returns_routes,
        }


def packed_ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Convert integers to an int64 vector, more than twice as fast as `np.array`.

    Raises:
        OverflowError: If an integer exceeds 64 bits.
        TypeError: If an element is not an integer.
    """
    ids = np.empty(len(tokens), np.int64)
    try:
        pack_into(f"{len(tokens)}q", ids.data, 0, *tokens)
    except PackError as error:
        kind = OverflowError if all(isinstance(token, Integral) for token in tokens) else TypeError
        raise kind(f"token ids must be 64-bit integers: {error}") from error
    return ids
