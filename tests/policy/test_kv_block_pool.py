from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_mamba_cache.errors import CacheCapacityError, CacheIntegrityError
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.kv_block_pool import KVBlockPool


def keys_of(path: Sequence[int]) -> list[BlockKey]:
    """Keys of a chain of one-token blocks, as numbers that can be read: the path in base 100."""
    keys, key = [], 0
    for token in path:
        key = key * 100 + token
        keys.append(BlockKey(key))
    return keys


def hold(pool: KVBlockPool, path: Sequence[int]) -> list[BlockId]:
    """Match, acquire, allocate and register the chain, as a request does."""
    keys = keys_of(path)
    blocks = pool.longest_match(keys)
    num_matched = len(blocks)
    pool.acquire(blocks)
    blocks += pool.allocate(len(keys) - num_matched)
    for index in range(num_matched, len(keys)):
        blocks[index] = pool.register(blocks[index], keys[index], blocks[index - 1] if index else None)
    pool.check_integrity()
    return blocks


def cache(pool: KVBlockPool, path: Sequence[int]) -> list[BlockId]:
    blocks = hold(pool, path)
    pool.release(blocks)
    pool.check_integrity()
    return blocks


def snapshot(pool: KVBlockPool) -> tuple[object, ...]:
    blocks = [BlockId(block) for block in range(pool.num_blocks)]
    states = [(pool.num_refs(b), pool.key_of(b), pool.parent_of(b), pool.depth(b)) for b in blocks]
    return states, pool.num_free, pool.num_cached, pool.num_referenced, pool.num_available, pool.num_evicted


def test_a_new_pool_is_free() -> None:
    pool = KVBlockPool(10)
    assert (pool.num_free, pool.num_cached, pool.num_referenced, pool.num_available) == (10, 0, 0, 10)
    pool.check_integrity()


def test_allocate_hands_out_distinct_blocks_with_one_reference() -> None:
    pool = KVBlockPool(10)
    blocks = pool.allocate(9)
    assert sorted(blocks) == list(range(9))
    assert {pool.num_refs(block) for block in blocks} == {1}
    assert (pool.num_free, pool.num_referenced) == (1, 9)


def test_a_failed_allocation_changes_nothing_and_says_what_to_raise() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(4, on_evict=evicted.append)
    pool.allocate(2)
    cache(pool, [1])
    before = snapshot(pool)
    with pytest.raises(CacheCapacityError, match=r"need 3 KV blocks, 1 free and 1 evictable.*buffer-size-gb"):
        pool.allocate(3)
    assert snapshot(pool) == before
    assert evicted == []
    assert len(pool.allocate(2)) == 2


def test_ten_identical_prompts_share_the_blocks_of_the_first() -> None:
    pool = KVBlockPool(10)
    first = hold(pool, [1, 2, 3])
    available = pool.num_available
    for _ in range(9):
        assert hold(pool, [1, 2, 3]) == first
    assert pool.num_available == available
    assert [pool.num_refs(block) for block in first] == [10, 10, 10]


def test_a_divergent_third_block_shares_two() -> None:
    pool = KVBlockPool(10)
    first, second = hold(pool, [1, 2, 3]), hold(pool, [1, 2, 4])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert pool.num_referenced == 4


def test_a_broken_chain_matches_only_what_precedes_the_break() -> None:
    pool = KVBlockPool(10)
    blocks = cache(pool, [1, 2, 3])
    keys = keys_of([1, 2, 3])
    assert pool.longest_match([keys[0], BlockKey(77), keys[2]]) == blocks[:1]
    assert pool.longest_match([BlockKey(77), *keys]) == []


def test_a_match_mutates_nothing() -> None:
    pool = KVBlockPool(2)
    (old,) = cache(pool, [1])
    cache(pool, [2])
    before = snapshot(pool)
    assert pool.longest_match(keys_of([1])) == [old]
    assert pool.find(BlockKey(1)) == old
    assert pool.num_available_beside([old]) == 1
    assert snapshot(pool) == before
    assert pool.allocate(1) == [old]


