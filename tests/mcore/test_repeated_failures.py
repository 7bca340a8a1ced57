"""A request that makes steps fail repeatedly is found and fails alone; reports lose nothing to an error."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_mamba_cache.mcore import engine as engine_module
from megatron_mamba_cache.mcore.step_report import failure_reason
from megatron_mamba_cache.policy.scheduler import FAILURES_BEFORE_ISOLATION, FAILURES_BEFORE_REFUSAL
from megatron_mamba_cache.step import runner as runner_module
from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.injected_errors import InjectedError, finish_through_errors, raise_once, raise_where

NUM_TOKENS = 6
POISONED = 2


def start_run(num_requests: int = 4, **settings: Any) -> EngineRun:
    """Return an engine with requests of one prefix, except the failing one, whose prompt takes two steps."""
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes, max_tokens=48, **settings))
    for request_id in range(num_requests):
        run.add(request_id, some_tokens(30 + 15 * request_id, seed=int(request_id == POISONED)), NUM_TOKENS)
    return run


def assert_only_failure(run: EngineRun, poisoned: int = POISONED) -> None:
    """Assert that one request failed with its reason, and that all others finished."""
    reason = failure_reason(run.finished[poisoned])
    assert reason is not None and str(FAILURES_BEFORE_REFUSAL) in reason and "InjectedError" in reason
    others = [request_id for request_id in run.prompts if request_id != poisoned]
    assert [len(run.tokens(request_id)) for request_id in others] == [NUM_TOKENS] * len(others)
    run.assert_matches_oracle().assert_few_stops()
    run.assert_nothing_held()


def _poisons_layout(run: EngineRun, num_generated: int) -> tuple[Any, str, Callable[..., bool]]:
    def is_error(requests: Sequence[Any], *_: Any, **__: Any) -> bool:
        prompt_len = len(run.prompts[POISONED])
        return any(
            request.request_id == POISONED and request.length >= prompt_len + num_generated for request in requests
        )

    return run.context.runner, "lay_out", is_error


def _poisons_planning(run: EngineRun, _: int) -> tuple[Any, str, Callable[..., bool]]:
    return run.context.cache, "plan", lambda candidate, *_, **__: candidate.spec.request_id == POISONED


def _poisons_next_chunk(run: EngineRun, _: int) -> tuple[Any, str, Callable[..., bool]]:
    return run.context.runner.cache, "continue_prefill", lambda request, *_, **__: request.request_id == POISONED


def test_request_that_cannot_be_scheduled_is_refused_and_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start_run()
    raise_where(monkeypatch, run.context.cache, "schedule_decode", lambda request, *_: request.request_id == POISONED)
    # Prefilled again, it makes one token each time, and with it a new start; so it comes to its end by itself.
    assert finish_through_errors(run) > 1
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [NUM_TOKENS] * 4
    run.assert_exact()


@pytest.mark.parametrize("num_generated", [0, 1, 3])
@pytest.mark.parametrize("poison", [_poisons_layout, _poisons_planning, _poisons_next_chunk])
def test_request_that_fails_every_step_is_refused_and_others_continue(
    poison: Callable[..., tuple[Any, str, Callable[..., bool]]], num_generated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run()
    raise_where(monkeypatch, *poison(run, num_generated))
    assert finish_through_errors(run) == FAILURES_BEFORE_REFUSAL
    assert_only_failure(run)
    assert len(run.tokens(POISONED)) == (num_generated if poison is _poisons_layout else 0)


def test_two_failing_requests_are_refused_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    poisoned = (0, 1)
    raise_where(
        monkeypatch,
        run.context.runner,
        "lay_out",
        lambda requests, *_, **__: any(request.request_id in poisoned for request in requests),
    )
    finish_through_errors(run)
    assert [request_id for request_id in range(4) if failure_reason(run.finished[request_id])] == [0, 1]
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [0, 0, NUM_TOKENS, NUM_TOKENS]
    run.assert_exact()


def test_requests_of_failed_steps_run_alone_until_each_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = start_run(), []
    lay_out = run.context.runner.lay_out

    def note_requests(requests: Sequence[Any], *arguments: Any, **settings: Any) -> Any:
        steps.append({request.request_id for request in requests})
        if len(steps) <= FAILURES_BEFORE_ISOLATION:
            raise InjectedError("the first steps")
        return lay_out(requests, *arguments, **settings)

    monkeypatch.setattr(run.context.runner, "lay_out", note_requests)
    assert finish_through_errors(run) == FAILURES_BEFORE_ISOLATION
    suspects = steps[0]
    assert suspects == {0, POISONED} and steps[1] == suspects
    assert steps[2:5] == [{0}, {POISONED}, {POISONED}], "the second prompt takes two steps"
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [NUM_TOKENS] * 4
    run.assert_exact()


def test_step_failures_with_tokens_in_between_fail_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(1)
    for _ in range(NUM_TOKENS - 1):
        for _ in range(FAILURES_BEFORE_REFUSAL - 1):
            with monkeypatch.context() as patch:
                raise_once(patch, runner_module, "verify_step")
                with pytest.raises(InjectedError):
                    run.step()
        run.step()
    run.finish()
    assert len(run.tokens(0)) == NUM_TOKENS
    run.assert_exact()


def test_keyboard_interrupts_fail_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.context.runner, "publish_prompts", interrupt)
        for _ in range(2 * FAILURES_BEFORE_REFUSAL):
            with pytest.raises(KeyboardInterrupt):
                run.step()
    run.finish()
    assert len(run.tokens(0)) == NUM_TOKENS
    run.assert_exact()


# Errors after the step, while it is reported.


@pytest.mark.parametrize("call", range(1, 9))
def test_detokenization_error_loses_no_token_or_report(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    raise_once(monkeypatch, run.engine.controller.tokenizer, "detokenize", call=call)
    assert finish_through_errors(run) == 1
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [NUM_TOKENS] * 4
    assert [run.engine.cached_tokens(request_id) for request_id in range(4)] == [0, 16, 0, 32]
    run.assert_exact()


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_blocks", [12, 200])
def test_error_between_the_reports_of_two_requests_loses_no_token(
    call: int, kv_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(kv_blocks=kv_blocks)
    # Megatron asks for each request of a step in which one ends, once it has appended the token.
    raise_once(monkeypatch, run.engine, "_check_stop_words_for_request_post_append", call=call)
    assert finish_through_errors(run) == 1
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [NUM_TOKENS] * 4
    run.assert_exact()


@pytest.mark.parametrize("call", [1, 2, 3])
def test_error_while_tokens_are_reported_loses_no_token(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    raise_once(monkeypatch, engine_module, "append_tokens", call=call)
    assert finish_through_errors(run) == 1
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [NUM_TOKENS] * 4
    run.assert_exact()


def test_request_whose_top_n_tokens_cannot_be_decoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes))
    wanted = greedy(NUM_TOKENS, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=2)
    run.add(0, some_tokens(20, seed=1), wanted)
    for request_id in (1, 2):
        run.add(request_id, some_tokens(20 * request_id), NUM_TOKENS)
    tokenizer = run.engine.controller.tokenizer
    raise_where(monkeypatch, tokenizer, "detokenize", lambda tokens: len(tokens) == 1)
    assert finish_through_errors(run) == FAILURES_BEFORE_REFUSAL
    assert_only_failure(run, poisoned=0)
