"""Megatron's block allocator on top of a block pool with reference counts and block keys."""

from collections import Counter
from typing import Any

import torch
from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator
from torch import Tensor
from typing_extensions import override

from ..policy.identifiers import BlockId
from ..policy.kv_block_pool import KVBlockPool


class KVBlockAllocator(BlockAllocator):
    """Adapter that gives the block pool the interface of Megatron's allocator.

    The context itself allocates directly from `pool`. Callers of `allocate_memory_blocks` own the returned blocks, and
    must release each block as many times as it was returned.

    Args:
        total_count: Number of blocks in the buffer, including the dummy block, whose contents are never read.
        paused_count: Number of blocks that paused requests may keep.
        pool: Block pool with `total_count` - 1 blocks.
    """

    def __init__(self, context: Any, total_count: int, paused_count: int, pool: KVBlockPool) -> None:
        # Megatron's constructor would keep free block ids in a device tensor; the pool keeps them on the host.
        self.context = context
        self.total_count = total_count
        self.paused_count = paused_count
        self.active_count = total_count - paused_count - 1
        self.dummy_block_idx = total_count - 1
        if self.active_count < 1:
            raise ValueError(
                f"there are {total_count} KV blocks: one is a dummy and {paused_count} are for paused requests, so "
                "none is left for other requests; raise --cache-gb, or --inference-dynamic-batching-buffer-size-gb if "
                "that is set"
            )
        self.pool = pool
        self._lent: Counter[BlockId] = Counter()

    @property
    def total_avail(self) -> int:
        """Number of blocks that can be allocated: free blocks, and cached blocks that no request references."""
        return self.pool.num_available

    @override
    def get_active_used(self) -> int:
        """Return the number of distinct blocks held by running requests."""
        if not any(request.is_paused for request in self.context.running_requests):
            return self.pool.num_referenced - sum(count > 0 for count in self._lent.values())
        return self._num_distinct_blocks(are_paused=False)

    @override
    def get_paused_used(self) -> int:
        """Return the number of distinct blocks held by paused requests."""
        return self._num_distinct_blocks(are_paused=True)

    def _num_distinct_blocks(self, *, are_paused: bool) -> int:
        requests = [request for request in self.context.running_requests if request.is_paused == are_paused]
        return len({block for request in requests for block in request.block_ids})

    def utilization(self) -> dict[str, float]:
        """Return the numbers and fractions of used blocks, keyed by their names in Megatron's log."""
        total, active = max(self.total_count - 1, 1), self.get_active_used()
        return {
            "total_blocks": total,
            "allocated_blocks": total - self.total_avail,
            "active_unique_blocks": active,
            "allocated_utilization": (total - self.total_avail) / total,
            "active_utilization": active / total,
            "block_count_avail": self.total_avail,
        }

    @override
    def allocate_memory_blocks(self, num_blocks: int) -> Tensor | None:
        """Return [num_blocks] int32 block ids on the device, evicting if needed; None if too few are available."""
        if not self.is_memory_available(num_blocks):
            return None
        blocks = self.pool.allocate(num_blocks)
        self._lent.update(blocks)
        return torch.tensor(blocks, dtype=torch.int32, device=torch.cuda.current_device())

    @override
    def release_memory_blocks(self, blocks: Tensor) -> None:
        """Release one reference for each entry of `blocks`."""
        ids = [BlockId(block) for block in blocks.tolist()]
        self.pool.release(ids)
        self._lent.subtract(ids)

    @override
    def reset(self) -> None:
        """Release the blocks that `allocate_memory_blocks` returned; keep blocks of requests and of the cache."""
        self.pool.release([block for block, count in self._lent.items() for _ in range(count)])
        self._lent.clear()
