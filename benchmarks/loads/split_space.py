"""Separate memory for KV blocks and states, for comparison with one shared budget."""

from collections.abc import Sequence

from megatron_mamba_cache.policy.index_pools import FixedIndexPool


class SplitSpace:
    """Space in which KV blocks and state slots never compete for memory."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.blocks = FixedIndexPool(num_blocks)
        self.slots = FixedIndexPool(num_slots)

    def fits(
        self, num_blocks: int, num_slots: int, kept_blocks: Sequence[int] = (), kept_slots: Sequence[int] = ()
    ) -> bool:
        """Return True if this many blocks and slots can be allocated together."""
        has_blocks = self.blocks.num_available - len(kept_blocks) >= num_blocks
        return has_blocks and self.slots.num_available - len(kept_slots) >= num_slots

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless every count agrees with the indices. Takes O(n)."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
