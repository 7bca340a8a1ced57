"""Recordings of two parts, between which the host prepares."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.kernels.attention.interface import attention_after
from megatron_mamba_cache.step import graphs
from megatron_mamba_cache.step.recorder import CudaRecorder
from tests.mcore.engine_runs import cache_config, tiny_hybrid
from tests.mcore.graph_stand_ins import ComputesAgain

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_attention_calls_what_comes_before_its_first_layer_once() -> None:
    calls: list[str] = []

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        calls.append("layer")
        return q + k_cache + v_cache

    planned, one = attention_after(lambda: calls.append("first"), attend), torch.ones(1)
    assert calls == []
    assert [planned(one, 2 * one, 3 * one).item() for _ in range(3)] == [6, 6, 6]
    assert calls == ["first", "layer", "layer", "layer"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recorder that notes takes the place of the real one")
def test_graphs_with_prompts_are_split_and_those_of_decode_rows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[int] = []

    class NotesSplits(ComputesAgain):
        def split(self) -> None:
            splits.append(1)

    monkeypatch.setattr(graphs, "CudaRecorder", NotesSplits)
    monkeypatch.setattr(graphs, "device_reason", lambda memory: None)
    subject = tiny_hybrid()
    config = replace(cache_config(subject.sizes), num_cuda_graphs=2, cuda_graph_prefill_tokens=40)
    engine = build_engine(subject.model, config)
    shapes = list(engine.context.runner.graphs.shapes)
    num_with_prompts = sum(shape.num_prefill_tokens > 0 for shape in shapes)
    assert 0 < num_with_prompts < len(shapes)
    # What is drawn behind the logits is recorded apart, without attention. A replay here computes again, and splits.
    assert len(splits) == num_with_prompts


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("splits", [True, False])
def test_the_host_prepares_before_the_second_part_of_each_replay(splits: bool) -> None:
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
        replay()
        replay_other()
        torch.cuda.synchronize()
        assert doubled.tolist() == [2 * number] * 4 and tripled.tolist() == [3 * number] * 4
        assert total.tolist() == [2 * number + 100 * number] * 4
    assert prepared == [0, 1, 2] and recorder.num_bytes() > 0
