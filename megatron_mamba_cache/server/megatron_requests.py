"""The front end's requests as Megatron's: what can run, their parameters, and what comes back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams

from ..config import CacheConfig
from ..mcore.context import MambaCacheContext
from ..mcore.failure_reason import failure_reason
from ..mcore.request_spec import (
    BREAKPOINTS,
    GRAMMAR,
    LOGITS,
    PROMPT_TOP_N,
    STOP_TOKEN_IDS,
    TOP_N_BY_ID,
    fault_of,
    packed_ids,
)
from ..policy.logits_settings import PLAIN_LOGITS
from ..policy.request_settings import LogProbSettings, RequestSpec, SamplingSettings
from .backend import GenerationRequest, Progress


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The settings that decide whether a request can ever run."""

    config: CacheConfig
    vocab_size: int
    num_blocks: int

    @staticmethod
    def of(context: MambaCacheContext) -> "RequestRules":
        """Return the rules of a context's engine."""
        return RequestRules(context.cache_config, context.shape.vocab_size, context.max_blocks_of_a_request)

    @property
    def max_sequence_length(self) -> int:
        """The most prompt and generated tokens of a request; the last one needs no KV block."""
        return min(self.config.max_sequence_length, self.num_blocks * self.config.block_size_tokens + 1)

    def fault_of(self, request: GenerationRequest) -> str | None:
        """Return why the request can never run, with value, limit and setting; None if it can."""
        try:
            prompt = packed_ids(request.prompt)
        except (OverflowError, TypeError):
            fits = (isinstance(token, int) and -(2**63) <= token < 2**63 for token in request.prompt)
            unfit = next(token for token, does in zip(request.prompt, fits, strict=True) if not does)
            return f"token {unfit!r} in the prompt is outside the vocabulary of {self.vocab_size}"
        spec = RequestSpec(
            request_id=0,
            prompt=prompt,
            max_len=len(request.prompt) + request.max_tokens,
            sampling=SamplingSettings(request.temperature, request.top_k, request.top_p, logits=request.logits),
            log_probs=LogProbSettings(
                request.wants_log_probs,
                not request.computes_prompt,
                request.num_log_probs or 0,
                request.prompt_top_n,
            ),
        )
        return fault_of(spec, self.config, self.vocab_size, self.num_blocks)


@dataclass(slots=True)
class Listener:
    """The receiver of a request's progress.

    Args:
        end_ids: Tokens that end it before its length limit.
        num_tokens: Generated tokens that have been delivered.
    """

    deliver: Callable[[Progress], None]
    end_ids: frozenset[int]
    num_tokens: int = 0

    @staticmethod
    def of(request: GenerationRequest, deliver: Callable[[Progress], None], end_ids: frozenset[int]) -> "Listener":
        """Return the receiver of a request's progress; `end_ids` are the model's."""
        own: frozenset[int] = frozenset() if request.ignores_end else end_ids
        return Listener(deliver, own.union(request.stop_token_ids))


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """Return Megatron's sampling parameters for a request."""
    params = SamplingParams(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        num_tokens_to_generate=request.max_tokens,
        return_log_probs=request.wants_log_probs,
        skip_prompt_log_probs=not request.computes_prompt,
        top_n_logprobs=request.num_log_probs or 0,
        termination_id=-1 if request.ignores_end else None,
    )
    if request.num_log_probs:
        params.add_attributes({TOP_N_BY_ID: True})
    if request.logits is not PLAIN_LOGITS:
        params.add_attributes({LOGITS: request.logits.as_mapping()})
    if request.grammar:
        params.add_attributes({GRAMMAR: request.grammar})
    if request.stop_token_ids:
        params.add_attributes({STOP_TOKEN_IDS: list(request.stop_token_ids)})
    if request.prompt_top_n is not None:
        params.add_attributes({PROMPT_TOP_N: request.prompt_top_n})
    if request.breakpoints:
        params.add_attributes({BREAKPOINTS: list(map(list, request.breakpoints))})
    return params


def by_id(named: Sequence[Mapping[str, float]]) -> tuple[dict[int, float], ...]:
    """Return log-probs by token id, of which a record has the digits; see `TOP_N_BY_ID`."""
    return tuple({int(token): value for token, value in best.items()} for best in named)


def ended(progress: Progress, end_ids: frozenset[int], newest: Any) -> Progress:
    """Return a reply's last progress with the reason of its end, taken from the newest part of its record."""
    error = failure_reason(newest)
    if error is not None:
        return replace(progress, end="error", error=error)
    return replace(progress, end="stop" if progress.tokens and progress.tokens[-1] in end_ids else "length")
