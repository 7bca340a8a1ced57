"""Conversation loads are reproducible from a seed and share prefixes as described."""

import json
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.command_line.command_runs import REPOSITORY

LINE = {"session": "a", "new_tokens": 5, "reply_tokens": 3}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("loads.conversation_load")


def write_trace(folder: Path, *lines: dict[str, object]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_workload_depends_only_on_the_seed(load: ModuleType) -> None:
    for shape in load.LOADS.values():
        small = shape.scaled(sessions=1 / 20)
        assert load.conversations(small, 3, 1000) == load.conversations(small, 3, 1000)
        assert load.conversations(small, 3, 1000) != load.conversations(small, 4, 1000)


def test_sessions_arrive_in_order_at_the_given_rate(load: ModuleType) -> None:
    shape = load.LOADS["few-shot"]
    arrivals = [session.arrival_s for session in load.conversations(shape, 0, 1000)]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == shape.num_sessions
    assert arrivals[-1] == pytest.approx(shape.num_sessions / shape.sessions_per_s, rel=0.15)


def test_only_sessions_with_a_popular_prefix_share_text(load: ModuleType) -> None:
    counts = Counter(session.prefix for session in load.conversations(load.LOADS["few-shot"], 0, 1000))
    assert 30 < len(counts) <= 40
    assert counts.most_common()[0][1] > 5 * counts.most_common()[-1][1]
    assert {session.prefix for session in load.conversations(load.LOADS["unrelated"], 0, 1000)} == {()}


def test_every_turn_adds_prompt_tokens_and_requests_reply_tokens(load: ModuleType) -> None:
    for session in load.conversations(load.LOADS["mixed"], 1, 50):
        assert session.turns and session.turns[0].think_s == 0
        assert all(turn.new_tokens and turn.num_reply >= 1 and turn.think_s >= 0 for turn in session.turns)
        assert all(0 <= token < 50 for turn in session.turns for token in (*session.prefix, *turn.new_tokens))


def test_scaled_workload_has_fewer_sessions_and_shorter_texts(load: ModuleType) -> None:
    shape = load.LOADS["repository"]
    assert len(load.conversations(shape.scaled(sessions=1 / 5), 0, 1000)) == 60
    longest = max(len(session.prefix) for session in load.conversations(shape, 0, 1000))
    small = load.conversations(shape.scaled(tokens=1 / 16), 0, 1000)
    assert max(len(session.prefix) for session in small) == pytest.approx(longest / 16, rel=0.01)
    slow = load.conversations(shape.scaled(seconds=2), 0, 1000)
    assert slow[-1].arrival_s == pytest.approx(2 * load.conversations(shape, 0, 1000)[-1].arrival_s)


def test_every_turn_in_a_scaled_workload_has_tokens(load: ModuleType) -> None:
    for session in load.conversations(load.LOADS["mixed"].scaled(tokens=1e-6, sessions=0.1), 0, 1000):
        assert all(len(turn.new_tokens) == turn.num_reply == 1 for turn in session.turns)


def test_workload_from_a_trace_has_its_lengths_times_and_prefixes(load: ModuleType, tmp_path: Path) -> None:
    file = write_trace(
        tmp_path,
        {**LINE, "arrival_s": 2.5, "prefix": "p", "prefix_tokens": 4},
        {**LINE, "session": "b", "arrival_s": 1, "prefix": "p", "prefix_tokens": 6},
        {**LINE, "think_s": 9, "new_tokens": 2, "reply_tokens": 1},
    )
    first, second = load.read_trace(file, 1000, 0)
    assert (first.arrival_s, second.arrival_s) == (1, 2.5)
    assert len(first.prefix) == 6 and second.prefix == first.prefix[:4]
    assert [(turn.think_s, len(turn.new_tokens), turn.num_reply) for turn in second.turns] == [(0, 5, 3), (9, 2, 1)]
    assert load.read_trace(file, 1000, 0) == [first, second]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"new_tokens": 0}, "new_tokens must be a whole number of at least 1, found 0"),
        ({"reply_tokens": 2.5}, "reply_tokens must be a whole number"),
        ({"prefix_tokens": -1}, "prefix_tokens must be a whole number of at least 0"),
        ({"think_s": -1}, "think_s must be a number of seconds of at least 0"),
        ({"arrival_s": "soon"}, "arrival_s must be a number of seconds of at least 0"),
        ({"session": None}, "session must be a string or a number"),
        ({"speed": 1}, "speed"),
    ],
)
def test_error_names_the_invalid_line_of_the_trace(
    load: ModuleType, tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match="line 2: ") as error:
        load.read_trace(write_trace(tmp_path, LINE, {**LINE, **changed}), 1000, 0)
    assert message in str(error.value)
