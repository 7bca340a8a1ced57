"""An fp64 oracle without a cache for each token of a reply, with every setting of a request.

Written token by token from the definitions of the settings. It shares two things with the package: a random number is a
function of a request's seed and the token's position, and a grammar allows what its matcher says.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.policy.random_counter import DrawPurpose, counter_uniform
from tests.grammars.allowed_tokens import allowed_tokens
from tests.mcore.engine_runs import OracleTally
from tests.oracle import ROUTING_MARGIN, HybridOracle

MARGIN = 1e-5
"""Tolerance of logits; a tenth of it applies to probabilities and random numbers."""
TOLERANCE = 1e-4
"""Tolerance of log-probs."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a request, as a test knows them.

    Args:
        logits: Keys as in `LogitsSettings`.
        ends: The single tokens that end the reply.
    """

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    logits: dict[str, Any] = field(default_factory=dict)
    grammar: str = ""
    ends: tuple[int, ...] = ()


def check_reply(oracle: HybridOracle, prompt: Sequence[int], reply: Sequence[int], asked: Asked) -> OracleTally:
    """Assert that each token of a reply is the one that its settings choose; count those too close to decide."""
    logits, gaps = oracle.logits_and_gaps([*prompt, *reply])
    of_reply = slice(len(prompt) - 1, -1)
    logits, is_sure = logits[of_reply].cpu(), (gaps.cummin(0).values[of_reply] >= ROUTING_MARGIN).tolist()
    if asked.grammar:
        allowed = allowed_tokens(asked.grammar, reply, logits.shape[1])
        logits = logits.masked_fill(~allowed, -math.inf)
    tally = OracleTally()
    for index, token in enumerate(reply):
        values = changed_logits(logits[index].tolist(), prompt, reply[:index], asked)
        choices = _choices(values, len(prompt) + index, asked) if is_sure[index] else range(len(values))
        assert token in choices, (
            f"token {index} of the reply is {token}, needed {choices}: after {len(prompt)} prompt tokens, {asked}"
        )
        tally.add(OracleTally(1, int(len(choices) > 1)))
    return tally


def changed_logits(values: list[float], prompt: Sequence[int], generated: Sequence[int], asked: Asked) -> list[float]:
    """Return logits changed by the definitions of OpenAI and Hugging Face."""
    settings, counts, values = asked.logits, Counter(generated), list(values)
    for token, bias in settings.get("logit_bias", ()):
        values[token] += bias
    if len(generated) < settings.get("min_tokens", 0):
        for token in asked.ends:
            values[token] = -math.inf
    penalty = settings.get("repetition_penalty", 1.0)
    for token in {*prompt, *generated} if penalty != 1.0 else ():
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in counts.items():
        values[token] -= settings.get("frequency_penalty", 0.0) * count + settings.get("presence_penalty", 0.0)
    return values


def _choices(values: list[float], position: int, asked: Asked) -> list[int]:
    """Return the token at a position of the text; several if rounding may choose any of them."""
    if asked.top_k == 1 or asked.temperature == 0:
        best = max(values)
        return [token for token, value in enumerate(values) if value > best - MARGIN]
    uniform = counter_uniform(asked.seed, position, DrawPurpose.SAMPLE)
    near = (-MARGIN / 10, MARGIN / 10)
    return sorted({_sampled(values, uniform + by, asked, shift) for by in near for shift in near})


def _sampled(values: list[float], uniform: float, asked: Asked, shift: float) -> int:
    """Return the token whose interval of the cumulative probability contains the random number, ids in order.

    Args:
        shift: Of the limits of `min_p` and `top_p`.
    """
    best, temperature = max(values), asked.temperature
    least = asked.logits.get("min_p", 0.0) * (1 + shift)
    weights = [math.exp((value - best) / temperature) for value in values]
    weights = [weight if weight >= least else 0.0 for weight in weights]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = ranked[: asked.top_k or None]
    if 0 < asked.top_p < 1:
        limit, before, nucleus = (asked.top_p + shift) * sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if before < limit:
                nucleus.append(token)
            before += weights[token]
        kept = nucleus
    kept = sorted(token for token in kept if weights[token])
    target, before = uniform * sum(weights[token] for token in kept), 0.0
    for token in kept:
        before += weights[token]
        if before > target:
            return token
    return kept[-1]


def check_log_probs(oracle: HybridOracle, prompt: Sequence[int], request: Any) -> None:
    """Assert that a finished request has the log-probs it asked for, of the model's own logits, and no others."""
    text, sampling, num_prompt = [*prompt, *request.generated_tokens], request.sampling_params, len(prompt) - 1
    after = oracle.logits(text).cpu()[:-1].log_softmax(-1)
    own = after.gather(1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    of_prompt = sampling.return_log_probs and not sampling.skip_prompt_log_probs
    of_reply = sampling.return_log_probs
    assert (request.prompt_log_probs or []) == pytest.approx(own[:num_prompt] if of_prompt else [], abs=TOLERANCE)
    assert (request.generated_log_probs or []) == pytest.approx(own[num_prompt:] if of_reply else [], abs=TOLERANCE)
    top_n = sampling.top_n_logprobs
    _check_best(request.prompt_top_n_logprobs or [], after[:num_prompt] if of_prompt and top_n else after[:0], top_n)
    _check_best(request.generated_top_n_logprobs or [], after[num_prompt:] if top_n else after[:0], top_n)


def _check_best(found: Sequence[dict[str, float]], after: Tensor, top_n: int) -> None:
    assert len(found) == len(after)
    for named, values in zip(found, after, strict=True):
        assert len(named) <= top_n and (len(named) == top_n or top_n > 1)  # tokens may have the same text
        best = values.topk(top_n).values.tolist()
        for value in named.values():
            assert any(abs(value - one) < TOLERANCE for one in best)
