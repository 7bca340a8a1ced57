"""Requests end with their end token or stop word, despite interruptions."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from tests.mcore.engine_runs import EngineRun, cache_config, greedy, tiny_hybrid
from tests.mcore.injected_errors import InjectedError, raise_once

NUM_TOKENS = 24


def start_run(**settings: Any) -> EngineRun:
    """Return an engine over a model whose vocabulary is the bytes."""
    return EngineRun.start(tiny_hybrid(vocab_size=256), **settings)


def prompt_and_reply() -> tuple[list[int], list[int]]:
    """Return a prompt and the model's greedy reply."""
    rng = random.Random(0)
    prompt = [rng.randrange(256) for _ in range(20)]
    run = start_run()
    run.run(0, prompt, NUM_TOKENS)
    return prompt, run.tokens(0)


def first_end_of(word: list[int], tokens: list[int]) -> int:
    """Return the number of tokens up to the end of the first occurrence of `word`."""
    return next(end for end in range(len(word), len(tokens) + 1) if tokens[end - len(word) : end] == word)


def as_text(tokens: list[int]) -> str:
    """Return the tokens as words of `TokenIdTokenizer`."""
    return " ".join(map(str, tokens))


def test_request_ends_with_its_termination_id() -> None:
    prompt, reply = prompt_and_reply()
    run = start_run()
    run.run(0, prompt, greedy(NUM_TOKENS, termination_id=reply[9]))
    assert run.tokens(0) == reply[: reply.index(reply[9]) + 1]
    run.assert_nothing_held()


@pytest.mark.parametrize("length", [1, 2, 4])
def test_request_ends_in_the_step_that_completes_a_stop_string(length: int) -> None:
    prompt, reply = prompt_and_reply()
    word = reply[10 : 10 + length]
    run = start_run()
    run.run(0, prompt, greedy(NUM_TOKENS, stop_words=[as_text([1, 2, 3]), as_text(word)]))
    assert run.tokens(0) == reply[: first_end_of(word, reply)]
    assert run.num_steps == len(run.tokens(0))
    run.assert_nothing_held()


def test_stop_string_of_a_text_tokenizer_ends_a_request() -> None:
    prompt, reply = prompt_and_reply()
    start = next(i for i in range(2, NUM_TOKENS - 2) if max(reply[i : i + 2]) < 128)  # two bytes that are text
    word = reply[start : start + 2]
    run = start_run(tokenizer=ByteTokenizer())
    run.run(0, prompt, greedy(NUM_TOKENS, stop_words=[bytes(word).decode()]))
    assert run.tokens(0) == reply[: first_end_of(word, reply)]


def test_stop_string_that_begins_in_the_prompt_does_not_end_a_request() -> None:
    prompt, reply = prompt_and_reply()
    run = start_run()
    run.run(0, prompt, greedy(NUM_TOKENS, stop_words=[as_text([prompt[-1], reply[0]])]))
    assert run.tokens(0)[: len(reply[:2])] == reply[:2]


def _suspend(run: EngineRun) -> None:
    run.engine.suspend()
    run.engine.resume()


def _fail_a_step(run: EngineRun) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raise_once(patch, run.context.runner, "publish_prompts")
        with pytest.raises(InjectedError):
            run.step()


@pytest.mark.parametrize("interrupt", [_suspend, _fail_a_step])
@pytest.mark.parametrize("already_generated", [0, 1, 2])
def test_stop_string_is_matched_across_an_interruption(
    interrupt: Callable[[EngineRun], None], already_generated: int
) -> None:
    prompt, reply = prompt_and_reply()
    word = reply[10:13]
    end = first_end_of(word, reply)
    run = start_run()
    run.add(0, prompt, greedy(NUM_TOKENS, stop_words=[as_text(word)]))
    for _ in range(end - 3 + already_generated):
        run.step()
    interrupt(run)
    run.finish()
    assert run.tokens(0) == reply[:end]


def test_stop_string_is_matched_across_an_eviction() -> None:
    subject = tiny_hybrid(vocab_size=256)
    prompt, reply = prompt_and_reply()
    rng = random.Random(1)
    other = [rng.randrange(256) for _ in range(20)]
    config = cache_config(subject.sizes, block_size_tokens=8, kv_blocks=8, paused_blocks=0)
    for start in range(1, NUM_TOKENS - 2):
        run = EngineRun.start(subject, config)
        word = reply[start : start + 3]
        run.add(0, other, 30)
        run.add(1, prompt, greedy(NUM_TOKENS, stop_words=[as_text(word)]))
        run.finish()
        assert run.tokens(1) == reply[: first_end_of(word, reply)]
    assert run.counters.requests_evicted
