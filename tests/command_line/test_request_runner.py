"""Prompt lines run on an engine directly, without a command."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, SupportsIndex

import pytest

from megatron_mamba_cache.build import TokenIdTokenizer
from megatron_mamba_cache.command_line.prompts import PromptLine
from megatron_mamba_cache.command_line.request_runner import RequestRunner, SamplingFlags
from megatron_mamba_cache.command_line.results import RunResult
from megatron_mamba_cache.mcore.engine import MambaCacheEngine
from tests.mcore.engine_runs import EngineRun, tiny_hybrid

UNFIT = [2**70]


class CountedTokens(list):
    """List of tokens that counts how many of its tokens are read."""

    def __init__(self, counter: list[int]) -> None:
        super().__init__()
        self._counter = counter

    def __iter__(self) -> Any:
        self._counter[0] += len(self)
        return super().__iter__()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        self._counter[0] += len(found) if isinstance(index, slice) else 1
        return found


def run_lines(
    lines: Sequence[PromptLine],
    engine: MambaCacheEngine,
    num_tokens: int,
    on_tokens: Callable[[int], object],
    image_tokens: Mapping[int, str] = MappingProxyType({}),
) -> RunResult:
    sampling = SamplingFlags(num_tokens, temperature=1.0, top_k=1, top_p=0.0)
    tokenizer = TokenIdTokenizer(engine.context.shape.vocab_size, image_tokens)
    return RequestRunner(engine, tokenizer, sampling, on_tokens).run(lines)


@pytest.mark.parametrize("position", [0, 2999])
def test_long_session_of_invalid_lines_finishes(position: int) -> None:
    prompts = [UNFIT] * 3000
    prompts[position] = [1, 2, 3]
    lines = [PromptLine(number, prompt, session="a") for number, prompt in enumerate(prompts)]
    result = run_lines(lines, EngineRun.start(tiny_hybrid()).engine, 2, lambda _: None)
    assert [record.request_id for record in result.completed] == [position]
    assert len(result.records) == 3000 and len(result.records[position].generated_tokens) == 2


def test_prompt_line_with_an_image_token_is_refused() -> None:
    lines = [PromptLine(0, [1, 5, 3], session="a"), PromptLine(1, [1, 2, 3], session="a")]
    engine = EngineRun.start(tiny_hybrid()).engine
    first, second = run_lines(lines, engine, 2, lambda _: None, {5: "image_token_id"}).records
    assert (first.error or "").startswith("the prompt has token 5 (image_token_id) at position 1")
    assert not first.generated_tokens and len(second.generated_tokens) == 2 and second.error is None


def test_request_runner_does_not_reread_all_tokens_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counter, reported = EngineRun.start(tiny_hybrid()).engine, [0], []
    add_request = engine.add_request

    def add_counted(request_id: int, *arguments: Any, **settings: Any) -> Any:
        future = add_request(request_id, *arguments, **settings)
        engine.requests[request_id].record[-1].generated_tokens = CountedTokens(counter)
        return future

    monkeypatch.setattr(engine, "add_request", add_counted)
    (record,) = run_lines([PromptLine(0, [1, 2, 3])], engine, 200, reported.append).records
    assert len(record.generated_tokens) == sum(reported) == 200
    assert counter[0] < 4 * 200, "a few readers of the whole reply at its end, but none at each step"


def test_tokens_of_an_interrupted_request_are_reported_once() -> None:
    engine, reported = EngineRun.start(tiny_hybrid()).engine, []

    def suspend_in_between(count: int) -> None:
        reported.append(count)
        if sum(reported) in (3, 5):
            engine.suspend()
            engine.resume()

    (record,) = run_lines([PromptLine(0, [1, 2, 3])], engine, 8, suspend_in_between).records
    assert len(record.generated_tokens) == sum(reported) == 8
