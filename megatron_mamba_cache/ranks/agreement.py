"""Agree on settings, memory capacities and the weights' version across the ranks of a model."""

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
"""Settings that may differ between ranks: memory sizes and the directory of the disk tier."""
_LEAST_OF_ALL = ("max_requests",)
_OF_SHAPES = ("max_tokens", "num_cuda_graphs", "cuda_graph_prefill_tokens", "num_speculative_tokens")
"""Settings that, together with `max_requests`, determine the step shapes for warmup and CUDA graphs."""
_LEAST_HOST_SLABS = 2
"""Minimum number of slabs in the host tier: one for KV blocks and one for states."""
_ANY_NUMBER = 2**62
"""Number of host slabs on a rank whose slabs take no memory; so large that another rank has the minimum."""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """Numbers of state slots, KV blocks and slabs in the memory pools, equal on all ranks of a model.

    Args:
        num_slots: Number of slots in the state pool, without the slots of live states if these have separate memory.
            Slot ids are less than this number.
        num_blocks: Number of KV blocks, including the dummy block. Block ids are less than this number.
        num_paused_blocks: Number of KV blocks that paused requests may keep.
        state_len: Number of tokens whose KV has the same size as a cached state, over all ranks.
        slab: Numbers of KV blocks and of state slots in one slab.
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
        """Number of slabs in the device memory that KV blocks and states share."""
        return self.num_slots // self.slab.slots_per_slab

    def space(self) -> SlabSpace:
        """Return new records for these slabs, with all blocks and slots unused."""
        return SlabSpace(self.num_slabs, self.slab.blocks_per_slab, self.slab.slots_per_slab)

    @staticmethod
    def of(config: CacheConfig, shape: HybridModelShape, ranks: Ranks) -> "CacheCapacity":
        """Return the largest capacity that fits on every rank; all ranks must call this method.

        Raises:
            ValueError: If a memory budget in the settings is too small on a rank.
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
    """Return the settings with model-dependent defaults filled in; all ranks must call this function.

    Raises:
        ValueError: Like `agreed_settings`, or if routes are recorded with several pipeline stages.
    """
    agreed = agreed_settings(shape.resolved(config, ranks.gather), ranks)
    if agreed.record_routes and ranks.num_stages > 1:
        raise ValueError(
            f"record_routes is not supported with {ranks.num_stages} pipeline stages, which have different MoE layers; "
            "use 1 stage, or leave --record-routes out"
        )
    return agreed


def agreed_settings(config: CacheConfig, ranks: Ranks) -> CacheConfig:
    """Check that all ranks have equal settings; return the settings with the smallest `max_requests` of any rank.

    Memory sizes may differ between ranks and are not changed.

    Raises:
        ValueError: If any other setting differs between ranks; the message names the setting.
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
    """Return the settings with the smallest `max_requests` of any expert-parallel rank, so that step shapes are equal.

    Raises:
        ValueError: On all ranks, if another setting that determines step shapes differs between them.
    """
    if peers.num_ranks == 1:
        return config
    mine = [int(getattr(config, name)) for name in _OF_SHAPES]
    found = peers.greatest([*mine, *(-value for value in mine), -config.max_requests])
    most, least, max_requests = found[: len(mine)], [-value for value in found[len(mine) : -1]], -found[-1]
    for name, low, high in zip(_OF_SHAPES, least, most, strict=True):
        if low != high:
            raise ValueError(
                f"{name} ranges from {low} to {high} over the expert-parallel ranks; use the same value on all ranks"
            )
    return replace(config, max_requests=max_requests)


def agreed_version(weights_version: str | None, present: str, ranks: Ranks) -> str:
    """Check that all ranks have the same version of the weights, and return it; all ranks must call this function.

    Args:
        weights_version: New version on this rank; None to keep the present version.
        present: Version that this rank has now.

    Raises:
        ValueError: On all ranks, if the versions differ, or if one cannot be encoded as UTF-8.
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
        raise ValueError(f"weights_version is {version!r}; it must be a str that can be encoded as UTF-8")
    return version


def _warn_of_loss(share: float) -> None:
    if share > _LARGE_LOSS:
        _LOG.warning(
            "up to %.0f %% of a rank's cache memory stays empty, because its ratio of attention to recurrent layers "
            "differs from that of other ranks; balance the pipeline stages",
            100 * share,
        )


def _num_slabs(config: CacheConfig, shape: HybridModelShape, slab: SlabShape, least_bytes: int) -> int:
    """Return the number of slabs that fit in a rank's memory budget.

    Args:
        least_bytes: Minimum budget that suffices on every rank, for the error message.

    Raises:
        CacheBudgetError: If the budget cannot hold a request of maximum length.
    """
    unit = shape.unit_bytes(config)
    for_slabs = config.budget_bytes - shape.buffers_bytes(config) - shape.running_bytes(config)
    if for_slabs < shape.longest_bytes(config, slab):
        num_live = config.max_requests if config.quantizes_states else 0
        found_gb, length = config.cache_gb or 0.0, config.max_sequence_length
        raise CacheBudgetError(found_gb, least_bytes / 2**30, length, num_live=num_live)
    return slab.slabs_in(for_slabs, unit)


def _least_bytes(config: CacheConfig, shape: HybridModelShape, slab: SlabShape) -> int:
    """Return the smallest budget in bytes with which this rank can run one request of maximum length."""
    longest = shape.longest_bytes(config, slab)
    if not shape.limits_requests(config):
        return longest + shape.buffers_bytes(config) + shape.running_bytes(config)
    return longest + shape.request_buffer_bytes(config)  # max_requests can be lowered to 1


def _num_host_slabs(config: CacheConfig, shape: HybridModelShape, slab: SlabShape) -> int:
    """Return the number of slabs in a rank's share of the host tier's memory; 0 without a host tier."""
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
        shared = f" for {num_processes} processes on this host" if num_processes > 1 else ""
        raise ValueError(
            f"host_cache_gb is {config.host_cache_gb:g} GiB{shared}, which is too small for a "
            f"state and the KV before it: set --host-cache-gb to {least_gb:f} or more, or leave it out"
        )
    return num_slabs


def known_to_any(found: Mapping[int, str], ranks: Ranks) -> dict[int, str]:
    """Merge the maps from request ids to text on all ranks; all ranks must call this function.

    If several ranks have text for a request, that of the lowest rank is returned, on every rank.
    """
    if ranks.all_hold(not found):
        return {}
    known: dict[int, str] = {}
    for others in ranks.gather(dict(found)):
        known = others | known
    return known
