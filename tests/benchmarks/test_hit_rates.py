"""The simulated load serves every request through the real cache, and both eviction rules save tokens."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.command_line.command_runs import REPOSITORY
from tests.policy.split_space import SplitSpace

BLOCK_SIZE = 256


@pytest.fixture
def hit_rates(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    module = import_module("hit_rates")
    small = {name: shape.scaled(sessions=1 / 20) for name, shape in module.LOADS.items()}
    monkeypatch.setattr(module, "LOADS", small)
    module.bound_of.cache_clear()
    return module


@pytest.fixture
def served_load(hit_rates: ModuleType) -> ModuleType:
    return sys.modules["loads.served_load"]


@pytest.mark.parametrize("rule", ["lru", "cost"])
def test_simulated_turns_are_all_served_and_the_cache_stays_consistent(
    hit_rates: ModuleType, served_load: ModuleType, rule: str
) -> None:
    sessions = hit_rates.Work("mixed", 0).sessions()
    cache = hit_rates.make_cache(hit_rates.SIZES.slabs(3 * 10**9), rule)
    served = served_load.ServedLoad(cache, hit_rates.SERVER, sessions, served_load.Observer())
    served.run()
    tally = served.tally
    assert tally.requests == sum(len(session.turns) for session in sessions) == cache.counters.requests_admitted
    assert cache.slots.num_blocks_evicted > cache.slots.num_evicted > 0
    assert tally.computed_tokens == tally.prompt_tokens - tally.skipped_tokens
    prompts = [turn for session in sessions for turn in _prompt_lens(session)]
    assert tally.prompt_tokens == sum(prompts)
    cache.check_integrity([])
    assert cache.slots.num_live == cache.kv.num_referenced == 0


def test_preempted_requests_are_resumed_and_finish(hit_rates: ModuleType, served_load: ModuleType) -> None:
    sessions = hit_rates.Work("unrelated", 0).sessions()
    longest = max(sum(_prompt_lens(session)) + session.turns[-1].num_reply for session in sessions)
    cache = hit_rates.make_cache(SplitSpace(-(-longest // BLOCK_SIZE) + 1, 16), "cost")
    served = served_load.ServedLoad(cache, hit_rates.SERVER, sessions, served_load.Observer())
    served.run()
    assert served.tally.requests == len(sessions) < cache.counters.requests_admitted
    assert served.tally.computed_tokens > served.tally.prompt_tokens
    cache.check_integrity([])


def test_savings_grow_with_memory_up_to_an_unlimited_cache(hit_rates: ModuleType) -> None:
    work = hit_rates.Work("mixed", 1)
    for rule in ("lru", "cost"):
        small, large = (hit_rates.serve(work, gb, rule) for gb in (2.5, 40.0))
        assert 0 < small.saved_tokens < large.saved_tokens <= 1.001 * large.bound_tokens


def test_cost_aware_eviction_saves_more_when_memory_is_short(hit_rates: ModuleType) -> None:
    lru, cost = (hit_rates.serve(hit_rates.Work("mixed", 0), 3.0, rule) for rule in ("lru", "cost"))
    assert cost.saved_tokens > lru.saved_tokens


def test_table_has_a_row_for_each_workload_and_budget(hit_rates: ModuleType) -> None:
    works = [hit_rates.Work("few-shot", 0), hit_rates.Work("unrelated", 0)]
    figures = [hit_rates.serve(work, gb, rule) for work in works for gb in (3.0, 6.0) for rule in hit_rates.RULES]
    rows = [line for line in hit_rates.table(figures).splitlines() if line.startswith(("| few-shot", "| unrelated"))]
    assert len(rows) == 4 and all(line.count("|") == 8 for line in rows)
    assert [row.split("|")[2].strip() for row in rows] == ["3", "6", "3", "6"]
    assert all(line.endswith("| nothing to save |") for line in rows[2:])


def test_plot_without_matplotlib_names_the_missing_package(
    hit_rates: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["hit_rates.py", "--plot", str(tmp_path / "plot.png")])
    with pytest.raises(SystemExit):
        hit_rates.main()
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def _prompt_lens(session: object) -> list[int]:
    length, lens = len(session.prefix), []  # type: ignore[attr-defined]
    for turn in session.turns:  # type: ignore[attr-defined]
        length += len(turn.new_tokens)
        lens.append(length)
        length += turn.num_reply
    return lens
