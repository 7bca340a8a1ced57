"""Agreement of one model's ranks: settings and capacities at start, later the weights' version."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ..config import CacheConfig, is_encodable
from ..errors import CacheBudgetError, HostBudgetError
from ..policy.slabs import SlabSpace
from ..recurrences.model_shape import HybridModelShape
from ..recurrences.slab_shape import SlabShape
from ..tiers.host_budget import available_bytes, processes_of_host
from .group import ExpertPeers, Ranks, on_all_ranks

_LOG = logging.getLogger(__name__)
_LARGE_LOSS = 0.05
_OF_EACH_RANK = ("cache_gb", "host_cache_gb", "disk_cache_dir", "disk_cache_gb")
"""Settings that may differ between ranks: the memory that each provides, and where."""
_LEAST_OF_ALL = ("max_requests",)
_OF_SHAPES = ("max_tokens", "num_cuda_graphs", "cuda_graph_prefill_tokens", "num_speculative_tokens")
"""Settings besides `max_requests` that the shapes of warmup and of CUDA graphs follow from."""
_LEAST_HOST_SLABS = 2
"""One for KV blocks and one for states."""
_ANY_NUMBER = 2**62
"""The number of slots or KV blocks on a rank where they take no memory: other ranks set the limit."""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """Sizes of the pools, the same on all ranks of a model.

    Args:
        num_slots: Slots of the state pool, or of cached states where live ones have slots of their own; numbers are
            below this.
        num_blocks: KV blocks, the dummy included; numbers are below this.
        num_paused_blocks: KV blocks that paused requests may keep.
        state_len: Tokens whose KV takes as many bytes as a cached state, over all ranks.
        slab: How the memory is cut.
        num_host_slabs: Slabs of each rank in the host's memory; 0 without a tier there.
    """

    num_slots: int
    num_blocks: int
    num_paused_blocks: int
    state_len: float
    slab: SlabShape
    num_host_slabs: int = 0

    @property
    def num_slabs(self) -> int:
        """Slabs of the memory that KV blocks and states share."""
        return self.num_slots // self.slab.slots_per_slab

    def space(self) -> SlabSpace:
        """Return the bookkeeping of that memory, all of it unused."""
        return SlabSpace(self.num_slabs, self.slab.blocks_per_slab, self.slab.slots_per_slab)

    @staticmethod
    def of(config: CacheConfig, shape: HybridModelShape, ranks: Ranks) -> "CacheCapacity":
        """Return the least capacity that the settings give on any rank; all ranks call it.

        Raises:
            ValueError: If the settings give too little on a rank.
        """
        units = ranks.gather(shape.unit_bytes(config))
        block_bytes = sum(unit.block for unit in units)
        state_len = config.block_size_tokens * sum(unit.state for unit in units) / max(block_bytes, 1)
        slab = SlabShape.fitting(units)
        _warn_of_loss(slab.loss(units))
        least_bytes = max(ranks.gather(_least_bytes(config, shape, slab)))
        (num_slabs,) = ranks.least([on_all_ranks(ranks, lambda: _num_slabs(config, shape, slab, least_bytes))])
        num_blocks = num_slabs * slab.blocks_per_slab + 1
        num_slots = num_slabs * slab.slots_per_slab
        (num_host,) = ranks.least([on_all_ranks(ranks, lambda: _num_host_slabs(config, shape, slab))])
        num_paused = min((num_blocks - 1) // 4, num_blocks - 2)
        return CacheCapacity(num_slots, num_blocks, num_paused, state_len, slab, num_host)


def resolved_settings(config: CacheConfig, shape: HybridModelShape, ranks: Ranks) -> CacheConfig:
    """Return the settings with what the parts of the model decide; all ranks call it. Raises as `agreed_settings`."""
    return agreed_settings(shape.resolved(config, ranks.gather), ranks)


def agreed_settings(config: CacheConfig, ranks: Ranks) -> CacheConfig:
    """Return the settings with the least `max_requests` of all ranks; each rank keeps its own memory sizes.

    Raises:
        ValueError: If ranks differ in any other setting; the message names it.
    """
    found = ranks.gather(config)
    for name in (field.name for field in fields(CacheConfig) if field.name not in (*_OF_EACH_RANK, *_LEAST_OF_ALL)):
        values = [getattr(settings, name) for settings in found]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} differs between the ranks of the model: {values}; give all of them the same")
    return replace(config, max_requests=min(settings.max_requests for settings in found))


def settings_of_peers(config: CacheConfig, peers: ExpertPeers) -> CacheConfig:
    """Return the settings with which ranks that share experts compute the same shapes: the least `max_requests` of all.

    Raises:
        ValueError: On all ranks, if they differ in another setting that shapes depend on.
    """
    if peers.num_ranks == 1:
        return config
    mine = [int(getattr(config, name)) for name in _OF_SHAPES]
    found = peers.greatest([*mine, *(-value for value in mine), -config.max_requests])
    most, least, max_requests = found[: len(mine)], [-value for value in found[len(mine) : -1]], -found[-1]
    for name, low, high in zip(_OF_SHAPES, least, most, strict=True):
        if low != high:
            raise ValueError(f"{name} is {low} to {high} on the ranks that share experts; give all of them the same")
    return replace(config, max_requests=max_requests)


def agreed_version(weights_version: str | None, present: str, ranks: Ranks) -> str:
    """Return the version of the weights on all ranks; all of them call it.

    Args:
        weights_version: Version given to this rank; None keeps the present one.

    Raises:
        ValueError: On all ranks, if their versions differ or one of them is not Unicode text.
    """
    version = present if weights_version is None else weights_version
    versions = ranks.gather(on_all_ranks(ranks, lambda: _checked_version(version)))
    if any(other != version for other in versions):
        raise ValueError(
            f"weights_version differs between the ranks of the model: {versions}; load the same weights on all of them "
            "and give each the same version"
        )
    return version


def _checked_version(version: object) -> object:
    if not is_encodable(version):
        raise ValueError(f"weights_version is {version!r}; it must be Unicode text")
    return version


def _warn_of_loss(share: float) -> None:
    if share > _LARGE_LOSS:
        _LOG.warning(
            "%.0f %% of the memory of a rank's slabs stays empty, for KV blocks or for states: its ratio of attention "
            "to recurrent layers differs from that of other ranks; balance the pipeline stages",
            100 * share,
        )


def _num_slabs(config: CacheConfig, shape: HybridModelShape, slab: SlabShape, least_bytes: int) -> int:
    """Return how many slabs a rank's budget buys.

    Args:
        least_bytes: The budget that is enough on all ranks.
    """
    unit = shape.unit_bytes(config)
    for_slabs = config.budget_bytes - shape.buffers_bytes(config) - shape.running_bytes(config)
    if for_slabs < shape.longest_bytes(config, slab):
        num_live = config.max_requests if config.quantizes_states else 0
        found_gb, length = config.cache_gb or 0.0, config.max_sequence_length
        raise CacheBudgetError(found_gb, least_bytes / 2**30, length, num_live=num_live)
    return slab.slabs_in(for_slabs, unit)


def _least_bytes(config: CacheConfig, shape: HybridModelShape, slab: SlabShape) -> int:
    """Return a rank's least budget, whatever `max_requests` was asked for: one request of the longest sequence runs."""
    longest = shape.longest_bytes(config, slab)
    if not shape.limits_requests(config):
        return longest + shape.buffers_bytes(config) + shape.running_bytes(config)
    return longest + shape.request_buffer_bytes(config)  # more buffers leave it its room


