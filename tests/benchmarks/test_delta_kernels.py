"""Parts of the Gated DeltaNet benchmark that need no GPU."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens
from megatron_mamba_cache.recurrences.gated_delta.scan import delta_scan
from tests.command_line.command_runs import REPOSITORY, run_script_here

SCRIPT = REPOSITORY / "benchmarks" / "delta_kernels.py"
HEADS = (2, 4)
LENGTHS = (70, 128, 5)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    module = import_module("delta_kernels")
    monkeypatch.setattr(module, "DIM", 8)
    monkeypatch.setattr(module, "LAYERS", {"tiny": HEADS})
    monkeypatch.setattr(module, "ROTATED_BYTES", 2**15)
    return module


def test_prompts_store_boundary_and_end_states_in_separate_slots(bench: Any) -> None:
    tokens, gates = bench.random_tokens(HEADS, sum(LENGTHS), "cpu"), bench.random_gates(HEADS, "cpu")
    pool = torch.full((2 * len(LENGTHS), HEADS[1], 8, 8), torch.nan)
    y = delta_scan(tokens, gates, pool, bench.prompt_rows(LENGTHS, device="cpu"), bench.GRAIN)
    assert pool[:3].isfinite().all() and pool[3:].isnan().all()
    assert bench.prompt_rows(LENGTHS, device="cpu").longest_first.tolist() == [1, 0, 2]
    for row, (start, length) in enumerate(zip((0, 70, 198), LENGTHS, strict=True)):
        alone, one = torch.zeros(1, HEADS[1], 8, 8), of_tokens(tokens, slice(start, start + length))
        expected = delta_scan(one, gates, alone, bench.prompt_rows([length], device="cpu"), bench.GRAIN)
        assert expected.equal(y[start : start + length]) and alone[0].equal(pool[row])
    whole = bench.prompt_rows((128, 128), (64,), "cpu")
    assert whole.chunk_slots.tolist() == [2, -1, 3, -1] and whole.final_slots.tolist() == [0, 1]


def of_tokens(tokens: DeltaTokens, part: slice) -> DeltaTokens:
    return replace(tokens, **{name: getattr(tokens, name)[part] for name in ("q", "k", "v", "b", "a")})


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_benchmark_steps_use_distinct_states_and_move_the_reported_bytes(bench: Any, num_drafts: int) -> None:
    states = bench.DecodeBench("tiny", 3, num_drafts, "cpu")
    state_bytes = HEADS[1] * 8 * 8 * 4
    assert states.num_bytes == 3 * (1 + 1 + num_drafts) * state_bytes  # reads 1 state, writes 1 per token
    used = torch.cat([rows.columns.flatten() for rows in states.steps])
    assert used.unique().numel() == used.numel() == states.pool.shape[0]
    assert used.numel() * state_bytes >= 2**15
    assert all(rows.accepted.min() >= 1 and rows.accepted.max() <= 1 + num_drafts for rows in states.steps)
    before = states.pool.clone()
    for launch in states.launches():
        assert launch().shape == states.tokens.v.shape
    assert not (before == states.pool).flatten(1).all(dim=1).any()


def test_replayed_steps_are_compared_with_an_update_of_one_token(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1, 100))
    monkeypatch.setattr(bench, "launch_us", lambda launches, guess_us: (launches[0](), float(next(times)))[1])
    for name in ("DecodeBench", "replay_bench"):
        monkeypatch.setattr(bench, name, partial(getattr(bench, name), device="cpu"))
    monkeypatch.setattr(bench, "REPLAYED_REQUESTS", (3,))
    monkeypatch.setattr(bench, "REPLAYED_DRAFTS", (0, 3))
    figures = list(bench.measure_replays(["tiny"], []))
    fp32 = [figure for figure in figures if figure.case.startswith("float32")]
    assert [(figure.form, figure.case[-6:], figure.peer_us) for figure in fp32] == [
        ("window", "0 kept", 1.0), ("ours", "0 kept", 1.0), ("window", "0 kept", 1.0),
        *(("ours", f"{kept} kept", 1.0) for kept in (0, 1, 3)),
    ]  # fmt: skip
    assert len(figures) == 2 * len(fp32) and "| 1.0 (1.00 x) | 2.0 (2.00 x) |" in bench.table(fp32)


def test_a_wrong_replay_is_noticed(bench: Any) -> None:
    states = bench.replay_bench("tiny", 3, 1, 2, device="cpu")
    states.check(bench.delta_replay)
    with pytest.raises(RuntimeError, match="outputs differ"):
        states.check(lambda tokens, *others: tokens.v)


def test_gates_are_initialized_as_in_published_models(bench: Any) -> None:
    gates = bench.random_gates((2, 4096), "cpu")
    steps = torch.nn.functional.softplus(gates.dt_bias)
    assert gates.A_log.exp().min() > 0 and 15 < gates.A_log.exp().max() <= 16.01
    assert 0.0009 < steps.min() < 0.0012 and 0.09 < steps.max() < 0.11


def test_measurements_are_formatted_as_tables(bench: Any) -> None:
    figures = [
        bench.Figure("tiny", "8 requests, 0 drafts", "ours", 20.0, copy_us=18.0),
        bench.Figure("tiny", "8 requests, 0 drafts", "fla-core", 40.0, copy_us=18.0),
        bench.Figure("tiny", "1 x 4k", "ours", 1234.56),
        bench.Figure("tiny", "y, largest", "ours", 0.00234),
    ]
    assert bench.table(figures).splitlines() == [
        "| layer | case | ours | fla-core |",
        "|---|---|---:|---:|",
        "| tiny | 8 requests, 0 drafts | 20.0 (0.90 of copy) | 40.0 (0.45 of copy) |",
        "| tiny | 1 x 4k | 1,234.6 |  |",
        "| tiny | y, largest | 2.34e-03 |  |",
    ]


def test_failing_peer_library_is_left_out(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(bench, "launch_us", lambda launches, guess_us: launches[0]())
    assert list(bench.measured("tiny", "1 x 4k", "fla-core", [fails], 1.0)) == []
    assert "fla-core does not run 1 x 4k of tiny: RuntimeError: no kernel" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no kernel"):
        list(bench.measured("tiny", "1 x 4k", "ours", [fails], 1.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes where there is a GPU")
def test_benchmark_reports_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_script_here(capsys, SCRIPT)
    assert finished.status == 2 and "needs a CUDA device" in finished.stderr
