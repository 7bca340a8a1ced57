"""Parts of the benchmark of all kernels that need no GPU: floors, ratios, errors and tables."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.command_line.command_runs import REPOSITORY, run_script_here

SCRIPT = REPOSITORY / "benchmarks" / "kernels.py"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("kernels")


@pytest.fixture
def kernel_figures(kernels: ModuleType) -> ModuleType:
    return import_module("measuring.kernel_figures")


@pytest.fixture
def ssd_scan(kernels: ModuleType) -> ModuleType:
    return import_module("ssd_scan")


@pytest.fixture
def scan_error(kernels: ModuleType) -> ModuleType:
    return import_module("measuring.scan_error")


@pytest.mark.parametrize(("heads", "num_bytes", "num_flops"), [(128, 37_120, 5_373_952), (64, 20_608, 2_752_512)])
def test_scan_lower_bound_counts_each_byte_once_and_all_gemms(
    heads: int, num_bytes: int, num_flops: int, ssd_scan: ModuleType
) -> None:
    assert ssd_scan.tokens_bytes(heads, 10) == 10 * num_bytes
    assert ssd_scan.scan_flops(heads, 10) == 10 * num_flops


def test_benchmark_batches_have_the_stated_numbers_of_tokens_and_requests(ssd_scan: ModuleType) -> None:
    batch = ssd_scan.with_boundaries(ssd_scan.make_batch(8, (300, 700), "cpu"), (256, 512), torch.bfloat16)
    assert batch.tokens.x.shape[0] == batch.num_tokens == 1000
    assert batch.pool.shape[0] == 6 and batch.pool.dtype == torch.bfloat16
    stored = batch.rows.chunk_slots[batch.rows.chunk_slots >= 0].tolist()
    assert stored == [2, 3, 4] and batch.rows.final_slots.tolist() == [0, 1]


def test_scan_error_is_small_in_fp32_and_within_rounding_in_bf16(scan_error: ModuleType, ssd_scan: ModuleType) -> None:
    torch.manual_seed(0)
    bf16, fp32 = scan_error.scan_errors(ssd_scan.make_batch(8, (600,), "cpu"))
    assert 0 < fp32.y < 1e-5 and 0 < fp32.state < 1e-5
    assert 1e-4 < bf16.y < 1e-2 and bf16.state < 1e-5
    assert scan_error.table([fp32]).splitlines()[2].startswith("| ours, fp32 tokens | ")


def test_incorrect_scan_is_reported_with_a_large_error(
    scan_error: ModuleType, ssd_scan: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_error, "ssd_scan", lambda tokens, *others: tokens.x)
    assert all(
        error.y > 0.1 and error.state == 1 for error in scan_error.scan_errors(ssd_scan.make_batch(8, (90,), "cpu"))
    )


def test_scan_table_lists_lower_bound_and_peer_library(
    kernel_figures: ModuleType, ssd_scan: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"ours": 25.0, "portable": 40.0, "mamba-ssm": 75.0}
    measured = [ssd_scan.Figure("8B", "1 x 4k", form, ns) for form, ns in times.items()]
    measured.append(ssd_scan.Figure("Nano", "1 x 32k", "ours", 18.0))
    monkeypatch.setattr(ssd_scan, "measure", lambda *_: measured)
    ceilings = import_module("measuring.ceilings")
    monkeypatch.setattr(ceilings, "copy_us", lambda num_bytes: num_bytes / 4e6)
    monkeypatch.setattr(ceilings, "matmul_tflops", lambda: 800.0)
    ours, portable, nano = kernel_figures.scan_figures(["8B", "Nano"], ["1 x 4k", "1 x 32k"], (256,))
    assert (ours.kernel, portable.kernel, nano.kernel) == ("ssd_scan", "ssd_scan, portable form", "ssd_scan")
    assert ours.floor_us == pytest.approx(4096 * 37_120 / 4e6)  # 9.3 ns per token; the FLOPs take only 6.7 ns
    assert ours.of_floor == pytest.approx(9.28 / 25)
    assert ours.record()["times faster than"] == pytest.approx({"mamba-ssm": 3.0}) and nano.peers == {}
    monkeypatch.setattr(ceilings, "matmul_tflops", lambda: 80.0)
    slow_products = next(iter(kernel_figures.scan_figures(["8B"], ["1 x 4k"], (256,))))
    assert slow_products.floor_us == pytest.approx(4096 * 5.373952 / 80)


def test_peer_libraries_are_listed_in_the_row_of_the_same_case(kernel_figures: ModuleType) -> None:
    states = import_module("state_kernels")
    measured = [
        states.Figure("state_verify", "8B", "64 rows", states.STATE_TILINGS[0], 8, 70.0, 63.0),
        states.Figure("mamba-ssm", "8B", "64 rows", None, 8, 140.0, 63.0),
        states.Figure("state_verify", "8B", "8 rows", states.STATE_TILINGS[0], 8, 7.0, 6.3),
    ]
    with_peer, without = kernel_figures.next_to_peers(measured)
    assert with_peer.peers == {"mamba-ssm": 140.0} and without.peers == {}
    lines = kernel_figures.table(
        [with_peer, without, kernel_figures.Figure("align_copy", "8B", "none", 2.0)]
    ).splitlines()
    assert lines[2:] == [
        "| state_verify | 8B | 64 rows | 70.0 | 63.0 | 0.900 | mamba-ssm 140.0, 2.00 |",
        "| state_verify | 8B | 8 rows | 7.0 | 6.3 | 0.900 |  |",
        "| align_copy | 8B | none | 2.0 |  |  |  |",
    ]


@pytest.mark.parametrize(("longest_ns", "holds"), [(27.0, True), (30.0, False)])
def test_spread_of_times_per_token_is_largest_over_smallest_for_long_prompts(
    longest_ns: float, holds: bool, kernels: ModuleType, kernel_figures: ModuleType
) -> None:
    figures = [
        kernel_figures.Figure("ssd_scan", "8B", case, ns * length / 1000)
        for case, length, ns in (("1 x 512", 512, 99.0), ("1 x 4k", 4096, 25.0), ("1 x 128k", 131_072, longest_ns))
    ]
    found = kernels.growth(figures, "8B")
    assert found["ns a token"] == pytest.approx({"1 x 512": 99.0, "1 x 4k": 25.0, "1 x 128k": longest_ns})
    assert found["holds"] is holds and found["spread"] == pytest.approx(longest_ns / 25)


def test_boundary_cost_is_relative_to_the_scan_without_boundaries(kernels: ModuleType, ssd_scan: ModuleType) -> None:
    ns = {"no boundary": 20.0, "three": 20.5, "every 256": 24.0}
    text, records = kernels.boundary_table(
        [ssd_scan.Figure("8B", "1 x 4k, float32 states", *pair) for pair in ns.items()]
    )
    assert text.splitlines()[2] == "| 8B | 1 x 4k, float32 states | 20.00 | 20.50, 1.025 | 24.00, 1.200 |"
    assert records[0]["ratios"] == pytest.approx({"three": 1.025, "every 256": 1.2})


def test_benchmark_continues_after_a_failed_section(
    kernels: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    report = kernels.Report(file)
    report.add("First", lambda: (1 / 0, None))
    assert report.has_failures and json.loads(file.read_text())["failed"] == ["First"]
    report.add("Second", lambda: ("a table", [1]))
    assert json.loads(file.read_text())["Second"] == [1]
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed and "a table" in printed and "in all" in report.seconds()


def test_quick_run_measures_a_subset(kernels: ModuleType) -> None:
    def parts(selection: Any, name: str) -> set[object]:
        return set(getattr(selection, name))

    for name in ("models", "scan_cases", "peer_chunks", "boundary_rows", "state_cases", "slot_counts", "align_cases"):
        assert parts(kernels.QUICK, name) <= parts(kernels.FULL, name)
    assert set(kernels.GROWTH_CASES) <= parts(kernels.FULL, "scan_cases")


def test_missing_peer_libraries_are_named(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copy_us", lambda num_bytes: num_bytes / 4e6)
    monkeypatch.setattr(kernels, "matmul_tflops", lambda: 790.0)
    monkeypatch.setattr(kernels, "missing_peer", lambda: "mamba-ssm is not installed")
    monkeypatch.setattr(kernels, "peer_conv", lambda: None)
    text, record = kernels.ceilings()
    assert "copy, TB/s: 4.00; matmul, TFLOP/s: 790.00" in text
    assert "Missing peers: mamba-ssm is not installed; causal-conv1d is not installed." in text
    assert len(record["missing peers"]) == 2


def test_unknown_benchmark_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_script_here(capsys, SCRIPT, "--only", "Scans")
    assert finished.status == 2 and "no section Scans; there are Ceilings, Scan," in finished.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes where there is a GPU")
def test_benchmark_reports_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_script_here(capsys, SCRIPT)
    assert finished.status == 2 and "needs a CUDA device" in finished.stderr
