"""The draft-model benchmark runs with tiny models whose drafts are all correct or all wrong."""

from dataclasses import replace
from importlib import import_module

import pytest

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")


def test_correct_drafts_are_accepted_and_wrong_drafts_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, serving = import_module("draft_model"), import_module("loads.serving_engine")
    monkeypatch.setattr(benchmark, "NUM_ROUNDS", 1)
    monkeypatch.setattr(benchmark, "REPLY", 24)
    shape = serving.SHAPES["tiny"]
    draft_shape = replace(shape, state_gb=0.05, kv_gb=0.05)
    found = benchmark.draft_model_speeds(serving.model_of(shape), shape, draft_shape, (1, 3))
    print(benchmark.table(found))
    assert [one.num_rows for one in found] == [1, 3]
    for one in found:
        assert one.speeds["right drafts, always"].tokens_per_step > 2 * one.num_rows
        assert one.speeds["wrong drafts"].tokens_per_step < 1.1 * one.num_rows
    assert "| 3 | wrong drafts | " in benchmark.table(found)
