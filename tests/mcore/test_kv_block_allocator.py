"""Megatron's block allocator interface over the block pool."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator

from megatron_mamba_cache import KVBlockAllocator
from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy.eviction_rules import LeastRecentlyUsed
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.kv_block_pool import KVBlockPool
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.slot_pool import SlotPool
from tests.policy.split_space import SplitSpace

TOTAL = 10


def request(*blocks: int, paused: bool = False) -> SimpleNamespace:
    return SimpleNamespace(block_ids=[BlockId(block) for block in blocks], is_paused=paused)


def allocator(total: int = TOTAL, paused: int = 2, requests: tuple[SimpleNamespace, ...] = ()) -> KVBlockAllocator:
    return KVBlockAllocator(
        SimpleNamespace(running_requests=list(requests)), total, paused, KVBlockPool(max(total - 1, 0), SlotPool(0))
    )


def take(own: KVBlockAllocator, num_blocks: int) -> torch.Tensor:
    blocks = own.allocate_memory_blocks(num_blocks)
    assert blocks is not None
    return blocks


def test_kv_allocator_has_the_interface_of_megatrons_allocator() -> None:
    assert issubclass(KVBlockAllocator, BlockAllocator)
    for name in ("allocate_memory_blocks", "release_memory_blocks", "is_memory_available", "reset"):
        own, theirs = (
            list(inspect.signature(getattr(cls, name)).parameters) for cls in (KVBlockAllocator, BlockAllocator)
        )
        assert own == theirs


def test_pool_of_ten_blocks_has_nine_usable_blocks_and_a_dummy() -> None:
    own = allocator()
    assert (own.total_avail, own.dummy_block_idx, own.active_count, own.paused_count) == (9, 9, 7, 2)
    blocks = take(own, 9)
    assert sorted(blocks.tolist()) == list(range(9))
    assert own.total_avail == 0 and own.get_total_used() == 9


def test_block_ids_are_int32_on_the_device_of_the_kv_cache() -> None:
    blocks = take(allocator(), 3)
    assert (blocks.dtype, blocks.shape) == (torch.int32, (3,))
    assert blocks.device == torch.empty(0, device=torch.cuda.current_device()).device


def test_zero_blocks_can_be_allocated() -> None:
    own = allocator()
    assert take(own, 0).tolist() == [] and own.total_avail == 9


def test_failed_allocation_returns_none_and_changes_nothing() -> None:
    own = allocator()
    take(own, 7)
    before = own.pool.count_by_kind()
    assert not own.is_memory_available(3)
    assert own.allocate_memory_blocks(3) is None
    assert own.pool.count_by_kind() == before == {"free": 2, "cached": 0, "in_use": 7}
    assert own.is_memory_available(2) and len(take(own, 2)) == 2


def test_released_blocks_can_be_allocated_again() -> None:
    own = allocator()
    blocks = take(own, 9)
    own.release_memory_blocks(blocks[:4])
    assert own.total_avail == 4
    assert sorted(take(own, 4).tolist()) == sorted(blocks[:4].tolist())


def test_block_with_two_references_is_freed_after_two_releases() -> None:
    own = allocator()
    blocks = take(own, 1)
    own.pool.acquire([BlockId(int(blocks[0]))])
    own.release_memory_blocks(torch.cat((blocks, blocks)))
    assert own.total_avail == 9
    assert sorted(take(own, 9).tolist()) == list(range(9))


def test_block_with_two_references_stays_allocated_after_one_release() -> None:
    own = allocator()
    blocks = take(own, 1)
    own.pool.acquire([BlockId(int(blocks[0]))])
    own.release_memory_blocks(blocks)
    assert own.total_avail == 8
    own.release_memory_blocks(blocks)
    assert own.total_avail == 9


def test_releasing_a_block_too_often_raises_and_changes_nothing() -> None:
    own = allocator()
    blocks = take(own, 2)
    with pytest.raises(CacheIntegrityError, match="release"):
        own.release_memory_blocks(torch.cat((blocks, blocks[:1])))
    assert own.total_avail == 7
    own.release_memory_blocks(blocks)
    assert own.total_avail == 9


def cached_block(own: KVBlockAllocator, slots: SlotPool) -> BlockId:
    """Return a block that only a cached state holds."""
    (block,) = own.pool.allocate(1)
    own.pool.register(block, BlockKey(5), None)
    slots.publish(slots.reserve()[0], block, num_tokens=1)
    own.pool.release([block])
    return block


def with_states() -> tuple[KVBlockAllocator, SlotPool]:
    pools = CachePools.over(SplitSpace(TOTAL - 1, 4), LeastRecentlyUsed(), block_size=1)
    return KVBlockAllocator(SimpleNamespace(running_requests=[]), TOTAL, 2, pools.kv), pools.slots


def test_cached_blocks_are_available_and_evicted_when_needed() -> None:
    own, slots = with_states()
    block = cached_block(own, slots)
    assert own.pool.count_by_kind() == {"free": 8, "cached": 1, "in_use": 0}
    take(own, 8)
    assert slots.cached_blocks() == [block]
    assert take(own, 1).tolist() == [block] and slots.cached_blocks() == []


def test_reset_releases_allocated_blocks_and_keeps_the_cache() -> None:
    own, slots = with_states()
    requests, cached = own.pool.allocate(2), cached_block(own, slots)
    own.release_memory_blocks(take(own, 3)[:1])
    own.reset()
    assert own.pool.count_by_kind() == {"free": 6, "cached": 1, "in_use": 2}
    own.reset()
    own.pool.release(requests)
    assert own.pool.find(BlockKey(5)) == cached


def test_block_shared_by_requests_is_counted_once() -> None:
    requests = (request(0, 1, 2), request(0, 1, 3), request(4, 5, paused=True), request(4, 6, paused=True))
    own = allocator(requests=requests)
    assert (own.get_active_used(), own.get_paused_used()) == (4, 3)
    assert (own.get_active_avail(), own.get_paused_avail()) == (3, -1)


def test_allocator_description_counts_used_blocks() -> None:
    own = allocator(requests=(request(0, 1), request(2, paused=True)))
    take(own, 3)
    assert str(own) == "using: total 3/9; active 2/7; paused 1/2"


@pytest.mark.parametrize(("total", "paused"), [(1, 0), (2, 1), (0, 0), (5, 4)])
def test_pool_without_usable_blocks_is_refused(total: int, paused: int) -> None:
    with pytest.raises(ValueError, match="--inference-dynamic-batching-buffer-size-gb"):
        allocator(total, paused)
