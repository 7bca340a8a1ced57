"""Savings on recorded loads: selected requests, fixed splits of memory, and the table."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from megatron_mamba_cache.planning.plan import BlockText, replay
from megatron_mamba_cache.policy.identifiers import BlockKey
from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("recorded_hit_rates")


@pytest.fixture
def sized(recorded: ModuleType) -> ModuleType:
    return import_module("loads.sized_cache")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a load with the turns of four conversations, four each, and return its file."""
    lines = []
    for turn in range(4):
        for session in range(4):
            hashes = [100 * session + number for number in range(4 * (turn + 1))]
            entry = {"timestamp": 1000 * len(lines), "input_length": 512 * len(hashes), "output_length": 40}
            lines.append(json.dumps({**entry, "hash_ids": hashes}))
    file = tmp_path / "turns.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_name_of_a_recorded_load_does_not_contain_its_folder(recorded: ModuleType) -> None:
    part = recorded.RecordedPart(Path("/a/b/load.jsonl.gz"), 50, 20, Path("/c/other.jsonl"))
    assert part.name == "half of load.jsonl.gz, after session 20, 50 sessions, then half of other.jsonl"


def test_part_of_a_recorded_load_has_the_selected_sessions(recorded: ModuleType, trace: Path) -> None:
    every = recorded.texts_of(recorded.RecordedPart(trace))
    part = recorded.texts_of(recorded.RecordedPart(trace, first_sessions=5, skip_sessions=4))
    assert [text.prompt_len for text in part] == [text.prompt_len for text in every[4:9]]


def test_concatenated_workloads_share_no_text(recorded: ModuleType, trace: Path) -> None:
    both = recorded.texts_of(recorded.RecordedPart(trace, then=trace))
    every = recorded.texts_of(recorded.RecordedPart(trace))
    assert [text.prompt_len for text in both] == 2 * [text.prompt_len for text in every[:8]]
    first, second = ({key for text in half for key in text.keys} for half in (both[:8], both[8:]))
    assert len(first) == len(second) and not first & second


def test_simulated_pools_fit_in_the_budget(sized: ModuleType) -> None:
    for sizes in sized.MODELS.values():
        assert 0 <= sizes.padding < 0.05
        slabs = sizes.slabs(10**10)
        assert slabs.num_slabs * sizes.state_bytes <= 10**10 < (slabs.num_slabs + 1) * sizes.state_bytes
        for share in (0.1, 0.5, 0.9):
            split = sizes.split(10**10, share)
            taken = split.blocks.num_indices * sizes.block_bytes + split.slots.num_indices * sizes.state_bytes
            assert 10**10 - sizes.block_bytes - sizes.state_bytes < taken <= 10**10


def test_reported_free_bytes_exclude_padding(sized: ModuleType) -> None:
    sizes = sized.MODELS["8b"]
    space = sizes.slabs(10**9)
    cache = sizes.make_cache(space, "cost", 1)
    assert sizes.free_bytes(space) == space.num_slabs * sizes.state_bytes
    replay([BlockText([BlockKey(key) for key in range(1, 31)], 30 * 256, 30 * 256)], cache, 8192)
    assert cache.kv.num_cached > 0
    slabs = space.count_slabs()
    held = cache.kv.num_cached * sizes.block_bytes
    used = slabs["kv_blocks"] * sizes.blocks_per_slab * sizes.block_bytes
    assert sizes.free_bytes(space) == slabs["unused"] * sizes.state_bytes + used - held


def test_savings_of_a_recorded_load_are_within_the_bound_and_reported(recorded: ModuleType, trace: Path) -> None:
    pytest.importorskip("scipy")
    case = recorded.Case(recorded.RecordedPart(trace), "nano", 0.5)
    (figure,) = recorded.measure([case], recorded.RULES, {("turns.jsonl", "nano", 0.5): 0.25}, 1)
    assert 0 < figure.cost <= figure.bound and figure.lru <= figure.bound and figure.best_split <= figure.bound
    assert figure.unlimited <= 24 / 40  # hashes of earlier turns, of 4 + 8 + 12 + 16 hashes per session
    assert figure.before == 0.25 and figure.split_rule in recorded.RULES and figure.kv_share in recorded.KV_SHARES
    text = recorded.table([figure], "a command", "an origin")
    (row,) = [line for line in text.splitlines() if line.startswith("| nano")]
    assert row.count("|") == 11 and row.endswith("| 0.250 |")
    assert "## turns.jsonl" in text and "Before: an origin." in text and str(trace.parent) not in text
    assert json.loads(json.dumps(recorded.document([figure.as_json()])))["figures"][0]["way"] == figure.way


def test_table_without_bounds_explains_why_they_are_missing(recorded: ModuleType) -> None:
    figure = recorded.Figure("load", "8b", 10.0, 0.5, 0.4, 0.3, 0.5, "lru", 0.9, None, 0.01, None)
    assert figure.way is None
    text = recorded.table([figure], "a command")
    assert recorded.NO_SCIPY in text and "| - | - | 1.0% |" in text and "before" not in text


def test_gap_between_best_split_and_bound_is_computed(recorded: ModuleType) -> None:
    figure = recorded.Figure("load", "8b", 10.0, 0.5, 0.4, 0.3, 0.5, "lru", 0.9, 0.7, 0.01, None)
    assert figure.way == pytest.approx(0.5)


def test_recorded_command_contains_no_local_folder(recorded: ModuleType) -> None:
    words = ["--trace", "/x/y/a.jsonl.gz", "--cache-gb", "10", "2.5", "--append", "/x/out.md", "--json"]
    assert recorded.command(recorded.SCRIPT, [*words, "--before", "/z/old.json", "--processes", "1"]) == (
        "PYTHONPATH=. python benchmarks/recorded_hit_rates.py --trace traces/a.jsonl.gz --cache-gb 10 2.5 "
        "--before benchmarks/results/old.json"
    )