def test_an_unregistered_block_is_never_found() -> None:
    pool = KVBlockPool(3)
    blocks = pool.allocate(2)
    pool.register(blocks[0], BlockKey(1), None)
    assert pool.longest_match(keys_of([1, 2])) == blocks[:1]
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_the_last_release_frees_an_unregistered_block_and_caches_a_registered_one() -> None:
    pool = KVBlockPool(5)
    blocks = hold(pool, [1, 2])
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_referenced == 2
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (3, 2, 0)
    assert pool.longest_match(keys_of([1, 2])) == blocks


def test_a_block_released_by_every_owner_in_one_call_is_freed_once() -> None:
    pool = KVBlockPool(3)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.release([block, block])
    assert pool.num_free == 3
    pool.check_integrity()
    assert len(set(pool.allocate(3))) == 3


def test_releasing_once_too_often_is_an_error_that_changes_nothing() -> None:
    pool = KVBlockPool(4)
    kept, lost = hold(pool, [1]), pool.allocate(1)
    pool.release(lost)
    before = snapshot(pool)
    for blocks in ([*kept, *lost], [*kept, *kept]):
        with pytest.raises(CacheIntegrityError, match="release"):
            pool.release(blocks)
        assert snapshot(pool) == before
        pool.check_integrity()


def test_acquiring_a_free_block_is_an_error_that_changes_nothing() -> None:
    pool = KVBlockPool(4)
    held = hold(pool, [1])
    before = snapshot(pool)
    with pytest.raises(CacheIntegrityError, match="free"):
        pool.acquire([*held, BlockId(3)])
    assert snapshot(pool) == before


def test_a_padding_id_never_reaches_the_last_block() -> None:
    pool = KVBlockPool(2)
    blocks = pool.allocate(2)
    for block in (-1, 2):
        for call in (pool.acquire, pool.release, pool.touch):
            with pytest.raises(ValueError, match="block ids"):
                call([BlockId(block)])
        with pytest.raises(ValueError, match="block ids"):
            pool.register(BlockId(block), BlockKey(1), None)
    assert [pool.num_refs(block) for block in blocks] == [1, 1]


def test_a_younger_leaf_goes_before_its_older_parent() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(2, on_evict=evicted.append)
    parent, leaf = cache(pool, [1, 2])
    pool.touch([parent], time=1)
    pool.touch([leaf], time=50)
    pool.allocate(1)
    assert evicted == [leaf]
    assert pool.longest_match(keys_of([1, 2])) == [parent]


def test_a_parent_survives_until_both_children_went() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(3, on_evict=evicted.append)
    parent, left = cache(pool, [1, 2])
    right = cache(pool, [1, 3])[1]
    for expected in ([left], [left, right], [left, right, parent]):
        pool.allocate(1)
        assert evicted == expected
        pool.check_integrity()
    assert pool.num_evicted == 3


def test_a_parent_of_a_referenced_block_is_never_evicted() -> None:
    pool = KVBlockPool(3)
    blocks = hold(pool, [1, 2])
    pool.allocate(1)
    with pytest.raises(CacheCapacityError):
        pool.allocate(1)
    assert pool.longest_match(keys_of([1, 2])) == blocks


def test_the_least_recently_used_blocks_go_first() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(4, on_evict=evicted.append)
    blocks = [cache(pool, [token])[0] for token in (1, 2, 3, 4)]
    for block, time in zip(blocks, [40, 10, 30, 20], strict=True):
        pool.touch([block], time)
    pool.allocate(2)
    assert evicted == [blocks[1], blocks[3]]


def test_a_release_counts_as_a_use() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(2, on_evict=evicted.append)
    (long_held,), (brief,) = hold(pool, [1]), hold(pool, [2])
    pool.release([brief])
    pool.release([long_held])
    pool.allocate(1)
    assert evicted == [brief]


def test_a_use_after_a_set_time_is_later_than_it() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(2, on_evict=evicted.append)
    (first,), (second,) = cache(pool, [1]), cache(pool, [2])
    pool.touch([first], time=1_000)
    pool.touch([second])
    pool.allocate(1)
    assert evicted == [first]


