"""Caches with the block and state sizes of real models: slabs in one budget, or a fixed split of memory."""

from dataclasses import dataclass

from megatron_mamba_cache.planning.caches import CacheSizes, empty_cache
from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES
from megatron_mamba_cache.policy.index_pools import CacheSpace
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.slabs import SlabSpace

from .split_space import SplitSpace

BLOCK_SIZE = 256
"""Tokens a KV block."""
RULES = tuple(EVICTION_RULES)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of the KV of one token and of one state, summed over all layers."""

    token_bytes: int
    state_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block."""
        return self.token_bytes * BLOCK_SIZE

    @property
    def blocks_per_slab(self) -> int:
        """Number of KV blocks in a slab; a slab has the size of one state."""
        return self.state_bytes // self.block_bytes

    @property
    def padding(self) -> float:
        """Fraction of a slab that is left unused if it holds KV blocks; a state fills the slab."""
        return 1 - self.blocks_per_slab * self.block_bytes / self.state_bytes

    def slabs(self, budget: int) -> SlabSpace:
        """Return the slabs that fit in a budget of bytes; each slab has the size of one state."""
        return SlabSpace(budget // self.state_bytes, self.blocks_per_slab, 1)

    def split(self, budget: int, kv_share: float) -> SplitSpace:
        """Split a budget of bytes into a share for KV blocks and the rest for states."""
        kv_bytes = int(budget * kv_share)
        return SplitSpace(kv_bytes // self.block_bytes, (budget - kv_bytes) // self.state_bytes)

    def make_cache(self, space: CacheSpace, rule: str, max_requests: int) -> PrefixCache:
        """Return an empty cache with the engine's default settings."""
        return empty_cache(space, CacheSizes(self.token_bytes, self.state_bytes, BLOCK_SIZE), rule, max_requests)

    def free_bytes(self, space: SlabSpace) -> int:
        """Return the bytes of unused slabs, plus those of free blocks in partly used slabs."""
        num_unused = space.count_slabs()["unused"]
        num_blocks = space.blocks.num_free - num_unused * space.blocks.per_slab
        num_slots = space.slots.num_free - num_unused * space.slots.per_slab
        return (num_unused + num_slots) * self.state_bytes + num_blocks * self.block_bytes


MODELS = {
    "nano": ModelSizes(6 * 1024, 49 * 10**6),
    "8b": ModelSizes(16 * 1024, 103 * 10**6),
    "super": ModelSizes(8 * 1024, 168 * 10**6),
}
"""Nemotron 3 Nano, an 8B hybrid and Nemotron 3 Super, in bf16."""
