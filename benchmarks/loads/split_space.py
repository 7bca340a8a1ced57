"""KV blocks and states with memory of their own each, which one budget is compared with."""

from collections.abc import Sequence

from megatron_mamba_cache.policy.index_pools import FixedIndexPool


class SplitSpace:
    """Blocks and slots that never take room from each other."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.blocks = FixedIndexPool(num_blocks)
        self.slots = FixedIndexPool(num_slots)

    def fits(
        self, num_blocks: int, num_slots: int, kept_blocks: Sequence[int] = (), kept_slots: Sequence[int] = ()
    ) -> bool:
        """Return whether blocks and slots can be had together."""
        has_blocks = self.blocks.num_available - len(kept_blocks) >= num_blocks
        return has_blocks and self.slots.num_available - len(kept_slots) >= num_slots

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless every count agrees with the indices. O(n)."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