def test_of_blocks_used_together_the_deepest_goes_first() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(4, on_evict=evicted.append)
    long, short = hold(pool, [1, 2]), hold(pool, [3])
    pool.release([*short, *long])
    pool.allocate(4)
    assert evicted == [long[1], *sorted([long[0], *short])]


def test_worth_sees_depth_in_tokens() -> None:
    seen: list[int] = []

    def by_depth(entry: object) -> float:
        seen.append(entry.num_tokens)  # type: ignore[attr-defined]
        return 0

    pool = KVBlockPool(4, by_depth, block_size=16)
    cache(pool, [1, 2, 3])
    assert seen == [48]


def test_matched_blocks_do_not_count_as_available_beside_themselves() -> None:
    pool = KVBlockPool(4)
    shared = cache(pool, [1, 2])
    held = hold(pool, [3])
    assert pool.num_available == 3
    assert pool.num_available_beside(shared) == 1
    assert pool.num_available_beside([*shared, *shared]) == 1
    assert pool.num_available_beside(held) == 3
    pool.acquire(shared)
    assert pool.num_available == 1
    pool.allocate(1)
    assert pool.longest_match(keys_of([1, 2])) == shared


def test_a_second_block_for_a_key_gives_way_to_the_first() -> None:
    pool = KVBlockPool(4)
    (known,) = hold(pool, [1])
    (twin,) = pool.allocate(1)
    assert pool.register(twin, BlockKey(1), None) == known
    assert (pool.num_refs(known), pool.num_refs(twin), pool.num_free) == (2, 0, 3)
    assert pool.key_of(twin) is None
    pool.check_integrity()


def test_a_cached_block_is_adopted_and_can_then_not_be_evicted() -> None:
    pool = KVBlockPool(2)
    (known,) = cache(pool, [1])
    (twin,) = pool.allocate(1)
    assert pool.register(twin, BlockKey(1), None) == known
    assert pool.num_refs(known) == 1
    assert pool.allocate(1) == [twin]
    pool.check_integrity()


def test_only_the_callers_reference_moves_to_the_known_block() -> None:
    pool = KVBlockPool(4)
    (known,) = hold(pool, [1])
    (twin,) = pool.allocate(1)
    pool.acquire([twin])
    assert pool.register(twin, BlockKey(1), None) == known
    assert (pool.num_refs(known), pool.num_refs(twin)) == (2, 1)


def test_registering_twice_under_one_key_changes_nothing() -> None:
    pool = KVBlockPool(4)
    parent, block = hold(pool, [1, 2])
    before = snapshot(pool)
    assert pool.register(block, keys_of([1, 2])[1], parent) == block
    assert snapshot(pool) == before
    pool.check_integrity()


def test_a_wrong_registration_is_an_error_that_changes_nothing() -> None:
    pool = KVBlockPool(8)
    parent, block = hold(pool, [1, 2])
    (cached,) = cache(pool, [5])
    (new,) = pool.allocate(1)
    (unregistered,) = pool.allocate(1)
    key = BlockKey(77)
    before = snapshot(pool)
    wrong = {
        "another key": (block, key, parent),
        "unreferenced": (BlockId(7), key, None),
        "registered, referenced parent": (new, key, unregistered),
        "one parent a key": (new, keys_of([1, 2])[1], None),
    }
    for message, arguments in wrong.items():
        with pytest.raises(CacheIntegrityError, match=message):
            pool.register(*arguments)
        assert snapshot(pool) == before
    with pytest.raises(CacheIntegrityError, match="referenced parent"):
        pool.register(new, key, cached)
    for no_key in (0, -1):
        with pytest.raises(ValueError, match="positive key"):
            pool.register(new, BlockKey(no_key), None)
    assert snapshot(pool) == before
    pool.check_integrity()


def test_parents_and_depths_follow_the_chain() -> None:
    pool = KVBlockPool(4)
    blocks = hold(pool, [1, 2, 3])
    assert [pool.parent_of(block) for block in blocks] == [None, *blocks[:2]]
    assert [pool.depth(block) for block in blocks] == [1, 2, 3]
    assert [pool.key_of(block) for block in blocks] == keys_of([1, 2, 3])


