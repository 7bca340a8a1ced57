"""Steps launched before the previous one has landed: their conditions, and events while they run.

Where there is no CUDA, a step is computed when it is launched; all else is as on a GPU.
"""

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.mcore.cpu import WallClockEvent
from megatron_mamba_cache.policy.kept_tokens import StepTokens
from megatron_mamba_cache.policy.requests import Candidate
from megatron_mamba_cache.speculation.prompt_lookup import PromptLookupDrafter
from megatron_mamba_cache.step import overlapped_step
from megatron_mamba_cache.step.step import Step
from megatron_mamba_cache.step.step_graph import StepGraph
from tests.mcore.engine_runs import EngineRun, add_fields, greedy, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.launch_records import rehearse_engine
from tests.mcore.oracle_log_probs import TOLERANCE, oracle_log_probs
from tests.mcore.overlapped_runs import (
    EVENTS_DURING_A_STEP,
    MAMBA2,
    is_ahead,
    recapture,
    start,
    step_until_ahead,
)
from tests.mcore.random_workloads import FLAVOURS, GATED_DELTA_MODELS, MODELS, make_workload, run_workload, undisturbed

pytestmark = pytest.mark.usefixtures("either_form")

GATED_DELTA = GATED_DELTA_MODELS[0]
KINDS = ["mamba2", "gated delta"]


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


def count_overlapped_steps(run: EngineRun) -> int:
    """Run all requests to their end and return the number of steps that ended with the next one launched."""
    num_early = 0
    while run.engine.has_unfinished_requests():
        run.step()
        num_early += is_ahead(run)
    run.assert_exact()
    run.assert_nothing_held()
    return num_early


@pytest.mark.parametrize("model", [MAMBA2, GATED_DELTA], ids=KINDS)
def test_most_decode_steps_overlap_and_advance_each_request_by_one_token(model: dict[str, Any]) -> None:
    run, num_ahead = start(model=model), 0
    num_steps = run.counters.steps
    while run.engine.has_unfinished_requests():
        before = {request.request_id: request.computed for request in run.context.running_requests}
        was_ahead = is_ahead(run)
        run.step()
        after = {request.request_id: request.computed for request in run.context.running_requests}
        if was_ahead:
            assert all(
                after[request_id] == computed + 1 for request_id, computed in before.items() if request_id in after
            )
        if is_ahead(run):
            assert after.keys() == before.keys()
            num_ahead += 1
        run.context.check_integrity()
    run.assert_exact()
    assert run.counters.steps - num_steps == 39
    assert num_ahead == 37
    assert run.counters.decode_rows == run.counters.decode_tokens_computed == 3 * 39


def test_every_step_but_the_first_overlaps() -> None:
    run = start(1, 30)
    assert run.context.block_size_tokens == 16  # 29 decode steps after 20 tokens come to the boundaries at 32 and 48
    assert count_overlapped_steps(run) == 28


