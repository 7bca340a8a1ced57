"""The layout of slots and KV blocks: shapes, sizes, and views of the device memory.

A KV buffer is [2, layers, blocks, block size, kv heads, head dim]: keys, then values. State tensors are those of a
layout's parts, each [layers, slots, ...]. All are views of one memory cut into slabs, in which all layers of a block
are contiguous, and all layers of a slot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import StateGroup
from .slab_shape import SlabShape, UnitBytes, aligned


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One tensor of a slot.

    Args:
        num_layers: Layers of this rank that have it; 1 if all layers of a group share it.
        shape: Of one layer.
    """

    num_layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def aligned_bytes(self) -> int:
        """Stride between layers, if a slot's bytes are contiguous."""
        return aligned(self.num_bytes)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One slot over the recurrent layers of this rank.

    Args:
        parts: In the order of their bytes, if a slot's bytes are contiguous; all layers of the first come first.
    """

    parts: tuple[SlotPart, ...]

    @staticmethod
    def of(groups: Sequence[StateGroup], num_drafts: int = 0) -> "SlotLayout":
        """Return the layout of live states: a part for each tensor of each group.

        Args:
            num_drafts: Inputs of drafts that a window has room for, after those that a cached one keeps.
        """
        return SlotLayout(
            tuple(
                SlotPart(
                    group.num_layers_of(tensor),
                    (tensor.shape[0] + num_drafts * (tensor.motion == "window"), *tensor.shape[1:]),
                    tensor.dtype,
                )
                for group in groups
                for tensor in group.tensors
            )
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers and parts."""
        return sum(part.num_layers * part.num_bytes for part in self.parts)

    @property
    def aligned_bytes(self) -> int:
        """Bytes of a slot with contiguous layers."""
        return sum(part.num_layers * part.aligned_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The KV blocks of a rank.

    Args:
        num_layers: Attention layers.
        block_shape: (block size, kv heads, head dim).
    """

    num_layers: int
    block_shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Elements of one layer's keys, or values, of a block."""
        return math.prod(self.block_shape)


def state_tensors(states: SlotLayout, num_slots: int, device: torch.device | int | str) -> tuple[Tensor, ...]:
    """Return a tensor for each part of the states, with memory of its own, all zero."""
    return tuple(
        torch.zeros((part.num_layers, num_slots, *part.shape), dtype=part.dtype, device=device) for part in states.parts
    )


def slab_tensors(
    states: SlotLayout,
    blocks: BlockLayout,
    slab: SlabShape,
    unit: UnitBytes,
    num_slabs: int,
    device: torch.device | int | str,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the state tensors and a KV buffer over the same memory, all zero.

    Slot s and block b are where `SlabSpace` puts them; one more block follows the last slab.

    Args:
        unit: Bytes that this rank stores of a state and of a block.
    """
    slab_bytes = slab.slab_bytes(unit)
    memory = torch.zeros(num_slabs * slab_bytes + unit.block, dtype=torch.uint8, device=device)
    slot_bytes, block_bytes = slab_bytes // slab.slots_per_slab, slab_bytes // slab.blocks_per_slab
    num_slots, first_byte, views = num_slabs * slab.slots_per_slab, 0, []
    for part in states.parts:
        shape = (part.num_layers, num_slots, *part.shape)
        views.append(_view(memory, part.dtype, shape, (part.aligned_bytes, slot_bytes), first_byte))
        first_byte += part.num_layers * part.aligned_bytes
    half = blocks.num_elements * blocks.dtype.itemsize
    num_blocks = num_slabs * slab.blocks_per_slab + 1
    shape = (2, blocks.num_layers, num_blocks, *blocks.block_shape)
    return tuple(views), _view(memory, blocks.dtype, shape, (half, 2 * half, block_bytes), 0)


def bytes_of(*views: Tensor) -> Tensor:
    """Return the memory of `slab_tensors`, [bytes] uint8."""
    view = max(views, key=lambda tensor: tensor.untyped_storage().nbytes())
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def _view(
    memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...], lead_bytes: tuple[int, ...], first_byte: int
) -> Tensor:
    """Return a view with leading strides of `lead_bytes` and contiguous other dimensions."""
    inner = torch.empty(shape[len(lead_bytes) :], device="meta").stride()
    strides = (*(num_bytes // dtype.itemsize for num_bytes in lead_bytes), *inner)
    if math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype, device=memory.device)
    whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, strides, first_byte // dtype.itemsize)
