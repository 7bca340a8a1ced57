"""The device memory of KV blocks and states: a tensor for each, or views of one memory cut into slabs.

A KV buffer is [2, layers, blocks, block size, kv heads, head dim]: keys, then values. The tensors of states are those
of a layout's parts, each [layers, slots, ...]. In slabs, all layers of a block lie together, and all layers of a state:
one piece each.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import SlotLayout
from .slab_shape import SlabShape, UnitBytes


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
    lead = (states.num_layers, num_slots)
    return tuple(torch.zeros(lead + part.shape, dtype=part.dtype, device=device) for part in states.parts)


def separate_tensors(
    states: SlotLayout, blocks: BlockLayout, num_slots: int, num_blocks: int, device: torch.device | int | str
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the tensors of states and a KV buffer, each with memory of its own, all zero."""
    shape = (2, blocks.num_layers, num_blocks, *blocks.block_shape)
    return state_tensors(states, num_slots, device), torch.zeros(shape, dtype=blocks.dtype, device=device)


def slab_tensors(
    states: SlotLayout,
    blocks: BlockLayout,
    slab: SlabShape,
    unit: UnitBytes,
    num_slabs: int,
    device: torch.device | int | str,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the tensors of states and a KV buffer over the same memory, all zero.

    Slot s and block b lie where `SlabSpace` says; after the last slab comes one block more.

    Args:
        unit: What this rank stores of a state and of a block.
    """
    slab_bytes = slab.slab_bytes(unit)
    memory = torch.zeros(num_slabs * slab_bytes + unit.block, dtype=torch.uint8, device=device)
    slot_bytes, block_bytes = slab_bytes // slab.slots_per_slab, slab_bytes // slab.blocks_per_slab
    lead, first_byte, views = (states.num_layers, num_slabs * slab.slots_per_slab), 0, []
    for part in states.parts:
        views.append(_view(memory, part.dtype, lead + part.shape, (part.aligned_bytes, slot_bytes), first_byte))
        first_byte += states.num_layers * part.aligned_bytes
    half = blocks.num_elements * blocks.dtype.itemsize
    num_blocks = num_slabs * slab.blocks_per_slab + 1
    shape = (2, blocks.num_layers, num_blocks, *blocks.block_shape)
    return tuple(views), _view(memory, blocks.dtype, shape, (half, 2 * half, block_bytes), 0)


def bytes_of(*views: Tensor) -> Tensor:
    """Return the memory that `slab_tensors` has cut, [bytes] uint8."""
    view = max(views, key=lambda tensor: tensor.untyped_storage().nbytes())
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def _view(
    memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...], lead_bytes: tuple[int, ...], first_byte: int
) -> Tensor:
    """Return a view whose leading dimensions have strides of `lead_bytes`, and whose others are contiguous."""
    inner = torch.empty(shape[len(lead_bytes) :], device="meta").stride()
    strides = (*(num_bytes // dtype.itemsize for num_bytes in lead_bytes), *inner)
    if math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype, device=memory.device)
    whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, strides, first_byte // dtype.itemsize)