def _num_host_slabs(config: CacheConfig, shape: HybridModelShape, slab: SlabShape) -> int:
    """Return how many slabs a rank's part of the host's memory holds."""
    if config.host_cache_gb is None:
        return 0
    total, num_processes, free = int(config.host_cache_gb * 2**30), processes_of_host(), available_bytes()
    if total > free:
        raise HostBudgetError(config.host_cache_gb, free)
    slab_bytes = slab.slab_bytes(shape.unit_bytes(config))
    if not slab_bytes:
        return _ANY_NUMBER
    num_slabs = total // num_processes // slab_bytes
    if num_slabs < _LEAST_HOST_SLABS:
        least_gb = math.ceil(_LEAST_HOST_SLABS * slab_bytes * num_processes / 2**30 * 1e6) / 1e6
        shared = f" for {num_processes} processes of this host" if num_processes > 1 else ""
        raise ValueError(
            f"host_cache_gb is {config.host_cache_gb:g} GiB{shared}, which holds no "
            f"state with the KV before it: set --host-cache-gb to {least_gb:f} or more, or leave it out"
        )
    return num_slabs


def known_to_any(found: Mapping[int, str], ranks: Ranks) -> dict[int, str]:
    """Return what any rank of a model knows of requests, the same on all; collective."""
    if ranks.all_hold(not found):
        return {}
    known: dict[int, str] = {}
    for others in ranks.gather(dict(found)):
        known = others | known
    return known
