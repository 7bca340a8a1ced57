"""The step benchmark with a tiny model: drafters, step times and fitted lines."""

import json
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pytest import approx

from megatron_mamba_cache.step.buffers import HostCopy
from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def step_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("step_cost")


@pytest.fixture
def serving_engine(step_cost: ModuleType) -> ModuleType:
    return import_module("loads.serving_engine")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes captured steps without CUDA")
def test_host_work_grows_slowly_with_the_number_of_requests(
    serving_engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_work = import_module("host_work")
    for name, count in (("NUM_PROFILED", 3), ("NUM_TIMED", 3), ("NUM_COUNTED", 30), ("NUM_REPLY", 100)):
        monkeypatch.setattr(host_work, name, count)
    model = serving_engine.model_of(serving_engine.SHAPES["tiny"])
    few, many = (host_work.host_work(model, num_rows) for num_rows in (2, 12))
    print(few, many)
    assert 300 < few.calls < many.calls < few.calls + 10 * 10 and few.milliseconds > 0
    apart = host_work.host_work(model, 12, spread=40)
    assert apart.overlapped == 1  # although requests reach the ends of blocks one by one


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes captured steps without CUDA")
def test_choice_between_drafters_takes_little_of_the_host_work_of_a_step(
    serving_engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_work = import_module("host_work")
    for name, count in (("NUM_PROFILED", 9), ("NUM_TIMED", 3), ("NUM_COUNTED", 3), ("NUM_DRAFTED_REPLY", 900)):
        monkeypatch.setattr(host_work, name, count)
    model = serving_engine.model_of(serving_engine.SHAPES["tiny"])
    for num_rows in (1, 24):
        head, auto = (host_work.host_work(model, num_rows, drafter=drafter).calls for drafter in ("mtp", "auto"))
        print(f"{num_rows} requests: {head} calls a step with the head's drafts, {auto} with the choice")
        assert head < auto < 1.2 * head


def test_steps_of_each_batch_size_are_timed(step_cost: ModuleType, serving_engine: ModuleType) -> None:
    shape = serving_engine.SHAPES["tiny"]
    costs = step_cost.step_costs(serving_engine.model_of(shape), shape, (1, 20), 72)
    assert [cost.num_rows for cost in costs] == [1, 20]
    assert all(cost.wall_ms > 0 for cost in costs)


def test_each_format_of_weights_is_compared_with_the_first(
    step_cost: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(step_cost, "NUM_STEPS", step_cost.PERIOD)
    flags = ["--shape", "tiny", "--weights", "bf16", "fp8", "nvfp4", "--rows", "2", "--no-drafts", "--num-graphs", "0"]
    monkeypatch.setattr("sys.argv", ["step_cost.py", *flags, "--json", str(tmp_path / "found.json")])
    step_cost.main()
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())["weights"]
    steps = {weights: modes["auto"]["steps"][0]["wall_ms"] for weights, modes in found.items()}
    assert [*steps] == ["bf16", "fp8", "nvfp4"]
    sizes = [modes["auto"]["weight_bytes"] for modes in found.values()]
    assert sizes == sorted(sizes, reverse=True) and f"Weights: nvfp4, {sizes[2] / 1e9:.2f} GB." in printed
    assert "| requests | fp8 / bf16, auto | nvfp4 / bf16, auto |" in printed
    assert f"| 2 | {steps['fp8'] / steps['bf16']:.3f} | {steps['nvfp4'] / steps['bf16']:.3f} |" in printed


def test_prompts_are_timed_with_quantized_weights(serving_engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, tiny = import_module("prefill"), serving_engine.SHAPES["tiny"]
    monkeypatch.setattr(prefill, "NUM_ROUNDS", 1)
    found = [
        one
        for weights in ("bf16", "fp8")
        for one in prefill.prefill(replace(tiny, weights=weights), 2, 100, measures_head=True)
    ]
    assert [one.has_head for one in found] == [False, True] * 2 and {one.num_tokens for one in found} == {200}
    assert found[0].weight_bytes == found[1].weight_bytes > 1.5 * found[2].weight_bytes
    for one in found[1:]:
        ratio = found[0].seconds[0] / one.seconds[0]
        assert f"| {one.tokens_per_s:,.0f} | {ratio:.3f} |" in prefill.table(found)


def test_requests_with_extra_outputs_are_timed(serving_engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    changed = import_module("changed_rows")
    for name, count in (("NUM_ROUNDS", 1), ("NUM_STEPS", 2)):
        monkeypatch.setattr(changed, name, count)
    shape = serving_engine.SHAPES["tiny"]
    found = changed.costs(serving_engine.model_of(shape), shape, 3, ["greedy"])
    assert [cost.case for cost in found] == [*changed.cases(["greedy"])] and all(cost.wall_ms > 0 for cost in found)
    assert found[0].of_first == found[0].of_plain == 1
    assert "| greedy, all log-probs | " in changed.table(found, {"median": 20.0})


def test_correct_drafts_are_all_accepted_and_wrong_drafts_never(
    step_cost: ModuleType, serving_engine: ModuleType
) -> None:
    shape = serving_engine.SHAPES["tiny"]
    speeds = step_cost.draft_speeds(serving_engine.model_of(shape), shape, 72, 41)
    assert [speed.accepted for speed in speeds.values()] == [0, 1, 0]
    rows = step_cost.DRAFT_ROWS
    # The prefill generates the first token, so ten steps of four tokens each generate the rest.
    assert [speed.tokens_per_step for speed in speeds.values()] == [rows, 4 * rows, rows]
    assert "| right drafts | " in step_cost.table([step_cost.StepCost(1, 2.0)], speeds)


@pytest.mark.parametrize("is_tied", [False, True])
def test_next_token_of_the_deterministic_model_depends_only_on_the_last(
    step_cost: ModuleType, serving_engine: ModuleType, is_tied: bool
) -> None:
    sure, tiny = import_module("loads.sure_model"), serving_engine.SHAPES["tiny"]
    shape = replace(tiny, fields=tiny.fields | {"tie_word_embeddings": is_tied})
    model = serving_engine.model_of(shape)
    sure.make_sure(model)
    prompts = [[5, 9, 7], [11] * 70]
    for prompt, reply in zip(prompts, step_cost.record(model, shape, prompts, 6, None).replies.values(), strict=True):
        assert reply == [(prompt[-1] + (1 + i) * 7919) % shape.vocab_size for i in range(6)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_profiler_separates_gpu_work_from_host_waits(step_cost: ModuleType) -> None:
    timer = import_module("measuring.gpu_time").gpu_timer(3)
    x = torch.randn(4096, 4096, device="cuda")
    timer.start()
    for _ in range(3):
        began = time.perf_counter()
        float((x @ x @ x).sum().item())
        timer.add_step(time.perf_counter() - began)
    found = timer.result()
    print(found)
    assert 0.2 * found.wall_s < found.busy_s <= found.wall_s
    assert 0 < found.waiting_s < found.wall_s


def test_step_times_are_fitted_by_least_squares(step_cost: ModuleType) -> None:
    line = step_cost.Line.through([0, 1, 2], [1.0, 2.0, 6.0])
    assert (line.at_0, line.slope) == (approx(0.5), approx(2.5))


def test_idle_time_is_step_time_minus_replay_time(step_cost: ModuleType) -> None:
    cost = step_cost.StepCost(8, 10.0, host_ms=4.0, replay_ms=8.0, kernels_ms=7.0, floor_ms=6.0)
    eager = step_cost.StepCost(16, 14.0, host_ms=8.0, kernels_ms=7.0, floor_ms=7.0)
    assert (cost.idle_share, eager.idle_share) == (approx(0.2), approx(0.5))
    assert step_cost.StepCost(8, 10.0).idle_share is None
    text = step_cost.table([cost, eager], {"no drafts": step_cost.DraftSpeed(1.0, 1.0, 0.0)})
    assert "| 8 | 10.000 | 4.000 | 8.000 | 7.000 | 20.0 | 6.000 | 0.60 |" in text
    assert "| 16 | 14.000 | 8.000 |  | 7.000 | 50.0 | 7.000 | 0.50 |" in text
    assert "The host's work: 0.000 ms and 500.00 µs a row." in text


def test_only_device_to_host_copies_count_as_waits(step_cost: ModuleType, device: str) -> None:
    wait = HostCopy.wait
    with import_module("measuring.gpu_time").noted_waits() as waits:
        assert HostCopy(torch.ones(1, 2, device=device)).wait() == [[1.0, 1.0]]
    assert len(waits) == (device != "cpu") and all(seconds > 0 for seconds in waits)
    assert HostCopy.wait is wait


def test_median_run_is_reported(step_cost: ModuleType) -> None:
    runs = [step_cost.DraftSpeed(speed, 1.0, 0.0) for speed in (3.0, 1.0, 2.0)]
    assert step_cost.middle(runs).tokens_per_s == 2.0
