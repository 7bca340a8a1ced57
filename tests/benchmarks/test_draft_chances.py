"""The benchmark of drafts with a given accuracy runs with a tiny model."""

from importlib import import_module
from itertools import product

import pytest

from tests.command_line.command_runs import REPOSITORY

CHANCES = 1.0, 0.5, 0.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")


@pytest.mark.parametrize("has_head", [False, True])
def test_acceptance_grows_with_draft_accuracy(monkeypatch: pytest.MonkeyPatch, has_head: bool) -> None:
    benchmark, serving = import_module("draft_chances"), import_module("loads.serving_engine")
    monkeypatch.setattr(benchmark, "REPLY", 48)
    shape = serving.SHAPES["tiny"]
    model = serving.model_of(shape)
    head = benchmark.random_head(shape.fields, model.config.params_dtype) if has_head else None
    found = [*benchmark.chance_speeds(benchmark.Drafted(model, shape, head, (1, 4)), (1, 3), CHANCES)]
    print(benchmark.HEAD, *map(benchmark.line_of, found), sep="\n")
    assert [(one.num_rows, one.num_drafts, one.chance) for one in found] == [*product((1, 3), (1, 4), CHANCES)]
    for one in found:
        for speed in (one.always, one.adaptive):
            assert 0.1 * one.chance <= speed.accepted <= one.chance + 0.25  # drafts after a wrong draft are rejected
            if speed is one.always or not has_head:  # drafts of a head take time, which may not pay
                assert (speed.tokens_per_step > 1.2 * one.num_rows) == (one.chance > 0)
        assert (one.most is not None) == has_head
    assert benchmark.line_of(found[-2]).startswith("| 3 | 4 | 50% | ")
