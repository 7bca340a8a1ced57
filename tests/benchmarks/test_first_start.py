"""The benchmark of engine starts runs with a tiny model, each start in its own process."""

import os
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def first_start(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    return import_module("first_start")


def test_server_generates_the_same_tokens_after_every_kind_of_start(first_start: ModuleType) -> None:
    found = first_start.starts(["--shape", "tiny"], 2)
    assert [one.tokens for one in found] == [found[0].tokens] * 2
    assert [len(reply) for reply in found[0].tokens] == [first_start.NUM_REPLY] * len(first_start.LENGTHS)
    assert all(one.model_s > 0 and one.engine_s > 0 for one in found)
    assert "| later | " in first_start.table(found)


def test_cold_and_warm_starts_are_distinguished(first_start: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    one = first_start.Start(1.0, 1.0, 1.0, 0.0, 0.0, 0, 0, 0, [[1]])
    different = iter([one, replace(one, tokens=[[2]])])
    monkeypatch.setattr(first_start.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(first_start.Path, "read_text", lambda path: "{}")
    monkeypatch.setattr(first_start, "Start", lambda **_: next(different))
    with pytest.raises(RuntimeError, match="must generate the same tokens, but they differ"):
        first_start.starts([], 2)
