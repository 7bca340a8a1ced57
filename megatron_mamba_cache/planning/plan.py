"""What caches of several sizes would have skipped of a recorded load."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..config import CacheConfig
from ..policy.places import SplitSpace
from ..policy.tiers.copies import CopyOrder, CopyStatus
from ..policy.tiers.times import CopyTimes
from .block_texts import BlockText, block_texts
from .caches import CacheSizes, empty_cache, tiered_cache
from .recorded_load import RecordedLoad
from .replay import ReplayedLoad, replay

_MAX_TOKENS = CacheConfig().max_tokens


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """What a cache of one size would have skipped.

    Args:
        cache_gb: Its budget, GiB.
        host_cache_gb: That of the host's memory below it, GiB; 0: there is none.
    """

    cache_gb: float
    host_cache_gb: float
    replayed: ReplayedLoad


@dataclass(frozen=True, slots=True)
class Plan:
    """A recorded load, replayed through an unlimited cache and caches of several sizes."""

    unlimited: ReplayedLoad
    caches: tuple[PlannedCache, ...]


def plan(
    load: RecordedLoad, sizes: CacheSizes, budgets_gb: Sequence[float], host_budgets_gb: Sequence[float] = (0.0,)
) -> Plan:
    """Replay a load in each size of the device's memory, with each of the host's below it.

    Raises:
        ValueError: If the blocks do not fit the load's hashes.
    """
    texts = block_texts(load, sizes.block_size)
    unlimited = replay(texts, empty_cache(unlimited_space(texts, sizes.block_size), sizes), _MAX_TOKENS)
    planned = [
        PlannedCache(budget, host_budget, _replayed(texts, sizes, budget, host_budget))
        for budget, host_budget in product(budgets_gb, host_budgets_gb)
    ]
    return Plan(unlimited, tuple(planned))


def unlimited_space(texts: Sequence[BlockText], block_size: int, max_requests: int = 1) -> SplitSpace:
    """Return a space in which nothing is ever evicted.

    Args:
        max_requests: The most requests that run at once.
    """
    longest = max(text.length for text in texts) // block_size + 2
    num_blocks = len({key for text in texts for key in text.keys}) + max_requests * longest
    return SplitSpace(num_blocks, num_blocks)


def _replayed(texts: Sequence[BlockText], sizes: CacheSizes, budget: float, host_budget: float) -> ReplayedLoad:
    if not host_budget:
        return replay(texts, empty_cache(sizes.space(budget), sizes), _MAX_TOKENS)
    # What is on the host always comes back: the load says nothing of what copying and computing would take.
    free_copies = CopyTimes(block=0, state=0, token=1)
    tiered = tiered_cache(sizes.space(budget), sizes.space(host_budget), sizes, CopiesAtOnce(), free_copies)
    return replay(texts, tiered.cache, _MAX_TOKENS, tiered.tier.drain)


class CopiesAtOnce:
    """`Copies` that take no time, as a load replayed one request at a time needs."""

    def start(self, orders: Sequence[CopyOrder]) -> None:
        """Do nothing."""

    def status(self, number: int) -> CopyStatus:
        return CopyStatus.DONE

    def wait(self, numbers: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, number: int) -> None:
        """Do nothing."""
