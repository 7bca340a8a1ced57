"""Log-probs equal the oracle's for the requests that ask for them, and cost others nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.oracle_log_probs import TOLERANCE, assert_log_probs, assert_top_n, oracle_log_probs


def start_run(**settings: Any) -> EngineRun:
    """Return an engine that keeps the logits of every token."""
    subject = tiny_hybrid()
    return EngineRun.start(subject, cache_config(subject.sizes, **settings), materialize_only_last_token_logits=False)


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("max_tokens", [9, 24, 64])
def test_prompt_log_probs_match_the_oracle_under_chunked_prefill(max_tokens: int, align: bool) -> None:
    run = start_run(max_tokens=max_tokens, align_prefill_chunks=align)
    run.add(0, some_tokens(20, seed=1), 12)
    run.add(1, some_tokens(50), greedy(6, return_log_probs=True))
    run.add(2, some_tokens(33, seed=2), greedy(6, return_log_probs=True))
    run.finish()
    for request_id in (1, 2):
        assert_log_probs(run, request_id)
    run.assert_matches_oracle().assert_few_stops()


def test_request_with_prompt_log_probs_does_not_reuse_the_cache_but_fills_it() -> None:
    run = start_run()
    assert run.run(0, some_tokens(50), greedy(4, return_log_probs=True)) == 50
    assert run.run(1, some_tokens(50)) == 2
    assert run.run(2, some_tokens(50), greedy(4, return_log_probs=True)) == 50
    assert run.run(3, some_tokens(50) + some_tokens(40, seed=1), greedy(4, return_log_probs=True)) == 90
    assert run.run(4, some_tokens(50) + some_tokens(40, seed=1)) == 10
    assert [run.engine.cached_tokens(i) for i in range(5)] == [0, 48, 0, 0, 80]
    for request_id in (0, 2, 3):
        assert_log_probs(run, request_id)
    run.assert_matches_oracle().assert_few_stops()


@pytest.mark.parametrize("max_tokens", [24, 64])
def test_request_for_generated_log_probs_only_reuses_the_cache(max_tokens: int) -> None:
    run = start_run(max_tokens=max_tokens)
    run.run(0, some_tokens(50), 2)
    prompt = some_tokens(50) + some_tokens(40, seed=1)
    assert run.run(1, prompt, greedy(6, return_log_probs=True, skip_prompt_log_probs=True)) == 42
    request = run.finished[1]
    after = oracle_log_probs(run, 1).cpu()[len(prompt) - 1 : -1]
    wanted = after.gather(1, torch.tensor(run.tokens(1))[:, None])[:, 0].tolist()
    assert request.generated_log_probs == pytest.approx(wanted, abs=TOLERANCE)
    assert not request.prompt_log_probs


def test_log_probs_are_returned_only_for_requests_that_ask_for_them() -> None:
    run = start_run()
    run.add(0, some_tokens(30), greedy(6, return_log_probs=True))
    run.add(1, some_tokens(30, seed=1))
    run.finish()
    assert not run.finished[1].prompt_log_probs and not run.finished[1].generated_log_probs


def _suspend(run: EngineRun) -> None:
    run.engine.suspend()
    run.engine.resume()


def _fail_a_step(run: EngineRun) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raise_once(patch, run.context.runner, "land")
        with pytest.raises(InjectedError):
            run.step()


@pytest.mark.parametrize("interrupt", [_suspend, _fail_a_step])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 4, 6])
def test_interruption_does_not_change_log_probs(steps_before: int, interrupt: Callable[[EngineRun], None]) -> None:
    run = start_run(max_tokens=16)
    run.add(0, some_tokens(50), greedy(6, return_log_probs=True))
    for _ in range(steps_before):
        run.step()
    interrupt(run)
    run.finish()
    assert_log_probs(run, 0)


@pytest.mark.parametrize("interrupt", [None, _suspend, _fail_a_step])
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_top_n_log_probs_match_the_oracle(skip_prompt: bool, interrupt: Callable[[EngineRun], None] | None) -> None:
    run = start_run(max_tokens=24)
    run.add(0, some_tokens(20, seed=1), 9)
    settings = {"return_log_probs": True, "top_n_logprobs": 3, "skip_prompt_log_probs": skip_prompt}
    run.add(1, some_tokens(40), greedy(5, **settings))
    if interrupt is not None:
        for _ in range(5):
            run.step()
        interrupt(run)
    run.finish()
    log_probs = oracle_log_probs(run, 1).cpu()
    assert_top_n(run.finished[1].generated_top_n_logprobs, log_probs[39:-1])
    if skip_prompt:
        assert not run.finished[1].prompt_top_n_logprobs
    else:
        assert_top_n(run.finished[1].prompt_top_n_logprobs, log_probs[:39])
