"""The journal reports exactly the boundaries that a replica can resume from."""

import random

import pytest

from megatron_mamba_cache.policy.boundary_journal import BoundaryChanges, BoundaryJournal
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from tests.policy.small_cache import cached_states, drop_states, new_spec, prefill, serve, small_cache


def resumable(cache: PrefixCache) -> set[BlockKey | None]:
    return {cache.kv.key_of(block) for block in cached_states(cache)}


def apply(changes: BoundaryChanges, known: set[BlockKey | None]) -> set[BlockKey | None]:
    kept = set() if changes.were_flushed else known - {*changes.dropped}
    assert changes.were_flushed or known >= {*changes.dropped}
    assert not kept & {*changes.published}
    return kept | {*changes.published}


def test_first_report_has_every_resumable_prefix() -> None:
    cache, journal = small_cache(), BoundaryJournal()
    serve(cache, new_spec(0, range(10)))
    cache.slots.observe(journal)
    assert {*journal.take(cache.kv.key_of).published} == resumable(cache) != set()


def test_prefix_cached_and_evicted_between_reports_is_not_reported() -> None:
    cache, journal = small_cache(), BoundaryJournal()
    cache.slots.observe(journal)
    serve(cache, new_spec(0, range(10)))
    drop_states(cache)
    assert not journal.take(cache.kv.key_of)


def test_report_after_a_flush_contains_only_the_flush() -> None:
    cache, journal = small_cache(), BoundaryJournal()
    cache.slots.observe(journal)
    serve(cache, new_spec(0, range(10)))
    journal.take(cache.kv.key_of)
    cache.flush()
    assert journal.take(cache.kv.key_of) == BoundaryChanges(were_flushed=True)


def test_block_without_a_key_is_not_reported() -> None:
    journal = BoundaryJournal()
    journal.published(BlockId(3))
    assert not journal.take(lambda _: None)


def test_block_with_a_new_key_is_reported_as_dropped_and_published() -> None:
    journal = BoundaryJournal()
    journal.published(BlockId(3))
    journal.take(lambda _: BlockKey(7))
    journal.dropped(BlockId(3))
    journal.published(BlockId(3))
    assert journal.take(lambda _: BlockKey(8)) == BoundaryChanges((BlockKey(8),), (BlockKey(7),))


@pytest.mark.parametrize("seed", range(20))
def test_reported_changes_add_up_to_the_resumable_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    cache, journal = small_cache(num_blocks=14, num_slots=5, stride=rng.choice([None, 1])), BoundaryJournal()
    cache.slots.observe(journal)
    known: set[BlockKey | None] = set()
    for request_id in range(60):
        prompt = [*range(rng.randrange(9)), *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))]
        if rng.random() < 0.1:
            cache.flush()
        elif rng.random() < 0.5:
            cache.release(prefill(cache, new_spec(request_id, prompt)))
        else:
            serve(cache, new_spec(request_id, prompt), [rng.randrange(3) for _ in range(rng.randrange(10))])
        if rng.random() < 0.5:
            known = apply(journal.take(cache.kv.key_of), known)
            assert known == resumable(cache)
