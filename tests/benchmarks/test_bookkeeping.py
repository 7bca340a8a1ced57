"""The pools that bookkeeping is timed in are full, and every operation is timed in them."""

from importlib import import_module
from types import ModuleType

import pytest

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def bookkeeping(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("bookkeeping")


@pytest.mark.parametrize("space", ["split", "slabs"])
@pytest.mark.parametrize("depth", [1, 32, 500])
def test_pools_are_full_of_chains_that_nothing_holds(bookkeeping: ModuleType, space: str, depth: int) -> None:
    pools, chains = bookkeeping._full_pools(1000, depth, bookkeeping.Setting(space, "cost"))
    num_in_last_slab = 8 if space == "slabs" else 0  # 1,000 blocks in slabs of 24
    assert sum(map(len, chains)) == pools.kv.num_cached == 1000
    assert (pools.kv.num_free, pools.slots.num_free, pools.kv.num_referenced) == (num_in_last_slab, 0, 0)
    assert all(pools.slots.slot_of(chain[-1]) is not None for chain in chains)
    pools.kv.check_integrity()
    pools.slots.check_integrity()
    pools.space.check_integrity()


def test_every_operation_has_a_figure_in_both_spaces(bookkeeping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "POOL_SIZES", (1000,))
    monkeypatch.setattr(bookkeeping, "SLOT_POOL_SIZES", (1000,))
    split, slabs = (bookkeeping._of_space(space) for space in bookkeeping.SPACES)
    assert len(split) == len(slabs) == len({figure.operation for figure in (*split, *slabs)}) / 2
    assert all(figure.microseconds > 0 for figure in (*split, *slabs))


def test_new_chains_evict_old_ones(bookkeeping: ModuleType) -> None:
    for space, num_calls in (("split", 32), ("slabs", 33)):
        calls = list(bookkeeping._new_chains(1000, bookkeeping.Setting(space, "lru"), 32))
        assert len(calls) == 125 and all(len(call) == num_calls for call in calls)


def test_a_row_stands_beside_the_same_operation_before(bookkeeping: ModuleType) -> None:
    before = bookkeeping.costs_of({"figures": [{"operation": "allocate(1), x", "size": 10, "microseconds": 2.0}]})
    rows = [
        bookkeeping._row(bookkeeping.Figure(name, size, 3.0), before)
        for name, size in (("allocate(1) and slot, x, slabs", 10), ("allocate(1), x", 10), ("allocate(1), x", 20))
    ]
    assert [row.split("|", 3)[3] for row in rows] == [" 3.0 | 2.0 | 1.50 |", " 3.0 | 2.0 | 1.50 |", " 3.0 | - | - |"]
