"""The bookkeeping benchmark times every operation in full pools."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def bookkeeping(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("bookkeeping")


@pytest.mark.parametrize("space", ["split", "slabs"])
@pytest.mark.parametrize("depth", [1, 32, 500])
def test_benchmark_pools_are_full_of_unreferenced_blocks(bookkeeping: ModuleType, space: str, depth: int) -> None:
    pools, chains = bookkeeping._full_pools(1000, depth, bookkeeping.Setting(space, "cost"))
    num_in_last_slab = 8 if space == "slabs" else 0  # 1,000 blocks in slabs of 24
    assert sum(map(len, chains)) == pools.kv.num_cached == 1000
    assert (pools.kv.num_free, pools.slots.num_free, pools.kv.num_referenced) == (num_in_last_slab, 0, 0)
    assert all(pools.slots.slot_of(chain[-1]) is not None for chain in chains)
    pools.kv.check_integrity()
    pools.slots.check_integrity()
    pools.space.check_integrity()


def test_every_operation_is_measured_for_both_pools(bookkeeping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "POOL_SIZES", (1000,))
    monkeypatch.setattr(bookkeeping, "SLOT_POOL_SIZES", (1000,))
    split, slabs = (bookkeeping._of_space(space) for space in bookkeeping.SPACES)
    assert len(split) == len(slabs) == len({figure.operation for figure in (*split, *slabs)}) / 2
    assert all(figure.microseconds > 0 for figure in (*split, *slabs))


def test_new_prefixes_evict_old_prefixes(bookkeeping: ModuleType) -> None:
    for space in bookkeeping.SPACES:
        calls = list(bookkeeping._new_chains(1000, bookkeeping.Setting(space, "lru"), 32))
        assert len(calls) == 125 and all(len(call) == 33 for call in calls)


def test_older_eviction_cost_adds_up_the_costs_of_blocks_and_slots(bookkeeping: ModuleType) -> None:
    costs = {
        "allocate(1), evicting, chains of 1": 2.0,
        "allocate(1), evicting, chains of 4": 3.0,
        "take_live, evicting": 4.0,
        "take_live, evicting, cost-aware": 5.0,
        "acquire + release": 6.0,
    }
    before = {(name, 10): cost for name, cost in costs.items()}
    alongside = {
        "allocate(1) and slot, evicting, chains of 1, slabs": 6.0,
        "allocate(1) and slot, evicting, chains of 4": 4.0,
        "take_live, evicting, slabs": 6.0,
        "take_live, evicting, cost-aware, slabs": None,
        "allocate(1) and slot, evicting, chains of 1, cost-aware": None,
        "acquire + release, slabs": 6.0,
        "of today alone": None,
    }
    assert {
        name: bookkeeping._cost_before(bookkeeping.Figure(name, 10, 1.0), before) for name in alongside
    } == alongside
    assert bookkeeping._row(bookkeeping.Figure("take_live, evicting", 10, 9.0), before).endswith("| 9.0 | 6.0 | 1.50 |")
    assert bookkeeping._row(bookkeeping.Figure("take_live, evicting", 20, 9.0), before).endswith("| 9.0 | - | - |")


@pytest.mark.parametrize("text_len", [1, 4])
def test_both_commits_serve_the_same_requests(bookkeeping: ModuleType, text_len: int) -> None:
    alongside = import_module("bookkeeping_compared")
    case = alongside.Case(64, text_len, "cost")
    split, slabs = alongside.pools_now(case)
    before = replace(alongside.pools_now(case)[0], name="before")
    medians = alongside.measure([before, split, slabs], case)
    assert len(medians) == 9 and all(us > 0 for us in medians.values())
    assert before.slots.num_evicted == split.slots.num_evicted > case.num_requests - 2
    for side in (before, split, slabs):
        side.kv.check_integrity()
        side.slots.check_integrity()
        assert side.kv.num_referenced == side.slots.num_live == 0


def test_module_from_another_checkout_is_imported_alongside_ours(bookkeeping: ModuleType, tmp_path: Path) -> None:
    policy = tmp_path / "megatron_mamba_cache" / "policy"
    policy.mkdir(parents=True)
    for folder in (policy.parent, policy):
        (folder / "__init__.py").touch()
    (policy / "slot_pool.py").write_text("MADE_BY = 'another tree'\n")
    ours = import_module("megatron_mamba_cache.policy.slot_pool")
    theirs = import_module("bookkeeping_compared")._module_of(tmp_path, "slot_pool")
    assert theirs.MADE_BY == "another tree"
    assert import_module("megatron_mamba_cache.policy.slot_pool") is ours
