"""Memory in which blocks and slots are separate, so that tests can count both."""

from collections.abc import Iterator, Sequence

from megatron_mamba_cache.policy.index_pools import FixedIndexPool


class SplitSpace:
    """`CacheSpace` with separate memory for blocks and slots, used instead of `SlabSpace`."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        """Start with every index free.

        Raises:
            ValueError: If a number is negative.
        """
        if num_blocks < 0 or num_slots < 0:
            raise ValueError(
                f"num_blocks must be at least 0 and num_slots at least 0, found {num_blocks} and {num_slots}"
            )
        self.blocks = FixedIndexPool(num_blocks)
        self.slots = FixedIndexPool(num_slots)

    def fits(
        self, num_blocks: int, num_slots: int, kept_blocks: Sequence[int] = (), kept_slots: Sequence[int] = ()
    ) -> bool:
        """Return True if blocks and slots can be allocated together."""
        has_blocks = self.blocks.num_available - len(kept_blocks) >= num_blocks
        return has_blocks and self.slots.num_available - len(kept_slots) >= num_slots

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless the counts agree."""
        self.blocks.check_integrity()
        self.slots.check_integrity()

    def count_slabs(self) -> dict[str, int]:
        """Return 0: no slab is lost to another use."""
        return {"kv_blocks": 0, "states": 0, "unused": 0}

    def take_stale_blocks(self) -> Iterator[range]:
        """Yield nothing: no block has held a state."""
        yield from ()
