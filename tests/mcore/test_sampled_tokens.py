"""Sampled tokens depend on the request, its seed and the model, not on the batch, the cache or interruptions."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from megatron.core.inference.sampling_params import SamplingParams

from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, tiny_hybrid
from tests.mcore.injected_errors import InjectedError, raise_once

NUM_TOKENS = 30
SETTINGS = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.5, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "all": {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
    "penalties": {"temperature": 0.7},
    "biases": {"temperature": 1.0, "top_p": 0.95},
    "min_p": {"temperature": 1.3},
}
CHANGES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": -0.3, "repetition_penalty": 1.4},
    "biases": {"logit_bias": [[5, 4.0], [7, -100.0], [9, 2.5]], "min_tokens": 12, "min_p": 0.01},
    "min_p": {"min_p": 0.3, "presence_penalty": 0.5},
}
"""The changes of logits of the settings that have some."""


def sampled(name: str) -> SamplingParams:
    """Return parameters of a sampled request."""
    params = SamplingParams(**SETTINGS[name], num_tokens_to_generate=NUM_TOKENS, termination_id=-1)
    add_fields(params, logits=CHANGES.get(name, {}))
    return params


def prompt_of(name: str) -> list[int]:
    """Return the prompt for some settings; prompts share a prefix."""
    rng = random.Random(0)
    shared = [rng.randrange(96) for _ in range(40)]
    rng = random.Random(name)
    return shared + [rng.randrange(96) for _ in range(10 + len(name))]


@cache
def tokens_alone(name: str, seed: int = 7) -> tuple[int, ...]:
    """Return the tokens that a request samples alone, without a cache."""
    run = start_run(prefix_caching=False)
    run.run(0, prompt_of(name), sampled(name), seed=seed)
    return tuple(run.tokens(0))


def start_run(**settings: Any) -> EngineRun:
    """Return an engine over the tiny model."""
    subject = tiny_hybrid()
    return EngineRun.start(subject, cache_config(subject.sizes, **({"max_tokens": 256} | settings)))


def in_a_batch() -> EngineRun:
    """Add every request at once, between greedy ones."""
    run = start_run()
    run.add(90, prompt_of("greedy"), 20)
    add_all(run)
    run.add(91, prompt_of("other"), 3)
    return run


def from_the_cache() -> EngineRun:
    """Prefill every prompt first, so that each is a hit."""
    run = start_run()
    for index, name in enumerate(SETTINGS):
        run.run(90 + index, prompt_of(name), 3)
    add_all(run)
    return run


def in_prefill_chunks() -> EngineRun:
    """Prefill in chunks that end anywhere."""
    run = start_run(max_tokens=13, align_prefill_chunks=False, prefix_caching=False)
    add_all(run)
    return run


def evicted() -> EngineRun:
    """Leave too few blocks for all of them."""
    run = start_run(kv_blocks=9, paused_blocks=0, block_size_tokens=16)
    add_all(run)
    return run


def suspended() -> EngineRun:
    """Suspend the engine half-way."""
    run = start_run()
    add_all(run)
    for _ in range(9):
        run.step()
    run.engine.suspend()
    run.engine.resume()
    return run


def after_a_failed_step() -> EngineRun:
    """Let a step fail half-way."""
    run = start_run()
    add_all(run)
    for _ in range(9):
        run.step()
    with pytest.MonkeyPatch.context() as patch:
        raise_once(patch, run.context.runner, "land")
        with pytest.raises(InjectedError):
            run.step()
    return run


def add_all(run: EngineRun) -> None:
    """Add a request for each of the settings."""
    for index, name in enumerate(SETTINGS):
        run.add(index, prompt_of(name), sampled(name), seed=7)


@pytest.mark.parametrize(
    "start", [in_a_batch, from_the_cache, in_prefill_chunks, evicted, suspended, after_a_failed_step]
)
def test_sampled_tokens_do_not_depend_on_batch_cache_or_interruption(start: Callable[[], EngineRun]) -> None:
    run = start()
    run.finish()
    for index, name in enumerate(SETTINGS):
        assert tuple(run.tokens(index)) == tokens_alone(name), name
    assert (run.counters.requests_evicted > 0) == (start is evicted)
    shares_prompts = start in (from_the_cache, in_a_batch)
    assert (run.engine.cached_tokens(0) > 0) == shares_prompts
    run.assert_nothing_held()


@pytest.mark.parametrize("name", SETTINGS)
def test_different_seeds_sample_different_tokens(name: str) -> None:
    assert tokens_alone(name, seed=7) != tokens_alone(name, seed=8)


def test_requests_without_a_seed_sample_differently_but_repeatably() -> None:
    replies = []
    for _ in range(2):
        run = start_run(prefix_caching=False)
        for request_id in (0, 1):
            run.add(request_id, prompt_of("all"), sampled("all"))
        run.finish()
        replies.append([run.tokens(0), run.tokens(1)])
    assert replies[0] == replies[1]
    assert replies[0][0] != replies[0][1]
