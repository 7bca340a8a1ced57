"""What caches of several sizes would have skipped of a recorded load."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config import CacheConfig
from ..metrics import CacheCounters
from ..policy.admission import AdmissionRules
from ..policy.boundaries import BoundaryRule
from ..policy.decode_rules import DecodeRules
from ..policy.eviction_rules import EVICTION_RULES
from ..policy.places import CacheSpace, SplitSpace
from ..policy.pools import CachePools
from ..policy.prefix_cache import CacheIdentity, PrefixCache
from ..policy.slabs import SlabSpace
from ..state.slab_shape import SlabShape, UnitBytes
from .block_texts import BlockText, block_texts
from .recorded_load import RecordedLoad
from .replay import ReplayedLoad, replay

_DEFAULTS = CacheConfig()


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a model stores, all ranks together.

    Args:
        kv_bytes_per_token: Keys and values of all attention layers.
        state_bytes: The state of all recurrent layers at one position.
        block_size: Tokens of a KV block.
    """

    kv_bytes_per_token: int
    state_bytes: int
    block_size: int = _DEFAULTS.block_size_tokens

    @property
    def unit(self) -> UnitBytes:
        """Bytes of a state and of a block."""
        return UnitBytes(self.state_bytes, self.kv_bytes_per_token * self.block_size, token_row=1)

    @property
    def state_len(self) -> float:
        """Tokens whose KV takes as many bytes as a state."""
        return self.state_bytes / self.kv_bytes_per_token

    def space(self, cache_gb: float) -> SlabSpace:
        """Return the space that a budget buys."""
        slab = SlabShape.fitting([self.unit])
        return SlabSpace(slab.slabs_in(int(cache_gb * 2**30), self.unit), slab.blocks_per_slab, slab.slots_per_slab)


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """What a cache of one size would have skipped.

    Args:
        cache_gb: Its budget, GiB.
    """

    cache_gb: float
    replayed: ReplayedLoad


@dataclass(frozen=True, slots=True)
class Plan:
    """A recorded load, replayed through an unlimited cache and caches of several sizes."""

    unlimited: ReplayedLoad
    caches: tuple[PlannedCache, ...]


def plan(load: RecordedLoad, sizes: CacheSizes, budgets_gb: Sequence[float]) -> Plan:
    """Replay a load in each size.

    Raises:
        ValueError: If the blocks do not fit the load's hashes.
    """
    texts = block_texts(load, sizes.block_size)
    unlimited = replay(texts, empty_cache(_unlimited_space(texts, sizes.block_size), sizes), _DEFAULTS.max_tokens)
    return Plan(unlimited, tuple(_planned(texts, sizes, budgets_gb)))


def empty_cache(
    space: CacheSpace, sizes: CacheSizes, eviction: str = _DEFAULTS.eviction, max_requests: int = 1
) -> PrefixCache:
    """Return the cache of an engine with default settings over a space."""
    pools = CachePools.over(space, EVICTION_RULES[eviction](sizes.state_len), block_size=sizes.block_size)
    return PrefixCache(
        pools,
        AdmissionRules(BoundaryRule(sizes.block_size), align_prefill_chunks=True, chunked_prefill=True),
        CacheIdentity("recorded load", "0"),
        CacheCounters(),
        decode=DecodeRules("rolling", max_requests),
    )


def _planned(texts: Sequence[BlockText], sizes: CacheSizes, budgets_gb: Sequence[float]) -> Iterator[PlannedCache]:
    for budget in budgets_gb:
        yield PlannedCache(budget, replay(texts, empty_cache(sizes.space(budget), sizes), _DEFAULTS.max_tokens))


def _unlimited_space(texts: Sequence[BlockText], block_size: int) -> SplitSpace:
    """Return a space in which nothing is ever evicted."""
    num_blocks = len({key for text in texts for key in text.keys}) + max(text.length for text in texts) // block_size
    return SplitSpace(num_blocks + 2, num_blocks + 2)
