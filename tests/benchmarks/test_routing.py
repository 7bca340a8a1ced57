"""The routing benchmark counts turns and load as its table reports them."""

from importlib import import_module
from types import ModuleType

import pytest

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("routing")


def test_report_sums_the_measurements_over_turns(routing: ModuleType) -> None:
    turns = [
        routing.Turn("a", 40, 0, 10, 1.0),
        routing.Turn("a", 60, 30, 10, 2.0, is_at_home=True),
        routing.Turn("b", 60, 0, 10, 3.0, is_at_home=False),
        routing.Turn("c", 40, 0, 10, 2.0),
    ]
    figures = routing.figures_of(turns, 5.0)
    assert figures == routing.Figures(2, 0.5, 2.0, 90 * 4 / 210, 200, 30, 5.0, 2.0)
    assert "| prefix | 50.0% of 2 | 2.00, 1.71 | 30 of 200 (15.0%) | 5.0 s | 2.000 s |" in routing.table(
        {"prefix": figures}
    )
    assert [text.split(",")[0] for text in routing.shortfalls(figures)] == [
        "50.0% of later turns at home",
        "a replica has 2.00 times the mean load in requests",
        "a replica has 1.71 times the mean load in tokens",
    ]


def test_half_of_the_conversations_share_a_system_prompt(routing: ModuleType) -> None:
    texts = routing.first_texts(40)
    shared = {tuple(text[: routing.SYSTEM_PROMPT]) for text in texts[1::2]}
    assert len(texts) == 40 and len(shared) == 3
    assert texts == routing.first_texts(40)
