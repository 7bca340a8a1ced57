"""Parts of the benchmark of state and convolution kernels that need no GPU."""

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.command_line.command_runs import REPOSITORY, run_script_here

SCRIPT = REPOSITORY / "benchmarks" / "state_kernels.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    module = import_module("state_kernels")
    monkeypatch.setattr(module, "ROTATED_BYTES", 2**15)
    return module


def test_benchmark_steps_use_distinct_states_and_move_the_reported_bytes(bench: Any) -> None:
    layer = bench.Layer("tiny", heads=4, groups=2, head_dim=8, d_state=8)
    states = bench.StateBench(layer, torch.float32, num_rows=3, num_drafts=2, device="cpu")
    assert states.num_bytes == 3 * 4 * (4 * 8 * 8 * 4)
    used = torch.cat([rows.columns.flatten() for rows in states.steps])
    assert used.unique().numel() == used.numel() == states.pool.shape[0]
    assert used.numel() * layer.state_bytes(torch.float32) >= 2**15
    assert {int(count) for count in states.steps[0].accepted} == {1, 2, 3}
    before = states.pool.clone()
    for launch in states.launches(bench.STATE_TILINGS[0]):
        launch()
    assert not (before == states.pool).flatten(1).all(dim=1).any()


def test_replay_benchmark_has_rings_of_every_length_and_the_usual_rate_of_folds(bench: Any) -> None:
    steady_rows = import_module("measuring.replay_bench").steady_rows

    for kept in (1, 2, 8):
        rows = steady_rows(64, 3, ring_len=16, kept=kept, num_tokens=8, device="cpu")
        assert (rows.computed % 16).bincount().tolist() == [4] * 16
        assert int((rows.computed // 16 * 16 > rows.folded).sum()) == 64 * kept // 16
        assert rows.slots.tolist() == list(range(3, 67)) and rows.computed.diff().abs().max() > 1


def test_benchmark_detects_an_incorrect_replay(bench: Any) -> None:
    layer = bench.Layer("tiny", heads=4, groups=2, head_dim=8, d_state=8)
    tokens, weights = bench.random_tokens(layer, 6, "cpu"), bench.random_weights(layer, "cpu")
    states = bench.ReplayBench(tokens, weights, torch.float32, 16, num_rows=3, kept=2, num_steps=2)
    states.check(bench.state_replay)
    before = states.pool.clone()
    launches = states.launches(bench.state_replay)
    assert len(launches) == 2 and all(launch().shape == tokens.x.shape for launch in launches)
    assert (states.pool[3:] != before[3:]).any()
    with pytest.raises(RuntimeError, match="outputs differ"):
        states.check(lambda tokens, *others: tokens.x)


def test_benchmark_steps_accept_none_half_or_all_drafts(bench: Any) -> None:
    assert [bench.kept_counts(drafts) for drafts in (0, 1, 3, 7)] == [[1], [1, 2], [1, 2, 4], [1, 4, 8]]


def test_benchmark_detects_an_incorrect_update(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = bench.Layer("tiny", heads=4, groups=2, head_dim=8, d_state=8)
    states = bench.StateBench(layer, torch.bfloat16, num_rows=3, num_drafts=1, device="cpu")
    states.check(bench.STATE_TILINGS[0])
    monkeypatch.setattr(bench, "state_verify", lambda tokens, *others: tokens.x)
    with pytest.raises(RuntimeError, match="tiny: outputs differ"):
        states.check(bench.STATE_TILINGS[0])


def test_benchmarked_convolutions_read_slices_of_a_projection(bench: Any) -> None:
    layer = bench.Layer("tiny", heads=4, groups=2, head_dim=8, d_state=8)
    convs = bench.ConvBench(layer, "cpu")
    prompts = convs.prompts(2, 300, bench.CONV_TILINGS[0])
    assert len(prompts) >= 2 and prompts[0]().shape == (600, layer.conv_dim)
    steps = convs.decodes(5, bench.CONV_VERIFY_TILINGS[0])
    assert len(steps) * convs.decode_bytes(5) >= 2**15 and steps[-1]().shape == (5, layer.conv_dim)


def test_measurements_are_formatted_as_tables(bench: Any) -> None:
    tiling = bench.STATE_TILINGS[0]
    figures = [
        bench.Figure("state_verify", "8B", "bf16, 64 rows, K = 0", tiling, 268_435_456, 70.0, 63.0),
        bench.Figure("mamba-ssm", "8B", "bf16, 64 rows, K = 0", None, 268_435_456, 150.0, 63.0),
        bench.Figure("state_verify", "Nano", "bf16, 64 rows, K = 0", tiling, 134_217_728, 35.0, 31.5),
    ]
    lines = bench.table(figures).splitlines()
    assert lines[2] == "| state_verify | bf16, 64 rows, K = 0 | 70.0, 3,835, 0.900 | 35.0, 3,835, 0.900 |"
    assert lines[3] == "| mamba-ssm | bf16, 64 rows, K = 0 | 150.0, 1,790, 0.420 |  |"
    assert "width 64, num_warps 4" in bench.sweep_table(figures).splitlines()[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes where there is a GPU")
def test_benchmark_reports_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_script_here(capsys, SCRIPT)
    assert finished.status == 2 and "needs a CUDA device" in finished.stderr
