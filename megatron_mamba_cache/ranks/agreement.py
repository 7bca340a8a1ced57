"""Agree on settings, capacities and the weights' version across the ranks of a model."""

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
    """Sizes of the pools, which are equal on all ranks of a model.

    Args:
        num_slots: Number of slots in the state pool, or only for cached states if live states have separate slots. Slot
            ids are less than this.
        num_blocks: Number of KV blocks, including the dummy block. Block ids are less than this.
        num_paused_blocks: Number of KV blocks that paused requests may keep.
        state_len: Number of tokens whose KV has the same size as a cached state, over all ranks.
        slab: Layout of a slab of memory.
        num_host_slabs: Number of slabs per rank in host memory; 0 without a host tier.
    """

    num_slots: int
    num_blocks: int
    num_paused_blocks: int
    state_len: float
    slab: SlabShape
    num_host_slabs: int = 0

    @property
    def num_slabs(self) -> int:
        """Number of slabs in the memory that KV blocks and states share."""
        return self.num_slots // self.slab.slots_per_slab

    def space(self) -> SlabSpace:
        """Return the bookkeeping for this memory, with everything unused."""
        return SlabSpace(self.num_slabs, self.slab.blocks_per_slab, self.slab.slots_per_slab)

    @staticmethod
    def of(config: CacheConfig, shape: HybridModelShape, ranks: Ranks) -> "CacheCapacity":
        """Return the smallest capacity that the settings give on any rank; all ranks call it.

        Raises:
            ValueError: If the settings give too little memory on a rank.
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
    """Return the settings with model-dependent defaults filled in; all ranks call it. Raise like `agreed_settings`."""
    return agreed_settings(shape.resolved(config, ranks.gather), ranks)


def agreed_settings(config: CacheConfig, ranks: Ranks) -> CacheConfig:
    """Return the settings with the smallest `max_requests` of all ranks; memory sizes may differ between ranks.

    Raises:
        ValueError: If ranks differ in any other setting; the message names it.
    """
    found = ranks.gather(config)
    for name in (field.name for field in fields(CacheConfig) if field.name not in (*_OF_EACH_RANK, *_LEAST_OF_ALL)):
        values = [getattr(settings, name) for settings in found]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"{name} differs between the ranks of the model: {values}; use the same value on all ranks"
            )
    return replace(config, max_requests=min(settings.max_requests for settings in found))


def settings_of_peers(config: CacheConfig, peers: ExpertPeers) -> CacheConfig:
    """Return the settings with the smallest `max_requests` of all expert-parallel ranks, for equal step shapes.

    Raises:
        ValueError: On all ranks, if another setting that affects shapes differs between them.
    """
    if peers.num_ranks == 1:
        return config
    mine = [int(getattr(config, name)) for name in _OF_SHAPES]
    found = peers.greatest([*mine, *(-value for value in mine), -config.max_requests])
    most, least, max_requests = found[: len(mine)], [-value for value in found[len(mine) : -1]], -found[-1]
    for name, low, high in zip(_OF_SHAPES, least, most, strict=True):
        if low != high:
            raise ValueError(
                f"{name} is between {low} and {high} on the expert-parallel ranks; use the same value on all ranks"
            )
    return replace(config, max_requests=max_requests)


def agreed_version(weights_version: str | None, present: str, ranks: Ranks) -> str:
    """Return the version of the weights after checking that it is equal on all ranks; all ranks call it.

    Args:
        weights_version: Version given on this rank; None keeps the current version.

    Raises:
        ValueError: On all ranks, if the versions differ or a version is not Unicode text.
    """
    version = present if weights_version is None else weights_version
    versions = ranks.gather(on_all_ranks(ranks, lambda: _checked_version(version)))
    if any(other != version for other in versions):
        raise ValueError(
            f"weights_version differs between the ranks of the model: {versions}; load the same weights on all of them "
            "and give the same version on each"
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
    """Return the number of slabs that fit in a rank's budget.

    Args:
        least_bytes: Minimum budget that suffices on all ranks.
    """
    unit = shape.unit_bytes(config)
    for_slabs = config.budget_bytes - shape.buffers_bytes(config) - shape.running_bytes(config)
    if for_slabs < shape.longest_bytes(config, slab):
        num_live = config.max_requests if config.quantizes_states else 0
        found_gb, length = config.cache_gb or 0.0, config.max_sequence_length
        raise CacheBudgetError(found_gb, least_bytes / 2**30, length, num_live=num_live)
    return slab.slabs_in(for_slabs, unit)


def _least_bytes(config: CacheConfig, shape: HybridModelShape, slab: SlabShape) -> int:
    """Return the minimum budget for a rank, in bytes, with which one request of maximum length can run."""
    longest = shape.longest_bytes(config, slab)
    if not shape.limits_requests(config):
        return longest + shape.buffers_bytes(config) + shape.running_bytes(config)
    return longest + shape.request_buffer_bytes(config)  # request buffers do not reduce its room


def _num_host_slabs(config: CacheConfig, shape: HybridModelShape, slab: SlabShape) -> int:
    """Return the number of slabs in a rank's part of the host memory."""
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
            f"host_cache_gb is {config.host_cache_gb:g} GiB{shared}, too small for a "
            f"state and the KV before it: set --host-cache-gb to {least_gb:f} or more, or leave it out"
        )
    return num_slabs


def known_to_any(found: Mapping[int, str], ranks: Ranks) -> dict[int, str]:
    """Merge the facts about requests from all ranks; all ranks call it and get the same result."""
    if ranks.all_hold(not found):
        return {}
    known: dict[int, str] = {}
    for others in ranks.gather(dict(found)):
        known = others | known
    return known
