"""Megatron's block allocator over a ref-counted, hashed pool."""

from collections import Counter
from typing import Any

import torch
from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator
from torch import Tensor
from typing_extensions import override

from ..policy.identifiers import BlockId
from ..policy.kv_block_pool import KVBlockPool


class KVBlockAllocator(BlockAllocator):
    """The KV blocks of a context: `pool` decides, this class has Megatron's interface.

    The context itself allocates through `pool`. Blocks taken through the tensor methods belong to the caller, which
    releases each as often as it was handed out.

    Args:
        total_count: Blocks in the buffer, including the dummy, which takes writes that are never read.
        paused_count: Blocks that paused requests may keep.
        pool: Has `total_count` - 1 blocks.
    """

    def __init__(self, context: Any, total_count: int, paused_count: int, pool: KVBlockPool) -> None:
        # Megatron's constructor would fill a device tensor with free block ids; the pool keeps them on the host.
        self.context = context
        self.total_count = total_count
        self.paused_count = paused_count
        self.active_count = total_count - paused_count - 1
        self.dummy_block_idx = total_count - 1
        if self.active_count < 1:
            raise ValueError(
                f"{total_count} KV blocks, one of them a dummy and {paused_count} for paused requests, leave none to "
                "run on; raise --cache-gb, or --inference-dynamic-batching-buffer-size-gb if that is set"
            )
        self.pool = pool
        self._lent: Counter[BlockId] = Counter()

    @property
    def total_avail(self) -> int:
        """Blocks that an allocation could get: free ones and cached ones without references."""
        return self.pool.num_available

    @override
    def get_active_used(self) -> int:
        """Return the distinct blocks of running requests."""
        if not any(request.is_paused for request in self.context.running_requests):
            return self.pool.num_referenced - sum(count > 0 for count in self._lent.values())
        return self._num_distinct_blocks(are_paused=False)

    @override
    def get_paused_used(self) -> int:
        """Return the distinct blocks of paused requests."""
        return self._num_distinct_blocks(are_paused=True)

    def _num_distinct_blocks(self, *, are_paused: bool) -> int:
        requests = [request for request in self.context.running_requests if request.is_paused == are_paused]
        return len({block for request in requests for block in request.block_ids})

    def utilization(self) -> dict[str, float]:
        """Return the counts and shares of blocks in use, under the names Megatron logs them by."""
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
        """Return [num_blocks] int32 block ids on the device, evicting if needed; None if there are too few."""
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
        """Take back what the tensor methods handed out; what the context's requests hold and what is cached stays."""
        self.pool.release([block for block, count in self._lent.items() for _ in range(count)])
        self._lent.clear()
