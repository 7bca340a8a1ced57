"""After an error in a report, every list of a request is as long as its tokens and equals an undisturbed run's."""

from functools import cache
from typing import Any

import pytest

from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.injected_errors import (
    ERROR_POINTS,
    REPORT_ERROR_POINTS,
    InjectedError,
    finish_through_errors,
    raise_once,
)
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.record_lists import assert_same_lists

NUM_TOKENS = {0: 7, 1: 9, 2: 6, 3: 8}
PROMPTS = {0: some_tokens(20, seed=1), 1: some_tokens(50), 2: some_tokens(33, seed=2), 3: some_tokens(12, seed=3)}
REQUESTED = {
    "log-probs": {"skip_prompt_log_probs": True},
    "top-n": {"skip_prompt_log_probs": True, "top_n_logprobs": 2},
    "prompt top-n": {"top_n_logprobs": 2},
}

POINTS = REPORT_ERROR_POINTS | {
    name: ERROR_POINTS[name] for name in ("before updating requests", "after updating requests")
}


def start_run(requested: str, num_drafts: int, **settings: Any) -> EngineRun:
    """Return an engine with four requests; the first one asks for no log-probs."""
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, **({"max_tokens": 24, "num_speculative_tokens": num_drafts} | settings))
    drafter = NoisyDrafter(plain_texts(), accuracy=0.8, vocab_size=96) if num_drafts else None
    run = EngineRun.start(subject, config, drafter=drafter, materialize_only_last_token_logits=False)
    for request_id, prompt in PROMPTS.items():
        wanted = {"return_log_probs": True, **REQUESTED[requested]} if request_id else {}
        run.add(request_id, prompt, greedy(NUM_TOKENS[request_id], **wanted))
    return run


@cache
def plain_texts() -> dict[int, list[int]]:
    run = EngineRun.start(tiny_hybrid())
    for request_id, prompt in PROMPTS.items():
        run.add(request_id, prompt, NUM_TOKENS[request_id])
    run.finish()
    return {request_id: prompt + run.tokens(request_id) for request_id, prompt in PROMPTS.items()}


@cache
def undisturbed(requested: str) -> EngineRun:
    """Return the same requests, finished without an error and without drafts."""
    run = start_run(requested, 0)
    run.finish()
    return run


@pytest.mark.parametrize("call", [1, pytest.param(4, marks=pytest.mark.long), 9])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("requested", REQUESTED)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_step_error_leaves_token_and_log_prob_lists_complete(
    num_drafts: int, requested: str, point: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(requested, num_drafts)
    calls = raise_once(monkeypatch, *POINTS[point](run), call=call)
    num_failed = finish_through_errors(run)
    assert num_failed == (calls[0] >= call)
    assert_same_lists(run, undisturbed(requested).finished)
    run.assert_exact()


@pytest.mark.parametrize("point", ["before the report", "the report", "after updating requests", "the last tokens"])
def test_error_in_an_overlapped_step_leaves_log_prob_lists_complete(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)
    run = start_run("prompt top-n", 0, num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
    for request_id in (10, 11):
        run.add(request_id, some_tokens(20, seed=request_id), 40)
    while any(request_id in run.engine.requests for request_id in PROMPTS) or run.context.overlapped_step is None:
        run.step()
    with monkeypatch.context() as patch:
        raise_once(patch, *POINTS[point](run))
        assert finish_through_errors(run) == 1
    run.assert_exact()
    alone = {request_id: run.finished.pop(request_id) for request_id in (10, 11)}
    assert [len(request.generated_tokens) for request in alone.values()] == [40, 40]
    assert [len(request.tpot) for request in alone.values()] == [40, 40]
    assert_same_lists(run, undisturbed("prompt top-n").finished)


def test_draft_counts_include_the_last_step_before_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    run, counts = start_run("log-probs", 3), {}

    def note(step_result: Any) -> None:
        ended = [] if step_result is None else step_result["finished_request_ids"].tolist()
        counts.update({request_id: run.engine.draft_counts(request_id) for request_id in ended})

    monkeypatch.setattr(run.engine, "_before_report", note)
    run.finish()
    assert counts == {request_id: run.engine.draft_counts(request_id) for request_id in PROMPTS}
    assert sum(count.accepted for count in counts.values()) > 0


def test_delayed_report_has_the_prompt_and_reply_text(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run("log-probs", 0)
    detokenize = run.engine.controller.tokenizer.detokenize
    raise_once(monkeypatch, run.engine.controller.tokenizer, "detokenize", call=3)
    assert finish_through_errors(run) == 1
    for request_id, request in run.finished.items():
        assert request.prompt == detokenize(PROMPTS[request_id])
        assert request.generated_text == detokenize(run.tokens(request_id))


def test_report_that_failed_while_suspended_is_sent_after_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start_run("log-probs", 0)
    run.step()
    run.engine.suspend()
    run.add(9, [])  # refused, and reported while the engine is suspended
    raise_once(monkeypatch, *REPORT_ERROR_POINTS["before the report"](run))
    with pytest.raises(InjectedError):
        run.engine._run_coroutine_sync(run.engine.async_bookkeep(None, {"kv_stats": None}, 0.0, run.num_steps))
    run.engine.resume()
    assert list(run.engine.waiting_request_ids) == list(NUM_TOKENS)
    run.finish()
    run.assert_matches_oracle(PROMPTS)
