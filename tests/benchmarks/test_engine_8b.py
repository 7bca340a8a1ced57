"""The whole-engine benchmark runs on any machine with tiny models and detects differences."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.command_line.command_runs import REPOSITORY, run_process, run_script_here

SCRIPT = REPOSITORY / "benchmarks" / "engine_8b.py"


@pytest.fixture
def engine_8b(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("engine_8b")


@pytest.fixture
def runs(engine_8b: ModuleType) -> ModuleType:
    return import_module("loads.shared_prefix_runs")


@pytest.fixture
def tiny_model(engine_8b: ModuleType) -> torch.nn.Module:
    return engine_8b.random_model(engine_8b.SCALES["tiny"].shape.fields, torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["tiny", "tiny-experts", "tiny-granite", "tiny-qwen"])
def test_tiny_models_give_the_same_logits_with_and_without_a_cache(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "figures.json"
    finished = run_process(SCRIPT, "--shape", shape, "--json", file, cwd=tmp_path)
    assert finished.status == 0, finished.stderr
    figures = json.loads(file.read_text())
    logits, tokens, speed = figures["logits"], figures["tokens"], figures["speed"]
    *compared, control = logits["differences"].values()
    assert logits["holds"] and [pair["positions"] for pair in compared] == [4 * 4] * 5
    assert logits["lost states would show"] and control["largest"] > max(pair["largest"] for pair in compared)
    assert logits["spread of the logits"] > 0.01
    assert logits["prompt tokens skipped"] == 3 * 128 + 192
    assert tokens["requests compared"] == tokens["equal requests"] == 10 and tokens["requests that differ"] == []
    assert 0 < tokens["largest difference of logits"] < 1e-4
    assert (speed["cold"]["skipped"], speed["again"]["skipped"]) == (0, 3 * 192)
    assert speed["again"]["decode tokens/s"] > 0
    assert "Cached runs differ no more than uncached runs, up to a factor of 1.1: yes." in finished.stdout
    assert "| cold | " in finished.stdout and "Seconds: building" in finished.stdout


def test_benchmark_fails_if_a_request_has_no_prefix_hit(
    engine_8b: ModuleType, runs: ModuleType, tiny_model: torch.nn.Module
) -> None:
    scale = engine_8b.SCALES["tiny"]
    uncached = engine_8b.config_of(scale, prefix_caching=False)
    with pytest.raises(RuntimeError, match="did not find the prefix of 128 tokens"):
        runs.serve_cached(tiny_model, uncached, scale.workload)


def test_different_prefix_changes_the_logits(
    engine_8b: ModuleType, runs: ModuleType, tiny_model: torch.nn.Module
) -> None:
    uncached = engine_8b.config_of(engine_8b.SCALES["tiny"], prefix_caching=False)
    prompts = {1: list(range(40)), 2: list(range(7, 47))}
    served = runs.serve_uncached(tiny_model, uncached, prompts, 3, alone=True)
    together = runs.serve_uncached(tiny_model, uncached, prompts, 3, alone=False)
    others = runs.serve_uncached(tiny_model, uncached, {1: [0, 0, *range(2, 40)], 2: prompts[2]}, 3, alone=True)
    assert runs.difference(served, together).largest < 1e-5
    assert runs.difference(served, others).largest > 1e-3


def test_lost_cached_states_change_the_logits(
    engine_8b: ModuleType, runs: ModuleType, tiny_model: torch.nn.Module
) -> None:
    scale = engine_8b.SCALES["tiny"]
    with_cache, without = (engine_8b.config_of(scale, prefix_caching=caches) for caches in (True, False))
    cached, prompts = runs.serve_cached(tiny_model, with_cache, scale.workload)
    alone = runs.serve_uncached(tiny_model, without, prompts, scale.workload.reply, alone=True)
    lose = runs.TracedEngine.lose_states
    broken = runs.serve_cached_together(tiny_model, with_cache, scale.workload, prompts, lose)
    healthy, lost = runs.difference(cached, alone), runs.difference(broken, alone)
    assert healthy.largest < 1e-5 and lost.largest > 100 * healthy.largest
    assert not engine_8b.are_no_larger([lost], [healthy])


def test_logits_are_compared_until_the_tokens_diverge(runs: ModuleType) -> None:
    def trace(tokens: list[int], *values: float) -> object:
        return runs.Trace(tokens, [torch.tensor([0.0, value, 2 * value]) for value in values])

    left = {0: trace([9], 99.0), 1: trace([5, 6, 7], 1.0, 2.0, 3.0), 2: trace([5], 1.0)}
    right = {0: trace([8], 0.0), 1: trace([5, 8, 7], 1.5, 2.25, 9.0), 2: trace([5], 1.0)}
    found = runs.difference(left, right)
    assert found == runs.Difference(positions=3, median=0.25, largest=1.0, mean_largest=0.5)


@pytest.mark.parametrize(("median", "largest", "holds"), [(1.05, 4.2, True), (1.2, 3.0, False), (0.5, 4.5, False)])
def test_tolerance_is_the_difference_between_uncached_runs(
    median: float, largest: float, holds: bool, engine_8b: ModuleType
) -> None:
    uncached = [engine_8b.Difference(8, 1.0, 3.0, 2.0), engine_8b.Difference(8, 0.5, 4.0, 2.0)]
    cached = [engine_8b.Difference(8, 0.1, 0.2, 0.2), engine_8b.Difference(8, median, largest, 2.0)]
    assert engine_8b.are_no_larger(cached, uncached) is holds


def test_first_reply_crosses_a_block_boundary_for_every_workload_size(engine_8b: ModuleType) -> None:
    for scale in engine_8b.SCALES.values():
        work, block = scale.workload, scale.shape.block_size
        prompt = work.shared + work.first
        assert work.shared % block == 0 and prompt // block < (prompt + work.first_reply - 1) // block


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes where there is a GPU")
def test_benchmark_reports_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_script_here(capsys, SCRIPT)
    assert finished.status == 2 and "needs a CUDA device, or --shape tiny" in finished.stderr
