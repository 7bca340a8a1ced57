"""The benchmark of simulated tiers: sessions, settings and the table."""

import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from megatron_mamba_cache.planning.recorded_load import read_load
from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("simulated_tiers")


@pytest.fixture
def sessions(simulated: ModuleType) -> ModuleType:
    return import_module("loads.concurrent_sessions")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write three sessions of four turns and return the file; each prompt continues the preceding turn."""
    lines = []
    for session in range(3):
        turns = [
            {"t": 2000 * turn, "in": 6000 * (turn + 1), "out": 300, "hash_ids": list(range(94 * (turn + 1)))}
            for turn in range(4 - session % 2)
        ]
        lines.append(json.dumps({"block_size": 64, "requests": turns}))
    file = tmp_path / "sessions.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_repeated_sessions_have_different_texts_and_start_evenly(sessions: ModuleType, trace: Path) -> None:
    load = sessions.with_repeats(read_load(trace), 5)
    by_session = [[request for request in load.requests if request.session == number] for number in range(5)]
    assert [len(requests) for requests in by_session] == [4, 3, 4, 4, 3]
    assert [requests[0].arrival_s for requests in by_session] == [0, 360, 720, 1080, 1440]
    assert [request.arrival_s - 1080 for request in by_session[3]] == [0, 2000, 4000, 6000]
    contents = [{content for request in requests for content in request.content} for requests in by_session]
    assert len(set.union(*contents)) == sum(map(len, contents)), "two sessions have text in common"
    assert [request.arrival_s for request in load.requests] == sorted(request.arrival_s for request in load.requests)


def test_without_cached_replies_turns_share_only_the_previous_prompt(simulated: ModuleType, trace: Path) -> None:
    repeated, left_out = (
        [request.text for request in simulated.load_of(trace, 1, is_repeated)] for is_repeated in (True, False)
    )
    for before, after in pairwise(repeated):
        assert before.keys == after.keys[: len(before.keys)]
    for number, (before, after) in enumerate(pairwise(left_out)):
        in_prompt = before.prompt_len // simulated.BLOCK_SIZE
        assert len(before.keys) == len(repeated[number].keys)
        assert before.keys[:in_prompt] == after.keys[:in_prompt]
        assert before.keys[in_prompt:], "no block lies in the reply"
        assert not set(before.keys[in_prompt:]) & set(after.keys)


def test_concurrent_requests_fill_half_of_the_memory(simulated: ModuleType) -> None:
    found = {name: simulated.settings_of(model, 40).max_requests for name, model in simulated.MODELS.items()}
    assert found == {"nano": 256, "8b": 146, "super": 108}
    assert simulated.settings_of(simulated.MODELS["nano"], 0.01).max_requests == 1


def test_table_compares_each_cache_with_unlimited_and_device_only_caches(simulated: ModuleType, trace: Path) -> None:
    caches = [{}, {"host_gb": 4.0}, {"is_unlimited": True}]
    figures = [simulated.simulate(simulated.Case(trace, 6, "nano", 0.7, **cache)) for cache in caches]
    card, host, unlimited = figures
    print(figures)
    assert card.share < host.share <= unlimited.share and unlimited.mean <= host.mean < card.mean
    assert host.restores and host.back and not card.to_host
    rows = [line.split(" | ") for line in simulated.table(figures, "command").splitlines() if line.startswith("| nano")]
    assert [row[1] for row in rows] == ["0.7", "0.7 + 4", "unlimited"]
    assert [float(row[3]) for row in rows] == pytest.approx([f.share / unlimited.share for f in figures], abs=1e-4)
    assert [float(row[5]) for row in rows] == pytest.approx([f.mean / card.mean for f in figures], abs=0.005)
    columns = simulated.table(figures, "command").count("| restores |")
    assert columns == 1 and all(len(row) == 14 for row in rows)


def test_recorded_command_contains_neither_folder_nor_output(simulated: ModuleType) -> None:
    words = ["--trace", "/a/b.jsonl.gz", "--processes", "2", "--append", "/c/d.md", "--models", "8b", "--json"]
    made_by = "PYTHONPATH=. python benchmarks/simulated_tiers.py --trace traces/b.jsonl.gz --models 8b"
    assert simulated.command(simulated.SCRIPT, words) == made_by
