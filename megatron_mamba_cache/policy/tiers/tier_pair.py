"""The two tiers in memory, and what everything that moves between tiers is ordered and counted by."""

from dataclasses import dataclass

from ...metrics import CacheCounters
from ..pools import CachePools
from .copies import CopyLedger


@dataclass(frozen=True, slots=True)
class TierPair:
    """The device, and the host's memory below it.

    Args:
        block_size: Tokens of a KV block.
    """

    device: CachePools
    host: CachePools
    ledger: CopyLedger
    counters: CacheCounters
    block_size: int
