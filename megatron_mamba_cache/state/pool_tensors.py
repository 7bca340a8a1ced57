"""The device memory of KV blocks and states: a tensor for each, or views of one memory cut into slabs.

A KV buffer is [2, layers, blocks, block size, kv heads, head dim]: keys, then values. In slabs, all layers of a block
lie together, and all layers of a state: one piece each.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import StateLayout
from .slab_shape import SlabShape, UnitBytes
from .state_pool import StatePool


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


def separate_tensors(
    states: StateLayout, blocks: BlockLayout, num_slots: int, num_blocks: int, device: torch.device | int | str
) -> tuple[StatePool, Tensor]:
    """Return a state pool and a KV buffer, each with memory of its own, all zero."""
    shape = (2, blocks.num_layers, num_blocks, *blocks.block_shape)
    return StatePool.zeros(states, num_slots, device), torch.zeros(shape, dtype=blocks.dtype, device=device)


def slab_tensors(
    states: StateLayout,
    blocks: BlockLayout,
    slab: SlabShape,
    unit: UnitBytes,
    num_slabs: int,
    device: torch.device | int | str,
) -> tuple[StatePool, Tensor]:
    """Return a state pool and a KV buffer over the same memory, all zero.

    Slot s and block b lie where `SlabSpace` says; after the last slab comes one block more.

    Args:
        unit: What this rank stores of a state and of a block.
    """
    slab_bytes = slab.slab_bytes(unit)
    memory = torch.zeros(num_slabs * slab_bytes + unit.block, dtype=torch.uint8, device=device)
    slot_bytes, block_bytes = slab_bytes // slab.slots_per_slab, slab_bytes // slab.blocks_per_slab
    lead = (states.num_layers, num_slabs * slab.slots_per_slab)
    conv = _view(memory, states.conv_dtype, lead + states.conv_shape, (states.conv_bytes, slot_bytes), 0)
    first_ssm = states.num_layers * states.conv_bytes
    ssm = _view(memory, states.ssm_dtype, lead + states.ssm_shape, (states.ssm_bytes, slot_bytes), first_ssm)
    half = blocks.num_elements * blocks.dtype.itemsize
    num_blocks = num_slabs * slab.blocks_per_slab + 1
    shape = (2, blocks.num_layers, num_blocks, *blocks.block_shape)
    return StatePool(states, conv, ssm), _view(memory, blocks.dtype, shape, (half, 2 * half, block_bytes), 0)


def bytes_of(pool: StatePool, kv_buffer: Tensor) -> Tensor:
    """Return the memory that `slab_tensors` has cut, [bytes] uint8."""
    view = max((pool.ssm, kv_buffer), key=lambda tensor: tensor.untyped_storage().nbytes())
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
