"""The index of entries on disk, compared with a simple reference model."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mamba_cache.policy.identifiers import BlockKey
from megatron_mamba_cache.policy.tiers.copies import EntryName
from megatron_mamba_cache.policy.tiers.disk_index import DiskIndex

BLOCK, ENTRY = 3, 10
TEXTS = [[BlockKey(100 * text + block) for block in range(1, 9)] for text in range(1, 5)]


def entry(keys: list[BlockKey], start: int, end: int) -> EntryName:
    """Return the entry between two boundaries of a text."""
    return EntryName(keys[end - 1], keys[start - 1] if start else 0, end, end - start)


def bytes_of(names: set[EntryName]) -> int:
    return sum(ENTRY + BLOCK * name.num_blocks for name in names)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 120))
def test_disk_index_matches_a_reference_dict_under_random_calls(seed: int, limit: int) -> None:
    rng, index, known = random.Random(seed), DiskIndex(BLOCK, ENTRY, limit), dict[int, EntryName]()
    for _ in range(60):
        keys = rng.choice(TEXTS)
        depth = rng.randrange(1, len(keys) + 1)
        start = index.anchor_of(keys[:depth])
        assert start == max((d for d in range(1, depth) if keys[d - 1] in known), default=0)
        name = entry(keys, start, depth)
        if name.key in known:
            if rng.random() < 0.3:
                index.remove(known[name.key])
                del known[name.key]
            continue
        kept = {name.anchor, *rng.sample(sorted(known), min(len(known), 1))}
        before = set(known.values())
        leaving = index.make_room(name, kept)
        if leaving is None:
            assert {e for e in before if e.key in index} == before
            continue
        assert not kept & {e.key for e in leaving}
        for left in leaving:  # nothing is left without what it follows, as far as that was there
            del known[left.key]
            assert not any(other.anchor == left.key for other in known.values())
        index.add(name)
        known[name.key] = name
        index.check_integrity()
        assert index.num_bytes == bytes_of(set(known.values())) <= limit
        assert len(index) == len(known) and all(key in index for key in known)


def test_disk_entries_are_chained_from_cached_blocks_without_gaps() -> None:
    keys, index = TEXTS[0], DiskIndex(BLOCK, ENTRY, 10**6)
    first, second, fourth = entry(keys, 0, 2), entry(keys, 2, 5), entry(keys, 6, 8)
    for name in (first, second, fourth):
        index.add(name)
    assert index.chain(keys, 0) == [first, second]  # an entry before the last is missing
    assert index.chain(keys, 2) == [second]
    assert index.chain(keys, 6) == [fourth]
    assert index.chain(keys[:4], 0) == [first]
    assert index.chain(TEXTS[1], 8) == []
    index.remove(first)
    assert index.chain(keys, 0) == [] and index.chain(keys, 1) == []


def test_disk_entry_of_a_wrong_depth_is_ignored() -> None:
    keys, index = TEXTS[0], DiskIndex(BLOCK, ENTRY, 10**6)
    index.add(EntryName(keys[4], 0, 3, 3))
    index.add(EntryName(keys[6], 0, 7, 9))
    assert index.chain(keys, 0) == []


def test_least_recently_used_disk_entry_at_a_text_end_is_evicted_first() -> None:
    index = DiskIndex(BLOCK, ENTRY, 4 * ENTRY + 8 * BLOCK)
    a, b, c = (entry(keys, 0, 2) for keys in TEXTS[:3])
    tail = entry(TEXTS[0], 2, 4)
    for name in (a, b, c, tail):
        index.add(name)
    index.use([b])
    assert index.make_room(entry(TEXTS[3], 0, 2), ()) == [c]
    assert index.make_room(entry(TEXTS[3], 0, 8), ()) == [tail, a]


def test_disk_index_is_trimmed_to_its_limit_and_empty_once_closed() -> None:
    index = DiskIndex(BLOCK, ENTRY, 2 * (ENTRY + 2 * BLOCK))
    names = [entry(keys, 0, 2) for keys in TEXTS]
    for name in names:
        index.add(name)
    assert index.trim() == names[:2] and index.trim() == []
    index.close()
    assert len(index) == 0 and index.make_room(names[0], ()) is None


def test_disk_entry_larger_than_the_limit_evicts_nothing() -> None:
    index = DiskIndex(BLOCK, ENTRY, 30)
    index.add(entry(TEXTS[0], 0, 2))
    assert index.make_room(entry(TEXTS[1], 0, 8), ()) is None
    assert index.chain(TEXTS[0], 0) == [entry(TEXTS[0], 0, 2)]
