"""The loading benchmark runs on any machine with its tiny model."""

import json
from pathlib import Path

import pytest

from tests.command_line.command_runs import REPOSITORY, run_script_here

SCRIPT = REPOSITORY / "benchmarks" / "load_8b.py"


@pytest.mark.parametrize("flags", [(), ("--fp8",)], ids=str)
def test_saved_tiny_model_is_loaded_and_serves_prompts_with_a_shared_prefix(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = run_script_here(capsys, SCRIPT, "--shape", "tiny", *flags, "--folder", tmp_path, "--json")
    assert finished.status == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert figures["machine"].startswith("Machine: ")
    assert figures["files"] > 1 and figures["largest file, GiB"] * 2**30 < 150_000
    assert figures["loading, s"] > 0 and figures["loading, GB/s"] > 0
    assert figures["prompt tokens"] == 8 * (128 + 16)
    assert figures["prompt tokens skipped"] == 7 * 128
    assert figures["generated tokens"] == 8 * 32
    assert figures["distinct generated tokens"] > 8
    assert not list(tmp_path.iterdir())


def test_result_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_script_here(capsys, SCRIPT, "--shape", "tiny")
    assert finished.status == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[:2] == ["| what | value |", "|---|---|"]
    assert all(line.startswith("| ") and line.count("|") == 3 for line in lines[2:]) and len(lines) > 15