def test_an_evicted_block_is_reported_once_before_it_is_used_again() -> None:
    reports: list[tuple[BlockId, int, BlockKey | None]] = []
    pool = KVBlockPool(3, on_evict=lambda block: reports.append((block, pool.num_refs(block), pool.key_of(block))))
    blocks = cache(pool, [1, 2, 3])
    pool.allocate(3)
    assert reports == [(block, 0, None) for block in reversed(blocks)]


def test_flush_forgets_every_key_and_takes_no_block_from_its_holder() -> None:
    evicted: list[BlockId] = []
    pool = KVBlockPool(6, on_evict=evicted.append)
    held, cached = hold(pool, [1, 2]), cache(pool, [1, 3, 4])[1:]
    pool.flush()
    pool.check_integrity()
    assert evicted == sorted([*held, *cached])
    assert pool.num_evicted == 0
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (4, 0, 2)
    assert pool.longest_match(keys_of([1, 2])) == []
    evicted.clear()
    pool.release(held)
    assert pool.num_free == 6
    assert evicted == held  # nothing is registered on them by now, but something may hang on them
    assert len(set(pool.allocate(6))) == 6


def test_a_row_from_before_a_flush_cannot_publish_behind_it() -> None:
    pool = KVBlockPool(6)
    held = hold(pool, [1])
    (new,) = pool.allocate(1)
    pool.flush()
    with pytest.raises(CacheIntegrityError, match="parent"):
        pool.register(new, keys_of([1, 2])[1], held[0])


def test_check_integrity_finds_a_child_held_without_its_parent() -> None:
    pool = KVBlockPool(4)
    parent, child = cache(pool, [1, 2])
    pool.acquire([child])
    with pytest.raises(CacheIntegrityError, match=rf"refs\(parent {parent}\) = 0"):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._free.append(pool._free[-1]), "!= 4 blocks"),
        (lambda pool: pool._free.__setitem__(0, pool._free[1]), "block twice"),
        (lambda pool: pool._tree._block_of.popitem(), "inverse"),
        (lambda pool: pool._tree._num_children.__setitem__(0, 9), "children"),
        (lambda pool: pool._evictable.clear(), "evictable"),
        (lambda pool: setattr(pool, "_num_cached", 0), "counted 0"),
    ],
)
def test_check_integrity_finds_a_broken_invariant(corrupt: object, message: str) -> None:
    pool = KVBlockPool(4)
    cache(pool, [1, 2])
    corrupt(pool)  # type: ignore[operator]
    with pytest.raises(CacheIntegrityError, match=message):
        pool.check_integrity()


@dataclass(slots=True)
class Row:
    """What a request knows: its tokens, its blocks, how many of them are registered."""

    path: list[int]
    blocks: list[BlockId]
    num_registered: int
    stale: bool = False


