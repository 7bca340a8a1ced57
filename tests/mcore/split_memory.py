"""Engines whose KV blocks and states have separate memory, so that neither evicts the other.

Importing this module lets engines take a `SplitConfig`; those of a `CacheConfig` are as they were.
"""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.ranks.agreement import CacheCapacity
from megatron_mamba_cache.ranks.group import Ranks
from megatron_mamba_cache.recurrences.layout import BlockLayout, SlotLayout
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape
from megatron_mamba_cache.recurrences.slab_shape import SlabShape
from megatron_mamba_cache.step import memory
from tests.policy.split_space import SplitSpace


@dataclass(frozen=True, slots=True)
class SplitConfig(CacheConfig):
    """Settings with numbers of blocks and slots.

    Args:
        num_blocks: Usable KV blocks; None: the memory is as `CacheConfig` says.
        num_states: Cached states, and those after drafts in windows, besides a live one for each request.
        num_paused: KV blocks that paused requests may keep; None: a quarter.
        fold_every: Tokens after which a replayed state is written; None: the most that the block size allows.
    """

    num_blocks: int | None = None
    num_states: int = 0
    num_paused: int | None = None
    fold_every: int | None = None

    @property
    def fold_len(self) -> int:
        """Interval in tokens at which a replayed state is written; 0 if none is replayed."""
        most = CacheConfig.fold_len.__get__(self)
        return (self.fold_every or most) if self.replays else 0

    @property
    def num_slots(self) -> int:
        """Slots for cached states, and for draft states unless these have their own."""
        if self.quantizes_states:
            return self.num_states
        most = self.num_states if self.prefix_caching else self.max_requests * self.num_draft_slots
        return self.max_requests + min(self.num_states, most)


class SplitSlab(SlabShape):
    """The layout of a memory in which blocks and states are separate."""


@dataclass(frozen=True, slots=True)
class SplitCapacity(CacheCapacity):
    """Sizes of the pools of a `SplitConfig`."""

    num_split_slots: int = 0

    def space(self) -> Any:
        """Return the bookkeeping of that memory, entirely unused."""
        return SplitSpace(self.num_blocks - 1, self.num_split_slots)


_capacity_of, _slab_tensors = CacheCapacity.of, memory.slab_tensors


def _split_capacity_of(config: CacheConfig, shape: HybridModelShape, ranks: Ranks) -> CacheCapacity:
    """Do what `CacheCapacity.of` does, for a `SplitConfig`."""
    found = _capacity_of(config, shape, ranks)
    if not isinstance(config, SplitConfig) or config.num_blocks is None:
        return found
    paused = (config.num_blocks + 1) // 4 if config.num_paused is None else config.num_paused
    unit, unlimited = shape.unit_bytes(config), 2**31  # a stage without layers of a kind leaves it to the others
    blocks = (config.num_blocks, paused) if unit.block else (unlimited, unlimited)
    num_blocks, num_paused, num_slots = ranks.least([*blocks, config.num_slots if unit.state else unlimited])
    slab = SplitSlab(found.slab.blocks_per_slab, found.slab.slots_per_slab)
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    assert num_blocks < found.num_blocks and num_slots <= found.num_slots, "the memory is too small"
    values |= {"slab": slab, "num_blocks": num_blocks + 1, "num_paused_blocks": num_paused}
    return SplitCapacity(**values, num_split_slots=num_slots)


def _split_tensors(
    states: SlotLayout, blocks: BlockLayout, slab: SlabShape, *args: Any
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Do what `slab_tensors` does, with two memories for a `SplitConfig`."""
    parts, kv_buffer = _slab_tensors(states, blocks, slab, *args)
    return parts, _slab_tensors(states, blocks, slab, *args)[1] if isinstance(slab, SplitSlab) else kv_buffer


setattr(CacheCapacity, "of", staticmethod(_split_capacity_of))  # noqa: B010
setattr(memory, "slab_tensors", _split_tensors)  # noqa: B010
