"""Settings change a request's logits as defined at every position; impossible ones are refused."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, some_tokens, tiny_hybrid
from tests.oracle import HybridOracle

NUM_TOKENS = 24
MARGIN = 1e-4
CHANGES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "reward": {"presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": [[3, 1.5], [11, -100], [40, 0.7]]},
    "all": {
        "logit_bias": [[3, 1.5]],
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
        "min_tokens": 7,
        "min_p": 0.5,
    },
}


def changed(
    settings: dict[str, Any], prompt: Sequence[int], generated: Sequence[int], logits: list[float]
) -> list[float]:
    """Return logits changed by the definitions of OpenAI and Hugging Face, one token at a time."""
    counts, values = Counter(generated), list(logits)
    for token, bias in settings.get("logit_bias", ()):
        values[token] += bias
    for token in {*prompt, *generated}:
        penalty = settings.get("repetition_penalty", 1.0)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in counts.items():
        values[token] -= settings.get("frequency_penalty", 0.0) * count + settings.get("presence_penalty", 0.0)
    return values


def run_with(prompt: Sequence[int], settings: dict[str, Any], **sampling: Any) -> EngineRun:
    """Run one greedy request."""
    subject = tiny_hybrid()
    run, params = EngineRun.start(subject, cache_config(subject.sizes)), greedy(NUM_TOKENS, **sampling)
    add_fields(params, logits=settings)
    run.run(0, list(prompt), params)
    return run


@pytest.mark.parametrize("name", CHANGES)
def test_greedy_token_maximizes_the_logits_after_penalties_and_bias(name: str) -> None:
    prompt, settings = some_tokens(30), CHANGES[name]
    run = run_with(prompt, settings)
    tokens, oracle, num_compared = run.tokens(0), HybridOracle.from_megatron(run.subject.model), 0
    logits = oracle.logits([*prompt, *tokens]).tolist()
    for index, token in enumerate(tokens):
        values = changed(settings, prompt, tokens[:index], logits[len(prompt) - 1 + index])
        best, second = sorted(values, reverse=True)[:2]
        if best - second > MARGIN:
            assert values[token] == best, index
            num_compared += 1
    assert num_compared > NUM_TOKENS / 2
    assert tokens != run_with(prompt, {}).tokens(0)
    run.assert_nothing_held()


def test_neutral_penalties_change_no_token_and_track_no_seen_tokens() -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": [], "min_p": 0}
    prompt = some_tokens(30)
    run = run_with(prompt, neutral)
    assert run.tokens(0) == run_with(prompt, {}).tokens(0)
    assert run.engine.context.runner._changes._seen.is_empty


def test_no_request_ends_before_min_tokens() -> None:
    prompt = some_tokens(30)
    plain = run_with(prompt, {}).tokens(0)
    end, first = plain[3], plain.index(plain[3])
    assert run_with(prompt, {}, termination_id=end).tokens(0) == plain[: first + 1]
    longer = run_with(prompt, {"min_tokens": first + 5}, termination_id=end).tokens(0)
    assert end not in longer[: first + 4] and longer[:first] == plain[:first] and len(longer) >= first + 5
    params = greedy(NUM_TOKENS)
    add_fields(params, logits={"min_tokens": first + 5}, stop_token_ids=[end])
    run = run_with(prompt, {})
    run.run(1, prompt, params)
    assert run.tokens(1) == longer


def test_stop_tokens_end_a_request() -> None:
    prompt = some_tokens(30)
    run = run_with(prompt, {})
    plain, params = run.tokens(0), greedy(NUM_TOKENS)
    add_fields(params, stop_token_ids=[plain[9], plain[5]])
    run.run(1, prompt, params)
    end = min(plain.index(plain[9]), plain.index(plain[5]))
    assert run.tokens(1) == plain[: end + 1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"logits": {"logit_bias": [[96, 1.0]]}}, "logit_bias has token 96, outside the vocabulary of 96"),
    ({"logits": {"logit_bias": [[1, math.inf]]}}, "finite values"),
    ({"logits": {"logit_bias": [[1, 2, 3]]}}, "the settings of logits are"),
    ({"logits": {"logit_bias": "x"}}, "the settings of logits are"),
    ({"logits": {"penalty": 1}}, "needed is a mapping with keys of"),
    ({"logits": [1]}, "needed is a mapping with keys of"),
    ({"logits": {"frequency_penalty": math.nan}}, "frequency_penalty is nan"),
    ({"logits": {"repetition_penalty": 0}}, "repetition_penalty is 0.0"),
    ({"logits": {"min_p": 1.5}}, "min_p=1.5"),
    ({"logits": {"min_tokens": -1}}, "min_tokens=-1"),
    ({"stop_token_ids": "5"}, "stop_token_ids is '5'; it must be a list of token ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is [-1]"),
]


@pytest.mark.parametrize(("attributes", "words"), BAD)
def test_request_with_invalid_logit_settings_fails_and_others_continue(attributes: dict[str, Any], words: str) -> None:
    run, params = run_with(some_tokens(8), {}), greedy(4)
    add_fields(params, **attributes)
    run.add(1, some_tokens(8), params)
    run.add(2, some_tokens(8), 4)
    run.finish()
    assert words in str(run.finished[1].events[0].payload), run.finished[1].events
    assert len(run.tokens(2)) == 4
    run.assert_nothing_held()
