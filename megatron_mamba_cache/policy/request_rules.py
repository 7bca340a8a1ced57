"""Limits of an engine, and the check of each request against them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..config import CacheConfig
from .request_settings import LogProbSettings, RequestSpec, SamplingSettings


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits that every request must satisfy to run on an engine.

    Args:
        num_blocks: Maximum number of KV blocks per request.
        scores_prompts: True if the engine can compute prompt log-probabilities.
        ranks_prompts: True if the engine can also compute the rank of each prompt token.
    """

    config: CacheConfig
    vocab_size: int
    num_blocks: int
    scores_prompts: bool = False
    ranks_prompts: bool = False

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of prompt and generated tokens per request; the last token needs no KV block."""
        return min(self.config.max_sequence_length, self.num_blocks * self.config.block_size_tokens + 1)

    def error_of(self, spec: RequestSpec) -> str | None:
        """Return an error message with the value, limit and setting if a request can never run; None if it can."""
        sampling = spec.sampling
        problem = self._problem_of_prompt(spec.prompt) or self._problem_of_length(spec)
        problem = problem or _problem_of_sampling(sampling) or self._problem_of_log_probs(spec.log_probs)
        if problem is None and sampling.grammar and sampling.logits.min_tokens:
            least = sampling.logits.min_tokens
            problem = f"min_tokens is {least}, but a grammar determines where its reply ends; leave min_tokens out"
        if problem is None and spec.returns_routes and not self.config.record_routes:
            problem = "return_routed_experts requires an engine with record_routes=True (--record-routes)"
        return problem or sampling.logits.problem(self.vocab_size)

    def _problem_of_prompt(self, prompt: npt.NDArray[np.int64]) -> str | None:
        if prompt.ndim != 1:
            return f"the prompt has shape {prompt.shape}; it must be a vector of token ids"
        if not len(prompt):
            return "the prompt is empty; at least 1 token is needed"
        worst = prompt.min() if prompt.min() < 0 else prompt.max()
        if prompt.dtype != np.int64:
            worst = unfit_token(prompt.tolist()) or worst
        if isinstance(worst, float) or not 0 <= worst < self.vocab_size:
            last = self.vocab_size - 1
            return f"token {worst} in the prompt is outside the vocabulary of {self.vocab_size} (0 to {last})"
        return None

    def _problem_of_length(self, spec: RequestSpec) -> str | None:
        config, prompt_len, num_to_generate = self.config, spec.prompt_len, spec.max_tokens
        limit = config.max_sequence_length
        if prompt_len >= limit:
            return f"the prompt has {prompt_len} tokens; it must have fewer than max_sequence_length={limit}"
        if num_to_generate < 1:
            return (
                f"num_tokens_to_generate is {num_to_generate}; it must be at least 1 (num_tokens_total must exceed the "
                "prompt's length)"
            )
        tokens = f"{prompt_len} prompt tokens and {num_to_generate} to generate"
        if spec.max_len > limit:
            return f"{tokens} are {spec.max_len} tokens, more than max_sequence_length={limit}"
        needed = -(-(spec.max_len - 1) // config.block_size_tokens)  # the last sampled token is never an input
        if needed > self.num_blocks:
            return (
                f"{spec.max_len - 1} tokens need {needed} KV blocks, but there are only {self.num_blocks}; raise "
                "--cache-gb, or --inference-dynamic-batching-buffer-size-gb if that is set"
            )
        return None

    def _problem_of_log_probs(self, settings: LogProbSettings) -> str | None:
        prompt_top_n = settings.prompt_top_n
        if settings.top_n > 0 and not settings.wanted:
            return f"top_n_logprobs={settings.top_n} needs return_log_probs=True"
        if settings.of_prompt and not self.scores_prompts:
            return (
                "prompt log-probabilities are disabled: build the engine with scores_prompts=True or "
                "materialize_only_last_token_logits=False, or set skip_prompt_log_probs=True"
            )
        if prompt_top_n is not None and not settings.of_prompt:
            return f"prompt_top_n={prompt_top_n} needs return_log_probs=True and skip_prompt_log_probs=False"
        if prompt_top_n is not None and not self.ranks_prompts:
            return (
                f"prompt_top_n={prompt_top_n} needs an engine built with scores_prompts=True and "
                "materialize_only_last_token_logits=True"
            )
        for name, count in (("top_n_logprobs", settings.top_n), ("prompt_top_n", prompt_top_n or 0)):
            if not 0 <= count <= self.vocab_size:
                return f"{name} is {count}; it must be between 0 and the vocabulary size {self.vocab_size}"
        return None


def unfit_token(tokens: Iterable[object]) -> object | None:
    """Return the first token that is not a 64-bit integer; None if all tokens are."""
    return next((token for token in tokens if not (isinstance(token, int) and -(2**63) <= token < 2**63)), None)


def _problem_of_sampling(sampling: SamplingSettings) -> str | None:
    if 0 <= sampling.temperature < math.inf and 0 <= sampling.top_k < 2**31 and 0 <= sampling.top_p <= 1:
        return None
    return (
        "temperature must be finite and at least 0, top_k between 0 and 2**31 - 1, and top_p between 0 and 1, found "
        f"temperature={sampling.temperature}, top_k={sampling.top_k}, top_p={sampling.top_p}"
    )
