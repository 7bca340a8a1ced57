"""Recordings in two parts, between which the host prepares attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention.interface import AttentionRows, attention_after
from megatron_mamba_cache.kernels.attention.kv_values import UNSCALED, KVScales
from megatron_mamba_cache.kernels.attention.reference import CapturedReference
from megatron_mamba_cache.step.batch import StepBatch
from megatron_mamba_cache.step.decode_steps import DecodeStep, SentStep
from megatron_mamba_cache.step.memory import CacheMemory
from megatron_mamba_cache.step.recorder import CudaRecorder
from megatron_mamba_cache.step.step_graph import StepGraph
from tests.mcore.engine_runs import EngineRun, cache_config, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import ComputesAgain, capture_without_cuda
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.split_replays import ComputesInParts

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def start_captured(
    *, is_planned: bool, patch: pytest.MonkeyPatch, recorder: Callable[[], ComputesAgain] = ComputesAgain
) -> EngineRun:
    """Start an engine whose graphs are computed again instead of replayed, with attention that counts as planned."""
    capture_without_cuda(patch, recorder=recorder)
    patch.setattr(CapturedReference, "is_planned", is_planned)
    subject = tiny_hybrid()
    config = replace(cache_config(subject.sizes), num_cuda_graphs=2, cuda_graph_prefill_tokens=40)
    return EngineRun.start(subject, config)


def test_attention_is_prepared_once_before_the_first_attention_layer() -> None:
    calls: list[str] = []

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED, /) -> Tensor:
        calls.append("layer")
        return q + k_cache + v_cache

    planned, one = attention_after(lambda: calls.append("first"), attend), torch.ones(1)
    assert calls == []
    assert [planned(one, 2 * one, 3 * one).item() for _ in range(3)] == [6, 6, 6]
    assert calls == ["first", "layer", "layer", "layer"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recorder that notes takes the place of the real one")
@pytest.mark.parametrize("is_planned", [True, False])
def test_prefill_graphs_are_split_before_attention_if_it_needs_a_plan(
    is_planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[int] = []
    monkeypatch.setattr(ComputesAgain, "split", lambda self: splits.append(1))
    run = start_captured(is_planned=is_planned, patch=monkeypatch)
    shapes = list(run.context.runner.graphs.shapes)
    num_with_prompts = sum(shape.num_prefill_tokens > 0 for shape in shapes)
    assert 0 < num_with_prompts < len(shapes)
    assert len(splits) == (num_with_prompts if is_planned else 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replay computes again only where there is no CUDA")
@pytest.mark.parametrize("is_planned", [True, False])
def test_replayed_step_is_planned_once_before_its_attention(is_planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    has_new_blocks: list[bool] = []
    plan, note_next, lay_out = CapturedReference.plan_again, StepGraph._note_next, StepGraph.lay_out

    def noting_plan(self: CapturedReference, requests: AttentionRows) -> None:
        events.append(("plan", requests.kv_lens))
        plan(self, requests)

    def noted(graph: StepGraph, batch: StepBatch) -> StepBatch:
        laid_out = "laid out", batch.attention.kv_lens
        if graph._unplanned is not None and events[-1:] != [laid_out]:
            events.append(laid_out)
        return batch

    def noting_next(self: StepGraph, before: SentStep, step: DecodeStep) -> StepBatch:
        has_new_blocks.append(step.has_new_blocks)
        return noted(self, note_next(self, before, step))

    def noting_lay_out(self: StepGraph, *args: object, **settings: object) -> StepBatch:
        return noted(self, lay_out(self, *args, **settings))

    run = start_captured(is_planned=is_planned, patch=monkeypatch)
    monkeypatch.setattr(CapturedReference, "plan_again", noting_plan)
    monkeypatch.setattr(StepGraph, "_note_next", noting_next)
    monkeypatch.setattr(StepGraph, "lay_out", noting_lay_out)
    for index in range(4):
        run.add(index, some_tokens(11 + 7 * index, seed=index), 9)
    run.finish()
    run.assert_matches_oracle()
    laid_out, planned = events[::2], events[1::2]
    print(f"{len(planned)} plans, {sum(has_new_blocks)} of steps that go on in new blocks")
    assert 0 < sum(has_new_blocks) < len(has_new_blocks)
    assert planned and [lengths for _, lengths in laid_out] == [lengths for _, lengths in planned]
    assert {name for name, _ in laid_out} == {"laid out"} and {name for name, _ in planned} == {"plan"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replay computes again only where there is no CUDA")
def test_prompt_with_blocks_beyond_the_graphs_range_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedReference, "last_block", 3)
    run = start_captured(is_planned=True, patch=monkeypatch)
    for index in range(5):
        run.add(index, some_tokens(29, seed=index), 2)
        graphs_before, last = run.counters.graph_steps, -1
        while not run.engine.get_request(index).generated_tokens:
            run.step()
            last = max([last, *(block for request in run.context.running_requests for block in request.block_ids)])
        assert (run.counters.graph_steps > graphs_before) is (last <= 3), last
    run.finish()
    run.assert_matches_oracle()
    print(f"{run.counters.graph_steps} of {run.counters.steps} steps in graphs, blocks up to {last}")
    assert last > 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replay computes again only where there is no CUDA")
@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_failed_attention_plan_loses_no_token(number: int, is_planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []

    def failing_once(self: CapturedReference, requests: AttentionRows) -> None:
        plans.append(1)
        if len(plans) == number + 1:
            raise RuntimeError("no plan")

    run = start_captured(is_planned=is_planned, patch=monkeypatch)
    monkeypatch.setattr(CapturedReference, "plan_again", failing_once)
    for index in range(3):
        run.add(index, some_tokens(11 + 7 * index, seed=index), 30)
    with pytest.raises(RuntimeError, match="no plan"):
        run.finish()
    run.finish()
    run.assert_matches_oracle()
    print(f"{len(plans)} plans")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replay computes again only where there is no CUDA")
@pytest.mark.parametrize(("failing_call", "begun", "dropped"), [(None, 8, 0), (1, 9, 1), (2, 9, 0), (6, 9, 1)])
def test_graph_replay_begins_after_the_step_is_planned_and_ends_on_an_error(
    failing_call: int | None, begun: int, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is prepared before, and states written by the first part are not used again."""
    recorder = ComputesInParts()
    prepare, prepared = CacheMemory.prepare, []

    def noting_prepare(*args: Any) -> None:
        prepared.append(recorder.begun)
        prepare(*args)

    run = start_captured(is_planned=True, patch=monkeypatch, recorder=lambda: recorder)
    monkeypatch.setattr(CacheMemory, "prepare", noting_prepare)
    if failing_call is not None:
        raise_once(monkeypatch, run.context.runner, "begin", call=failing_call)
    num_errors = 0
    for index in range(8):  # the last four skip what the first four computed
        run.add(index, some_tokens(29 + index % 4, seed=index % 4), 5)
        try:
            run.finish()
        except InjectedError:
            num_errors += 1
            run.finish()
    run.assert_matches_oracle()
    print(f"{recorder.begun} begun, {recorder.dropped} of them dropped, {run.counters.graph_steps} steps in graphs")
    assert (recorder.begun, recorder.dropped) == (begun, dropped) and set(range(begun)) <= set(prepared)
    assert num_errors == (failing_call is not None) and run.counters.prompt_tokens_skipped > 0


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("splits", [True, False])
def test_host_callback_runs_before_the_second_half_of_each_replay(splits: bool) -> None:
    recorder, prepared = CudaRecorder(), []
    source, plan = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def compute() -> tuple[Tensor, ...]:
        doubled = 2 * source
        if splits:
            recorder.split()
        return doubled, doubled + plan

    def prepare() -> None:
        prepared.append(len(prepared))
        plan.fill_(100 * len(prepared))

    (doubled, total), replay = recorder.record(compute, prepare)
    (tripled,), replay_other = recorder.record(lambda: (3 * source,))
    assert prepared == []
    for number in range(1, 4):
        source.fill_(number)
        replay.begin()
        assert len(prepared) == number - 1
        replay.finish()
        replay_other()
        torch.cuda.synchronize()
        assert doubled.tolist() == [2 * number] * 4 and tripled.tolist() == [3 * number] * 4
        assert total.tolist() == [2 * number + 100 * number] * 4
    assert prepared == [0, 1, 2] and recorder.num_bytes() > 0