@pytest.mark.parametrize(
    "settings",
    [
        {"run_ahead": False},
        {"rank_digest_steps": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_steps_do_not_overlap_when_disabled_or_when_ranks_are_compared(settings: dict[str, Any]) -> None:
    assert count_overlapped_steps(start(**settings)) == 0


SAMPLED = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.5, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "both": {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
}


def start_sampled(**settings: Any) -> EngineRun:
    """Return an engine with sampled requests of different settings, next to a greedy one."""
    run = start(1, 40, **settings)
    for request_id, sampling in enumerate(SAMPLED.values(), 1):
        params = SamplingParams(num_tokens_to_generate=40, termination_id=-1, **sampling)
        run.add(request_id, some_tokens(20 + request_id, seed=request_id), params, seed=request_id)
    return run


@cache
def sampled_tokens() -> dict[int, list[int]]:
    """Return the tokens of these requests without overlapped steps and cache."""
    run = start_sampled(run_ahead=False, prefix_caching=False)
    run.finish()
    return {request_id: run.tokens(request_id) for request_id in range(1 + len(SAMPLED))}


@pytest.mark.parametrize("settings", [{}, {"prefix_caching": False}, {"num_speculative_tokens": 3}], ids=str)
def test_overlapping_steps_changes_no_sampled_token(settings: dict[str, Any]) -> None:
    drafter = PromptLookupDrafter(min_match=3) if "num_speculative_tokens" in settings else None
    run, num_ahead = start_sampled(drafter=drafter, **settings), 0
    while run.engine.has_unfinished_requests():
        run.step()
        num_ahead += is_ahead(run)
    assert num_ahead > 15 or drafter is not None
    assert {request_id: run.tokens(request_id) for request_id in range(1 + len(SAMPLED))} == sampled_tokens()
    run.assert_nothing_held()


ASKED: dict[str, dict[str, Any]] = {
    "penalties": {"logits": {"presence_penalty": 2.5, "repetition_penalty": 1.3}},
    "biases and a least length": {"logits": {"logit_bias": [[7, 3.0], [11, -2.0]], "min_tokens": 30}},
    "log-probs": {"return_log_probs": True, "skip_prompt_log_probs": True},
    "best log-probs": {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 3},
    "penalties and log-probs": {
        "logits": {"frequency_penalty": 0.7},
        "return_log_probs": True,
        "skip_prompt_log_probs": True,
    },
}


@pytest.mark.parametrize(
    ("asked", "are_others_sampled"),
    [
        pytest.param(
            asked, others == "sampled", id=f"{name}-{others}", marks=() if point % 2 == at else pytest.mark.long
        )
        for point, (name, asked) in enumerate(ASKED.items())
        for at, others in enumerate(("greedy", "sampled"))
    ],
)
def test_steps_still_overlap_when_some_requests_ask_for_extra_outputs(
    asked: dict[str, Any], are_others_sampled: bool
) -> None:
    found = []
    for may_be_ahead in (True, False):
        run, num_ahead, num_steps = start_sampled(run_ahead=may_be_ahead), 0, 0
        for request_id, chosen in ((8, {}), (9, SAMPLED["both"] if are_others_sampled else {})):
            sampling = greedy(60, **chosen)
            add_fields(sampling, **asked)
            run.add(request_id, some_tokens(20, seed=request_id), sampling, seed=request_id)
        while len(run.context.running_requests) < 7 or any(
            request.is_prefilling for request in run.context.running_requests
        ):
            run.step()
        while run.engine.has_unfinished_requests():
            num_steps += 1
            num_ahead += is_ahead(run)
            run.step()
        assert num_ahead >= num_steps - 5 if may_be_ahead else not num_ahead  # steps wait where requests end
        run.assert_nothing_held()
        found.append(run)
    ahead, plain = found
    assert ahead.counters.decode_states_published == plain.counters.decode_states_published > 0
    for request_id in (*range(1 + len(SAMPLED)), 8, 9):
        assert ahead.tokens(request_id) == plain.tokens(request_id)
    for request_id in (8, 9):
        one, other = (run.finished[request_id] for run in found)
        assert bool(one.generated_log_probs) is ("return_log_probs" in asked)
        assert (one.generated_log_probs or []) == pytest.approx(other.generated_log_probs or [], abs=TOLERANCE)
        assert bool(one.generated_top_n_logprobs) is ("top_n_logprobs" in asked)
        best, others_best = one.generated_top_n_logprobs or [], other.generated_top_n_logprobs or []
        for named, same in zip(best, others_best, strict=True):
            assert named == pytest.approx(same, abs=TOLERANCE)
    if "return_log_probs" in asked:
        tokens, num_prompt = torch.tensor(ahead.prompts[8] + ahead.tokens(8)), len(ahead.prompts[8])
        wanted = oracle_log_probs(ahead, 8).cpu()[:-1].gather(1, tokens[1:, None])[num_prompt - 1 :, 0].tolist()
        assert ahead.finished[8].generated_log_probs == pytest.approx(wanted, abs=TOLERANCE)
    print(f"{num_steps} steps; request 8: {ahead.tokens(8)[:12]}")


def test_penalties_and_logit_biases_change_the_tokens() -> None:
    """Shows that the comparison above can fail."""
    texts = set()
    for asked in ({}, *ASKED.values()):
        run = start(1, 20)
        sampling = greedy(60)
        add_fields(sampling, **asked)
        run.run(8, some_tokens(20, seed=8), sampling)
        texts.add(tuple(run.tokens(8)))
    assert len(texts) == 4  # log-probs change nothing


def test_empty_stop_string_does_not_end_any_request() -> None:
    run = start(2, 20)
    run.add(2, some_tokens(20, seed=9), greedy(20, stop_words=["", ""]))
    assert count_overlapped_steps(run) > 15
    assert not run.counters.steps_aborted and len(run.tokens(2)) == 20


def test_steps_overlap_for_a_request_with_a_stop_string_of_two_tokens() -> None:
    alone = start(1, 20)
    alone.run(2, some_tokens(20, seed=9), greedy(40))
    tokens = alone.tokens(2)
    end = next(point for point in range(8, 40) if tuple(tokens[point - 1 : point + 1]) not in _pairs(tokens[:point]))
    run, num_ahead, num_steps = start(2, 40), 0, 0
    run.add(2, some_tokens(20, seed=9), greedy(40, stop_words=[f"{tokens[end - 1]} {tokens[end]}"]))
    while 2 not in run.engine.requests or not run.engine.get_request(2).generated_tokens:
        run.step()
    while 2 in run.engine.requests:
        num_steps += 1
        num_ahead += is_ahead(run)
        run.step()
    assert run.tokens(2) == tokens[: end + 1]
    assert num_ahead >= num_steps - 2 > 4
    run.finish()
    run.assert_exact()


def _pairs(tokens: list[int]) -> set[tuple[int, ...]]:
    return set(pairwise(tokens))


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["roomy", "tight_blocks", "disturbed"])
@pytest.mark.parametrize("changed_share", [pytest.param(0.0, marks=pytest.mark.long), 0.3])
@pytest.mark.parametrize("models", [MODELS, pytest.param(GATED_DELTA_MODELS, marks=pytest.mark.long)], ids=KINDS)
def test_sampled_tokens_do_not_depend_on_graphs_overlap_cache_or_drafts(
    name: str, seed: int, num_drafts: int, changed_share: float, models: Sequence[dict[str, Any]]
) -> None:
    """Compare graphs, overlapped steps, the cache, drafts and errors with a plain run."""
    shares = {"sampled_share": 0.6, "changed_share": changed_share}
    work = make_workload(FLAVOURS[name], 700 + seed, num_drafts, models=models, **shares)
    plain = undisturbed(work)
    plain = replace(plain, config=replace(plain.config, prefix_caching=False, run_ahead=False))
    expected = run_workload(plain).texts
    captured = replace(work, config=replace(work.config, num_cuda_graphs=3, cuda_graph_prefill_tokens=40))
    outcome = run_workload(captured, PromptLookupDrafter(min_match=1) if num_drafts else None)
    assert outcome.texts == expected and outcome.seen["graph_steps"]
    if not num_drafts:  # else few steps are without
        assert outcome.seen["early steps that need the host" if changed_share else "early steps"]


def test_steps_overlap_for_a_request_with_several_end_tokens() -> None:
    """Several tokens may end a reply, as in models with separate ends of a turn and a text."""
    subject = tiny_hybrid()
    alone = EngineRun.start(subject)
    alone.run(0, some_tokens(20, seed=9), greedy(20))
    tokens = alone.tokens(0)
    end = next(token for point, token in enumerate(tokens) if point > 6 and token not in tokens[:point])
    others = [token for token in range(96) if token not in tokens]
    run = start(2, 40)
    run.add(2, some_tokens(20, seed=9), greedy(20, termination_id=others[0], stop_words=[str(others[1]), str(end)]))
    num_ahead = 0
    while 2 in run.engine.requests:
        run.step()
        num_ahead += is_ahead(run)
    assert run.tokens(2) == tokens[: tokens.index(end) + 1] and num_ahead > 3
    run.finish()
    run.assert_exact()


def test_new_request_joins_after_the_running_step() -> None:
    run = start()
    step_until_ahead(run)
    run.add(3, some_tokens(25, seed=3), 20)
    run.step()
    assert len(run.context.running_requests) == 3 and not is_ahead(run)
    run.step()
    assert len(run.context.running_requests) == 4
    run.finish()
    run.assert_exact()


def test_nothing_is_scheduled_during_a_running_step() -> None:
    run = start()
    step_until_ahead(run)
    runner, scheduler = run.context.runner, run.engine.scheduler
    with pytest.raises(RuntimeError, match="is already running"):
        runner.step_requests.schedule(scheduler, ())
    assert is_ahead(run)
    run.finish()
    run.assert_exact()


def test_steps_overlap_while_waiting_requests_do_not_fit() -> None:
    run = start(max_requests=3)
    run.add(3, some_tokens(25, seed=3), 20)
    for _ in range(5):
        step_until_ahead(run)
        assert len(run.context.running_requests) == 3 and run.engine.waiting_request_ids
        run.step()
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize(
    ("model", "resident"),
    [(MAMBA2, False), (MAMBA2, True), (GATED_DELTA, False), pytest.param(GATED_DELTA, True, marks=pytest.mark.long)],
    ids=["mamba2", "mamba2, resident", "gated delta", "gated delta, resident"],
)
@pytest.mark.parametrize("name", EVENTS_DURING_A_STEP)
def test_flush_suspend_or_warmup_during_a_step_changes_no_token(
    name: str, resident: bool, model: dict[str, Any]
) -> None:
    run = start(resident_pools=resident, model=model)
    for _ in range(4):
        step_until_ahead(run)
        EVENTS_DURING_A_STEP[name](run)
        run.context.check_integrity()
        run.step()
        run.context.check_integrity()
    run.finish()
    run.assert_exact()
    run.assert_nothing_held()


@pytest.mark.parametrize("name", EVENTS_DURING_A_STEP)
def test_flush_suspend_or_warmup_during_a_step_changes_no_sampled_token(name: str) -> None:
    run = start_sampled()
    for _ in range(2):
        step_until_ahead(run)
        EVENTS_DURING_A_STEP[name](run)
        run.step()
    run.finish()
    assert {request_id: run.tokens(request_id) for request_id in range(1 + len(SAMPLED))} == sampled_tokens()
    run.assert_nothing_held()


def test_graph_capture_does_not_wait_for_a_running_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    step_until_ahead(run)
    waits, in_capture = [], [False]
    record = StepGraph.__init__

    def capture(*args: Any) -> None:
        in_capture[0] = True
        record(*args)
        in_capture[0] = False

    with monkeypatch.context() as patch:
        patch.setattr(StepGraph, "__init__", capture)
        patch.setattr(overlapped_step.torch.cuda, "synchronize", lambda: waits.append(in_capture[0]))
        run.context.runner.overlapped_steps.wait()
        with run.context.runner.rehearsing():
            pass
        if not torch.cuda.is_available():  # where a capture begins by waiting
            run.engine.create_cuda_graphs()
            waits.pop()  # for the graphs
    assert waits == [False]
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize("point", ["append_tokens", "land", "launch_next"])
def test_error_after_a_step_was_launched_early_loses_no_token(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_mamba_cache.mcore import engine as engine_module
    from megatron_mamba_cache.step import runner as runner_module

    run = start()
    step_until_ahead(run)
    owner: Any = {
        "append_tokens": (engine_module, "append_tokens"),
        "land": (runner_module, "advance_one_token_requests"),
        "launch_next": (run.context.runner.overlapped_steps, "launch"),
    }[point]
    with monkeypatch.context() as patch:
        raise_once(patch, *owner)
        with pytest.raises(InjectedError):
            while True:
                run.step()
    run.context.check_integrity()
    run.finish()
    run.assert_exact()
    run.assert_nothing_held()


def test_reading_live_states_during_an_overlapped_step_raises() -> None:
    run = start()
    step_until_ahead(run)
    with pytest.raises(CacheIntegrityError, match="run_ahead=False"):
        run.context.mamba_metadata  # noqa: B018 - reading it is what is refused
    while is_ahead(run):
        run.step()
    assert len(run.context.mamba_metadata.request_to_mamba_state_idx) == len(run.context.running_requests)


def test_overlapped_step_is_timed_from_the_end_of_the_previous_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    step_until_ahead(run)
    monkeypatch.setattr(run.engine, "_step_ended", run.engine._step_ended - 100.0)
    assert 100.0 < run.engine.step_modern()["step_time"] < 200.0


def test_step_timers_use_the_wall_clock_after_a_reset() -> None:
    run = start()
    run.engine.reset()
    assert isinstance(run.engine.step_start_event, WallClockEvent)
    assert isinstance(run.engine.step_end_event, WallClockEvent)


OVERLAPPED_POINTS: dict[str, Callable[[EngineRun], tuple[Any, str]]] = {
    "scheduling": lambda run: (run.engine, "schedule_waiting_requests"),
    "looking at the step": lambda run: (run.context, "is_decode_only"),
    "preparing the step": lambda run: (run.context.runner, "plan"),
    "landing": lambda run: (run.context.overlapped_step, "lay_out"),
}


@pytest.mark.parametrize("point", OVERLAPPED_POINTS)
def test_error_while_an_overlapped_step_runs_loses_no_token(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    for _ in range(3):
        step_until_ahead(run)
        with monkeypatch.context() as patch:
            raise_once(patch, *OVERLAPPED_POINTS[point](run))
            with pytest.raises(InjectedError):
                run.step()
        run.context.check_integrity()
        assert len(run.context.running_requests) == (0 if point == "landing" else 3)  # what is not begun has not failed
        run.step()
    run.finish()
    run.assert_exact()
    run.assert_nothing_held()


def test_failed_warmup_between_overlapped_steps_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    for _ in range(3):
        step_until_ahead(run)
        with monkeypatch.context() as patch:
            raise_once(patch, run.context.memory.step_buffers, "send")
            with pytest.raises(InjectedError):
                rehearse_engine(run)
        run.step()
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize("name", ["rehearsal", "capture", "drop"])
def test_step_buffers_are_not_written_until_the_overlapped_step_ends(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    step_until_ahead(run)
    events: list[str] = []
    buffers, synchronize = run.context.memory.step_buffers, torch.cuda.synchronize
    begin = buffers.begin
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: (events.append("wait"), synchronize()))
        patch.setattr(buffers, "begin", lambda: (events.append("write"), begin()))
        {"rehearsal": rehearse_engine, "capture": recapture, "drop": lambda run: run.engine._send_back([0, 1, 2])}[
            name
        ](run)
    assert events[0] == "wait"
    assert ("write" in events) is (name != "drop")
    run.finish()
    run.assert_exact()


def test_each_overlapped_step_is_waited_for_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    waits: list[None] = []
    monkeypatch.setattr(overlapped_step.torch.cuda, "synchronize", lambda: waits.append(None))
    for count in range(1, 4):
        step_until_ahead(run)
        for _ in range(2):
            run.context.runner.overlapped_steps.wait()
            assert len(waits) == count
        run.step()
    monkeypatch.undo()


def test_capturing_graphs_again_frees_the_graphs_of_an_overlapped_step() -> None:
    run = start()
    step_until_ahead(run)
    graphs = [weakref.ref(graph) for graph in run.context.graphs._graphs.values()]
    recapture(run)
    gc.collect()
    assert is_ahead(run) and not [graph for graph in graphs if graph() is not None]
    run.step()
    assert not is_ahead(run)
    run.finish()
    run.assert_exact()


def test_no_request_joins_an_overlapped_step() -> None:
    run = start()
    step_until_ahead(run)
    candidate = Candidate(run.context.running_requests[0].spec)
    with pytest.raises(RuntimeError, match="run_ahead=False"):
        run.context.admit(candidate, 100)
    run.finish()
    run.assert_exact()


def test_no_further_step_is_launched_when_the_caller_finishes_the_current_step() -> None:
    run = start()
    step_until_ahead(run)
    run.engine.schedule_waiting_requests()
    assert run.context.runner.queue.is_settled  # if the runner landed it, another would be launched
    step = run.engine.controller.async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True)
    result = run.engine._loop.run_until_complete(step)
    assert not is_ahead(run)
    ended = [request.request_id for request in run.context.running_requests][1]
    run.context.update_requests([1, 0, 1], result["sample"])
    assert (
        ended not in [request.request_id for request in run.context.running_requests]
        and len(run.context.running_requests) == 2
    )


def test_tokens_that_differ_from_the_input_of_the_overlapped_step_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    step_until_ahead(run)
    context = run.context
    fed = [request.generated[-1] for request in context.running_requests]
    batch = context.overlapped_step.lay_out(context.running_requests, draws_ratios=False)
    monkeypatch.setattr(context.runner, "_step", Step(batch))
    with pytest.raises(CacheIntegrityError, match="differ from the tokens its requests kept"):
        context.runner.land(StepTokens([(token + 1,) for token in fed]))
    assert [request.generated[-1] for request in context.running_requests] == fed
    context.runner.land(StepTokens([(token,) for token in fed]))
    assert [request.generated[-2:] for request in context.running_requests] == [[token, token] for token in fed]


def test_step_reports_are_the_same_with_and_without_overlap() -> None:
    reports, runs = [], [start(), start(run_ahead=False)]
    for run in runs:
        reports.append([])
        while run.engine.has_unfinished_requests():
            entries = dict(run.engine.requests)
            report = run.engine.step_modern()
            tpots = [len(entry.record[-1].tpot or ()) for entry in entries.values()]
            kept = [list(entry.record[-1].generated_tokens) for entry in entries.values()]
            assert tpots == [len(tokens) for tokens in kept]
            ended = [record.request_id for record in report["finished_request_records"]]
            reported = [report["active_request_ids"], ended, report["cuda_graph_request_count"], kept]
            reports[-1].append(reported)
    assert reports[0] == reports[1] and reports[0][-1][2] is not None


def test_request_queued_after_a_cancelled_one_is_admitted_promptly() -> None:
    run = start(1, 60, kv_blocks=5, paused_blocks=1, block_size_tokens=64, max_sequence_length=300)
    run.add(1, some_tokens(256, seed=1), 5)  # all five blocks, one of which is in use
    run.add(2, some_tokens(20, seed=2), 5)
    step_until_ahead(run)
    run.step()
    assert list(run.engine.waiting_request_ids) == [1, 2] and is_ahead(run)
    run.engine.cancel_request(1)
    run.step()
    run.step()
    assert 2 not in run.engine.waiting_request_ids
    run.finish()
    run.assert_exact()


def test_cancelling_a_request_during_a_step_raises() -> None:
    run = start()
    step_until_ahead(run)

    async def step_and_cancel() -> None:
        step = asyncio.ensure_future(run.engine.async_step())
        while not run.context.is_computing:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="between steps"):
            run.engine.cancel_request(1)
        await step

    run.engine._loop.run_until_complete(step_and_cancel())
    assert run.engine.cancel_request(1)
    run.finish()
    run.assert_exact()
