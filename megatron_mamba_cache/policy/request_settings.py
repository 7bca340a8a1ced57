"""Settings of a request, fixed for its life."""

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
        temperature, top_k, top_p: 0 switches top_k and top_p off; temperature 0 or top_k 1 is greedy.
        seed: Seed of the request's counter-based random numbers.
        termination_id: Token that ends the request; -1 for none; None: the engine adds the tokenizer's.
        stop_words: Token sequences that end it.
        logits: How the model's logits are changed before a token is sampled.
        grammar: What the generated text has to follow, as `grammars.forms` writes it; "" for nothing.
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
        """True when a token is not sampled from the model's own logits."""
        return self.logits is not PLAIN_LOGITS or bool(self.grammar)

    @property
    def is_greedy(self) -> bool:
        """True when no random number is needed."""
        return self.top_k == 1 or self.temperature == 0.0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Stop words of one token."""
        return tuple(word[0] for word in self.stop_words if len(word) == 1)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end the request."""
        end = self.termination_id
        return self.stop_token_ids if end is None or end < 0 else (*self.stop_token_ids, end)


@dataclass(frozen=True, slots=True)
class LogProbSettings:
    """Which log-probabilities a request wants: of generated tokens, of the prompt too, and how many alternatives.

    Args:
        top_n: Alternatives of each token, by text.
        prompt_top_n: Alternatives of each prompt token, by id and with ranks; None for no ranks.
        names_ids: True if alternatives are named by the digits of their ids instead of by text.
    """

    wanted: bool = False
    skip_prompt: bool = False
    top_n: int = 0
    prompt_top_n: int | None = None
    names_ids: bool = False

    @property
    def of_prompt(self) -> bool:
        """True when log-probabilities of the prompt are wanted."""
        return self.wanted and not self.skip_prompt

    @property
    def most_of_prompt(self) -> int:
        """Alternatives that are needed for each prompt token."""
        return max(self.top_n, self.prompt_top_n or 0)


class ScoredToken(NamedTuple):
    """A prompt token's log-prob and rank, and its alternatives, best first.

    Args:
        rank: 1 plus the number of tokens that are more probable.
    """

    log_prob: float
    rank: int
    best_log_probs: tuple[float, ...] = ()
    best_ids: tuple[int, ...] = ()

    def cut(self, top_n: int) -> "ScoredToken":
        """Return the token with only its `top_n` best alternatives."""
        return ScoredToken(self.log_prob, self.rank, self.best_log_probs[:top_n], self.best_ids[:top_n])


class PromptBreakpoint(NamedTuple):
    """A position in a prompt at which other prompts are expected to branch off.

    Args:
        keep_s: Seconds from the request's arrival for which the state before it has raised priority.
    """

    position: int
    keep_s: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """One request, from the server's order to the running request; immutable.

    Args:
        prompt: [prompt_len] int64 token ids, never empty.
        max_len: Prompt and generated tokens together.
        tenant: Salt that keeps this request's prefixes apart from other tenants'.
        num_replayed: Tokens at the prompt's end that this request generated before it was interrupted.
        breakpoints: The last boundary up to each gets a state.
        arrived_s: When the request came, in seconds of the clock that stamps all requests; 0 if none does.
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
    prompt_len: int = field(init=False)  # read many times a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_len", len(self.prompt))

    def __deepcopy__(self, _memo: object) -> "RequestSpec":
        """Return this spec: Megatron copies the parameters that carry it, and no copy of it can differ."""
        return self

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate after the prompt."""
        return self.max_len - self.prompt_len

    @property
    def may_skip(self) -> bool:
        """True when cached prompt tokens may be skipped; False when their log-probs are wanted."""
        return not self.log_probs.of_prompt

    def continued(self, generated: Sequence[int]) -> "RequestSpec":
        """Return the same request after an interruption: its prompt ends with all that it has generated."""
        if len(generated) == self.num_replayed:
            return self
        prompt = np.concatenate((self.prompt[: self.prompt_len - self.num_replayed], np.array(generated, np.int64)))
        log_probs = replace(self.log_probs, skip_prompt=True)  # those of the prompt came with the first token
        return replace(self, prompt=prompt, num_replayed=len(generated), log_probs=log_probs)

    def as_mapping(self) -> dict[str, Any]:
        """Return all but the id and the prompt in types that msgpack can serialize; `mcore.request_spec` reads it."""
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
        }


def packed_ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return integers as a vector, in less than half the time that NumPy takes.

    Raises:
        OverflowError: If one has more than 64 bits.
        TypeError: If one is no integer.
    """
    ids = np.empty(len(tokens), np.int64)
    try:
        pack_into(f"{len(tokens)}q", ids.data, 0, *tokens)
    except PackError as error:
        kind = OverflowError if all(isinstance(token, Integral) for token in tokens) else TypeError
        raise kind(f"need integers of 64 bits: {error}") from error
    return ids
