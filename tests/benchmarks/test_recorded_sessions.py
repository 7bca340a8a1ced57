"""Recorded loads become conversations with the recorded lengths and times; equal hashes give equal tokens."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_mamba_cache.planning.recorded_load import read_load
from tests.command_line.command_runs import REPOSITORY, run_script_here
from tests.planning.load_files import request, session, written

VOCABULARY = 1000


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("loads.recorded_sessions")


def two_sessions(folder: Path) -> Path:
    """Return a session of three turns, whose sub-agent begins with the same text, and a session of one turn."""
    agent = {"t": 2.0, "type": "subagent", "requests": [request(0, 150, 3, range(2)), request(1, 260, 2, range(5))]}
    main = session(request(0, 130, 40, range(3)), agent, request(5, 300, 0, range(5)), request(9, 330, 7, range(6)))
    return written(folder / "load.jsonl", main, session(request(0, 70, 4, range(2))))


def test_prompt_that_continues_another_becomes_its_next_turn(sessions: ModuleType, tmp_path: Path) -> None:
    found = sessions.recorded_conversations(read_load(two_sessions(tmp_path)), VOCABULARY)
    turns = [[(turn.think_s, len(turn.new_tokens), turn.num_reply) for turn in one.turns] for one in found]
    # A prompt continues the longest conversation whose text it begins with.
    assert turns == [
        [(0.0, 130, 40)],
        [(0.0, 150, 3), (1.0, 107, 2), (2.0, 38, 1), (4.0, 30, 7)],
        [(0.0, 70, 4)],
    ]
    assert [one.arrival_s for one in found] == [0.0, 2.0, 900.0]


def test_token_ids_are_equal_only_for_equal_content(sessions: ModuleType, tmp_path: Path) -> None:
    main, agent, other = sessions.recorded_conversations(read_load(two_sessions(tmp_path)), VOCABULARY)
    assert main.turns[0].new_tokens[:128] == agent.turns[0].new_tokens[:128]
    assert main.turns[0].new_tokens[128:] != agent.turns[0].new_tokens[128:130]
    assert other.turns[0].new_tokens[:64] != main.turns[0].new_tokens[:64]
    assert all(0 <= token < VOCABULARY for turn in main.turns for token in turn.new_tokens)
    again = sessions.recorded_conversations(read_load(two_sessions(tmp_path)), VOCABULARY)
    assert again == [main, agent, other]


@pytest.mark.parametrize("script", ["serving.py", pytest.param("turn_latency.py", marks=pytest.mark.long)])
def test_benchmarks_run_a_recorded_workload(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load, figures = two_sessions(tmp_path), tmp_path / "figures.json"
    lines = [json.loads(load.read_text().splitlines()[0])] * 2
    flags: list[Any] = ["--shape", "tiny", "--recorded", written(load, *lines), "--json", figures]
    flags += ["--time-scale", "0.001", "--modes", "full", "--drafts", "0"] if script == "serving.py" else []
    finished = run_script_here(capsys, REPOSITORY / "benchmarks" / script, *flags)
    assert finished.status == 0, finished.stderr
    assert json.loads(figures.read_text())


def test_recorded_workload_without_later_turns_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = written(tmp_path / "load.jsonl", session(request(0, 70, 4, range(2))))
    flags = ["--shape", "tiny", "--recorded", load]
    finished = run_script_here(capsys, REPOSITORY / "benchmarks" / "turn_latency.py", *flags)
    assert (
        finished.status == 2 and "must have two conversations of at least two turns" in finished.stderr.splitlines()[-1]
    )