@dataclass(slots=True)
class Model:
    """The pool said in the plainest way: two dicts and a search."""

    refs: dict[BlockId, int] = field(default_factory=dict)
    registered: dict[BlockKey, BlockId] = field(default_factory=dict)
    last_used: dict[BlockId, int] = field(default_factory=dict)
    clock: int = 0

    def use(self, blocks: Sequence[BlockId]) -> None:
        self.clock += 1
        self.last_used.update(dict.fromkeys(blocks, self.clock))

    def cached(self) -> set[BlockId]:
        return {block for block in self.registered.values() if not self.refs.get(block)}

    def evict(self) -> BlockId:
        parents = {int(key) // 100 for key in self.registered}
        leaves = [
            (self.last_used[block], -len(str(key)), block)  # keys have two digits a block: a longer one is deeper
            for key, block in self.registered.items()
            if block in self.cached() and key not in parents
        ]
        victim = min(leaves)[2]
        self.registered = {key: block for key, block in self.registered.items() if block != victim}
        return victim


class PoolMachine(RuleBasedStateMachine):
    """Rows come, publish, grow and go in a small pool; the model foretells every count and every eviction."""

    num_blocks = 8
    tokens = st.integers(10, 12)

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[BlockId] = []
        self.pool = KVBlockPool(self.num_blocks, on_evict=self.evicted.append)
        self.model = Model()
        self.rows: list[Row] = []

    def _allocate(self, num_blocks: int) -> list[BlockId]:
        num_free = self.pool.num_free
        del self.evicted[:]
        if num_blocks > self.pool.num_available:
            with pytest.raises(CacheCapacityError):
                self.pool.allocate(num_blocks)
            assert self.evicted == []
            return []
        blocks = self.pool.allocate(num_blocks)
        assert self.evicted == [self.model.evict() for _ in range(max(0, num_blocks - num_free))]
        assert not any(self.model.refs.get(block) for block in blocks)
        self.model.refs.update(dict.fromkeys(blocks, 1))
        return blocks

    @rule(path=st.lists(tokens, min_size=1, max_size=4))
    def admit(self, path: list[int]) -> None:
        matched = self.pool.longest_match(keys_of(path))
        num_new = len(path) - len(matched)
        if self.pool.num_available_beside(matched) < num_new:
            return
        self.pool.acquire(matched)
        self.model.use(matched)
        for block in matched:
            self.model.refs[block] = self.model.refs.get(block, 0) + 1
        blocks = [*matched, *self._allocate(num_new)]
        assert len(blocks) == len(path)
        self.rows.append(Row(path, blocks, len(matched)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), token=tokens)
    def grow(self, data: st.DataObject, token: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        if len(row.path) < 6 and (blocks := self._allocate(1)):
            row.path.append(token)
            row.blocks += blocks

    @precondition(lambda self: any(row.num_registered < len(row.path) and not row.stale for row in self.rows))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        rows = [row for row in self.rows if row.num_registered < len(row.path) and not row.stale]
        row = data.draw(st.sampled_from(rows))
        index = row.num_registered
        own, key = row.blocks[index], keys_of(row.path)[index]
        expected = self.model.registered.setdefault(key, own)
        held = self.pool.register(own, key, row.blocks[index - 1] if index else None)
        assert held == expected
        if held != own:
            self.model.refs[own] -= 1
            self.model.refs[held] = self.model.refs.get(held, 0) + 1
        self.model.use([held])
        row.blocks[index] = held
        row.num_registered += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self._release(row.blocks)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def give_back_the_last_block(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        if len(row.blocks) > 1:
            row.path.pop()
            self._release([row.blocks.pop()])
            row.num_registered = min(row.num_registered, len(row.path))

    def _release(self, blocks: list[BlockId]) -> None:
        self.pool.release(blocks)
        self.model.use(blocks)
        for block in blocks:
            self.model.refs[block] -= 1

    @rule(blocks=st.lists(st.integers(0, num_blocks - 1).map(BlockId), max_size=3))
    def touch(self, blocks: list[BlockId]) -> None:
        self.pool.touch(blocks)
        self.model.use(blocks)

    @rule()
    def flush(self) -> None:
        del self.evicted[:]
        registered = sorted(self.model.registered.values())
        self.pool.flush()
        assert self.evicted == registered
        self.model.registered = {}
        for row in self.rows:
            row.stale = True

    @invariant()
    def pool_agrees_with_model(self) -> None:
        self.pool.check_integrity()
        cached = self.model.cached()
        num_referenced = sum(1 for refs in self.model.refs.values() if refs)
        assert self.pool.num_cached == len(cached)
        assert self.pool.num_referenced == num_referenced
        assert self.pool.num_free == self.num_blocks - len(cached) - num_referenced
        assert all(self.pool.num_refs(block) == refs for block, refs in self.model.refs.items())
        assert all(self.pool.find(key) == block for key, block in self.model.registered.items())

    def teardown(self) -> None:
        for row in self.rows:
            self.pool.release(row.blocks)
        self.pool.check_integrity()
        assert self.pool.num_available == self.num_blocks
        assert sorted(self.pool.allocate(self.num_blocks)) == list(range(self.num_blocks))


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
