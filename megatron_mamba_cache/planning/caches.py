"""Create caches with the engine's default settings that only keep records: they allocate no device memory."""

from dataclasses import dataclass

from ..config import CacheConfig
from ..metrics import CacheCounters
from ..policy.admission import AdmissionRules
from ..policy.boundaries import BoundaryRule
from ..policy.draft_states import WindowStates
from ..policy.eviction_rules import EVICTION_RULES
from ..policy.index_pools import CacheSpace
from ..policy.pools import CachePools
from ..policy.prefix_cache import CacheIdentity, PrefixCache
from ..policy.slabs import SlabSpace
from ..policy.tiers.cache_tiers import HostTier, Tiers
from ..policy.tiers.copies import Copies, CopyTimes
from ..recurrences.slab_shape import SlabShape, UnitBytes

_DEFAULTS = CacheConfig()


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Sizes of a model's KV and states, summed over all ranks.

    Args:
        kv_bytes_per_token: Number of bytes per token of the keys and values of all attention layers.
        state_bytes: Number of bytes of the states of all recurrent layers at one token position.
        block_size: Number of tokens per KV block.
    """

    kv_bytes_per_token: int
    state_bytes: int
    block_size: int = _DEFAULTS.block_size_tokens

    @property
    def unit(self) -> UnitBytes:
        """Sizes in bytes of a state and of a KV block."""
        return UnitBytes(self.state_bytes, self.kv_bytes_per_token * self.block_size, token_row=1)

    @property
    def state_len(self) -> float:
        """Number of tokens whose KV is as large as one state."""
        return self.state_bytes / self.kv_bytes_per_token

    def space(self, cache_gb: float) -> SlabSpace:
        """Return empty records for as many slabs as fit in `cache_gb` GiB."""
        slab = SlabShape.fitting([self.unit])
        return SlabSpace(slab.slabs_in(int(cache_gb * 2**30), self.unit), slab.blocks_per_slab, slab.slots_per_slab)


@dataclass(frozen=True, slots=True)
class TieredCache:
    """Prefix cache together with its host tier."""

    cache: PrefixCache
    tier: HostTier


def empty_cache(
    space: CacheSpace, sizes: CacheSizes, eviction: str = _DEFAULTS.eviction, max_requests: int = 1
) -> PrefixCache:
    """Return an empty prefix cache without lower tiers."""
    return _cache(_pools(space, sizes, eviction), sizes, CacheCounters(), max_requests)


def tiered_cache(
    device: CacheSpace, host: CacheSpace, sizes: CacheSizes, copies: Copies, times: CopyTimes, max_requests: int = 1
) -> TieredCache:
    """Return an empty prefix cache with a host tier, which starts its copies through `copies`."""
    pools, counters = _pools(device, sizes), CacheCounters()
    below = _pools(host, sizes)
    tier = HostTier(pools, below, copies, list, counters, block_size=sizes.block_size, measure=lambda: times)
    return TieredCache(_cache(pools, sizes, counters, max_requests, tier), tier)


def _pools(space: CacheSpace, sizes: CacheSizes, eviction: str = _DEFAULTS.eviction) -> CachePools:
    return CachePools.over(space, EVICTION_RULES[eviction](sizes.state_len), block_size=sizes.block_size)


def _cache(
    pools: CachePools, sizes: CacheSizes, counters: CacheCounters, max_requests: int, tiers: Tiers | None = None
) -> PrefixCache:
    return PrefixCache(
        pools,
        AdmissionRules(BoundaryRule(sizes.block_size), align_prefill_chunks=True),
        CacheIdentity("recorded load", "0"),
        counters,
        draft_states=WindowStates(pools.slots, max_requests),
        tiers=tiers,
    )
