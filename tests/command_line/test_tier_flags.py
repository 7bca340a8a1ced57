"""Flags for host and disk tiers in generate and serve; invalid flags are refused before memory is allocated."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache.command_line.arguments import check_engine_arguments, check_tiers, command_parser
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.main import main
from megatron_mamba_cache.command_line.report import summary_line
from megatron_mamba_cache.command_line.results import RequestRecord, RunResult
from megatron_mamba_cache.metrics import CacheCounters, CacheSnapshot
from megatron_mamba_cache.step.memory import CacheMemory
from tests.command_line.command_runs import run_here, run_process

COMMANDS = ["generate", "serve"]
MEMORY = ["--cache-gb", "0.1", "--host-cache-gb", "0.1"]
PROMPT = "def add(a, b):\n    return a + b\n" * 12
BAD = {
    "without prefix caching": ([*MEMORY, "--no-prefix-caching"], "but requires prefix_caching=True"),
    "beyond the host": (["--cache-gb", "0.1", "--host-cache-gb", "900000"], "GiB available: lower --host-cache-gb"),
    "too little": (["--cache-gb", "0.1", "--host-cache-gb", "1e-6"], "set --host-cache-gb to 0."),
    "not a number": (["--cache-gb", "0.1", "--host-cache-gb", "nan"], "it must be a number of GiB, more than 0"),
    "a directory alone": (["--cache-gb", "0.1", "--disk-cache-dir", "DIR/new"], "but requires --host-cache-gb"),
    "a limit alone": ([*MEMORY, "--disk-cache-gb", "1"], "but requires --disk-cache-dir"),
    "below a file": (
        [*MEMORY, "--disk-cache-dir", "DIR/file/x"],
        "--disk-cache-dir DIR/file/x cannot be created or written to",
    ),
    "a file": ([*MEMORY, "--disk-cache-dir", "DIR/file"], "--disk-cache-dir DIR/file cannot be created or written to"),
    "a limit below one entry": (
        [*MEMORY, "--disk-cache-dir", "DIR/new", "--disk-cache-gb", "1e-6"],
        "bytes: set --disk-cache-gb to 0.",
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", BAD)
def test_invalid_tier_flags_exit_with_status_2_before_allocation(
    command: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was allocated")

    monkeypatch.setattr(CacheMemory, "__init__", allocate)
    (tmp_path / "file").touch()
    flags, words = BAD[case]
    port = ["--port", "0"] if command == "serve" else []
    status = main([command, "--random-model", *port, *(flag.replace("DIR", str(tmp_path)) for flag in flags)])
    printed = capsys.readouterr().err
    assert status == 2 and printed.count("\n") == 1 and printed.startswith("mamba-cache: error: "), printed
    assert words.replace("DIR", str(tmp_path)) in printed
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_disk_cache_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    arguments = command_parser().parse_args(["generate", *MEMORY, "--disk-cache-dir", str(tmp_path / "below" / "that")])
    with pytest.raises(UsageError, match="cannot be created or written to"):
        check_tiers(arguments)


def test_disk_cache_directory_is_created_after_the_model_is_loaded(tmp_path: Path) -> None:
    check_tiers(command_parser().parse_args(["generate", *MEMORY, "--disk-cache-dir", str(tmp_path / "a" / "b")]))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("memory", [[], ["--state-gb", "1"], ["--kv-gb", "1", "--state-gb", "1"], ["--cache-gb", "1"]])
def test_host_tier_works_with_every_way_to_give_a_budget(memory: list[str]) -> None:
    check_engine_arguments(command_parser().parse_args(["serve", "--hf-model", "x", "--host-cache-gb", "1", *memory]))


@pytest.mark.long
def test_invalid_tier_flags_print_a_one_line_error(tmp_path: Path) -> None:
    flags = ["--random-model", "--device", "cpu", "--port", "0", "--cache-gb", "0.1", "--host-cache-gb", "1e-6"]
    finished = run_process("-m", "megatron_mamba_cache", "serve", *flags, cwd=tmp_path)
    assert finished.status == 2 and finished.stderr.count("\n") == 1 and "set --host-cache-gb to" in finished.stderr


def test_generate_keeps_prefixes_on_disk_for_the_next_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("prompts.jsonl", "out.json")}
    tiers = [*MEMORY, "--disk-cache-dir", tmp_path / "disk", "--disk-cache-gb", "0.1"]
    flags = ["--random-model", "--prompts", files["prompts.jsonl"], "--output-path", files["out.json"], *tiers]
    found = []
    for end in ("", "print(add(1, 2))\n"):
        files["prompts.jsonl"].write_text(json.dumps({"prompt": PROMPT + end, "num_tokens_to_generate": 2}) + "\n")
        finished = run_here(capsys, *flags)
        assert finished.status == 0, finished.stderr
        found.append(json.loads(files["out.json"].read_text()))
    first, second = (document["requests"][0] for document in found)
    assert first["cached_tokens"] == 0 and not any("_from_" in name for name in first)
    assert second["cached_tokens_from_disk"] == second["cached_tokens"] == len(PROMPT) // 64 * 64 > 0
    summary = found[1]["summary"]
    assert summary["cached_tokens_from_disk"] == summary["prompt_tokens_from_disk"] == second["cached_tokens"]
    assert summary["host_bytes"]["states_cached"] > 0 and summary["disk_bytes"]["entries"] > 0
    assert f"; {second['cached_tokens']} from the disk)" in finished.stdout


def test_comparison_uses_tiers_only_in_the_cached_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-tokens-to-generate", "2", *MEMORY, "--disk-cache-dir", tmp_path / "disk"]
    finished = run_here(capsys, "--random-model", "--output-path", tmp_path / "out.json", *flags)
    assert finished.status == 0 and "outputs identical" in finished.stdout, finished.stderr
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert summary["host_bytes"] and summary["disk_bytes"]
    assert summary["without_cache"]["host_bytes"] == summary["without_cache"]["disk_bytes"] == {}


def test_summary_counts_the_tokens_restored_from_each_tier() -> None:
    record = RequestRecord(0, [1] * 100, [7], cached_tokens=80, cached_tokens_from_host=48, cached_tokens_from_disk=16)
    line = summary_line(RunResult([record], CacheSnapshot(CacheCounters()), 1.0))
    assert line.startswith(
        "skipped 80 of 100 prompt tokens (80.0 %; 48 from the host and 16 from the disk), published "
    )
