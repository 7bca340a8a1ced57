"""Lower tiers of a context: host memory and disk. They are kept when a suspend frees the device memory."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ..config import CacheConfig
from ..errors import CacheError
from ..metrics import CacheCounters
from ..policy.eviction_rules import EVICTION_RULES
from ..policy.pools import CachePools
from ..policy.tiers.cache_tiers import HostTier, Tiers
from ..ranks.agreement import CacheCapacity
from ..ranks.group import Ranks, on_all_ranks
from ..recurrences.model_shape import HybridModelShape
from ..tiers.copy_lanes import CopyLanes
from ..tiers.host_memory import HostMemory
from .disk_below import DiskBelow


class MemoryBelow:
    """Owns the host memory and the disk directory, if configured, and the epoch, which every flush increases.

    Args:
        capacity: Numbers of KV blocks, state slots and host slabs, equal on all ranks.
        weights: Function that returns a digest of this rank's weights; needed for a disk tier.

    Raises:
        CacheError: If any rank cannot use the disk tier's directory.
        ValueError: If the disk tier's size limit is too low.
    """

    def __init__(
        self,
        config: CacheConfig,
        shape: HybridModelShape,
        capacity: CacheCapacity,
        ranks: Ranks,
        weights: Callable[[], bytes] | None = None,
    ) -> None:
        self.epoch = 0
        self._config = config
        self._unit = shape.unit_bytes(config)
        self._capacity = capacity
        self._ranks = ranks
        self._host: HostMemory | None = None
        self._disk: DiskBelow | None = None
        if any(ranks.gather(config.disk_cache_dir is not None)):
            self._disk = _disk_below(config, shape, ranks, weights)
            self.epoch = self._disk.open()

    def flush(self, *, is_attached: bool) -> CacheError | None:
        """Make all cached entries unreachable, also on disk; return the disk tier's error, or None if there is none.

        Args:
            is_attached: True if device memory is attached, so that its own flush clears the host memory.
        """
        self.epoch += 1
        if self._host is not None and not is_attached:
            self._host.flush()
        disk = self._disk
        if disk is None:
            return None
        try:
            self.epoch = disk.open(self.epoch, is_flush=True)
        except CacheError as error:
            disk.disable()
            self._disk = None
            return error
        return None

    def attach(
        self, pools: CachePools, memory: Tensor, counters: CacheCounters, prepare: Callable[[], None]
    ) -> "AttachedTiers":
        """Attach the tiers to new device memory; return them.

        Args:
            pools: Pools of the new device memory.
            memory: [bytes] uint8: the device memory, divided into slabs.
            prepare: Function that clears stale device memory; called before copies start.

        Raises:
            CacheCapacityError: If any rank has too little host memory.
        """
        if not self._capacity.num_host_slabs:
            return AttachedTiers()
        if self._host is None:
            self._host = on_all_ranks(self._ranks, lambda: self._allocated(memory.device))
        host, disk = self._host, self._disk
        copies = host.copies(memory, None if disk is None else lambda: disk.directory)
        tier = HostTier(
            pools,
            host.pools,
            copies,
            self._ranks.least,
            counters,
            block_size=self._config.block_size_tokens,
            measure=lambda: host.times.times(host.block_bytes, host.slot_bytes),
            prepare=prepare,
            disk=None if disk is None else disk.index,
        )
        return AttachedTiers(tier, copies, host, disk)

    def _allocated(self, device: torch.device) -> HostMemory:
        config, capacity = self._config, self._capacity
        assert capacity.slab is not None
        rule = EVICTION_RULES[config.eviction](capacity.state_len)
        block_size = config.block_size_tokens
        return HostMemory(
            capacity.num_host_slabs, capacity.slab, self._unit, rule, block_size=block_size, device=device
        )


def _disk_below(
    config: CacheConfig, shape: HybridModelShape, ranks: Ranks, weights: Callable[[], bytes] | None
) -> DiskBelow:
    def check() -> None:
        if config.disk_cache_dir is None:
            raise ValueError("disk_cache_dir must be set on all ranks of the model, but it is not set on this one")
        if weights is None:
            raise ValueError(
                "disk_cache_dir needs a digest of the weights, which this context lacks; use build_engine()"
            )

    on_all_ranks(ranks, check)
    assert weights is not None
    return DiskBelow(config, shape, ranks, weights)


class AttachedTiers:
    """Lower tiers attached to one device memory; with the default arguments, there are none."""

    def __init__(
        self,
        tier: HostTier | None = None,
        copies: CopyLanes | None = None,
        host: HostMemory | None = None,
        disk: DiskBelow | None = None,
    ) -> None:
        self._tier = tier
        self._copies = copies
        if copies is not None:
            weakref.finalize(self, copies.close)  # the copy threads would keep the memory alive
        self._host = host
        self._disk = disk

    @property
    def tiers(self) -> Tiers:
        """Interface to the tiers for the prefix cache; a null object without tiers."""
        return self._tier or Tiers()

    def usage(self) -> dict[str, dict[str, int]]:
        """Return bytes by use and running copies, keyed by `CacheSnapshot` field; empty without tiers."""
        if self._tier is None or self._host is None:
            return {}
        num_copies = {"device": len(self._tier.slots_reserved()), "host": self._host.pools.slots.num_reserved}
        disk_bytes = {}
        if self._disk is not None:
            num_copies["disk"] = self._tier.num_disk_writes
            disk_bytes = {"entries": self._disk.index.num_bytes, "free": self._disk.index.num_free_bytes}
        return {"host_bytes": _host_bytes(self._host), "disk_bytes": disk_bytes, "tier_copies": num_copies}

    @property
    def has_copies(self) -> bool:
        """True if copies between tiers are running."""
        return self._tier is not None and self._tier.has_copies

    def start(self) -> None:
        """Start the copies that were queued since the last call."""
        if self._tier is not None:
            self._tier.start()

    def land(self, *, wait: bool) -> int:
        """Complete the copies that have ended on all ranks; return their number. See `HostTier.land`."""
        if self._disk is not None:
            self._disk.note_shared()
        return 0 if self._tier is None else self._tier.land(wait=wait)

    def drain(self) -> None:
        """Wait for all copies. Collective: all ranks of the model call it."""
        if self._tier is not None:
            self._tier.drain()

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step that had only prompt tokens, to estimate how long a prefill takes."""
        if self._host is not None:
            self._host.times.note_prefill(num_tokens, seconds)

    def close(self) -> None:
        """Wait for all copies, and stop the copy threads."""
        if self._tier is not None and self._copies is not None:
            self._tier.close()
            self._copies.close()


def _host_bytes(host: HostMemory) -> dict[str, int]:
    """Return the bytes of this rank's host memory by use."""
    blocks, slots = host.pools.kv.count_by_kind(), host.pools.slots.count_by_owner()
    found = {
        "kv_in_use": blocks["in_use"] * host.block_bytes,
        "kv_cached": blocks["cached"] * host.block_bytes,
        "states_reserved": slots["reserved"] * host.slot_bytes,
        "states_cached": slots["cached"] * host.slot_bytes,
    }
    return found | {"free": host.bytes.numel() - sum(found.values())}
