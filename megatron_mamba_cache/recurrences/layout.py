"""Memory layout of state slots and KV blocks: shapes, sizes, and views of the device memory.

The KV buffer has the shape [2, layers, blocks, block size, kv heads, head dim]: keys, then values. Each state tensor is
[layers, slots, ...]. All are views of one allocation, which is split into slabs. Within a slab, the layers of a block
are contiguous, and so are the layers of a slot. The routed experts of a block's tokens, if recorded, follow its values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import StateGroup, StateTensor
from .slab_shape import SlabShape, UnitBytes, aligned

ROUTE_DTYPE = torch.int16
"""Dtype of recorded expert indices."""


@dataclass(frozen=True, slots=True)
class SlotPart:
    """Layout of one tensor within a slot.

    Args:
        num_layers: Number of layers on this rank that have the tensor; 1 if all layers of a group share it.
        shape: Shape of one layer's tensor.
    """

    num_layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of one layer's tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def aligned_bytes(self) -> int:
        """Stride in bytes between layers in a slab."""
        return aligned(self.num_bytes)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Layout of one slot over all recurrent layers on this rank.

    Args:
        parts: The tensors, in memory order: all layers of the first part, then all layers of the second, and so on.
    """

    parts: tuple[SlotPart, ...]

    @staticmethod
    def of(groups: Sequence[StateGroup], num_drafts: int = 0) -> "SlotLayout":
        """Return the layout of live states, with one part per tensor in each group.

        Args:
            num_drafts: Number of draft inputs that each window can hold in addition to the cached inputs.
        """
        return SlotLayout(
            tuple(
                SlotPart(
                    group.num_layers_of(tensor),
                    (tensor.shape[0] + _num_draft_inputs(tensor, num_drafts), *tensor.shape[1:]),
                    tensor.dtype,
                )
                for group in groups
                for tensor in group.tensors
            )
        )

    @property
    def slot_bytes(self) -> int:
        """Size of one slot in bytes, over all layers and parts, without alignment."""
        return sum(part.num_layers * part.num_bytes for part in self.parts)

    @property
    def aligned_bytes(self) -> int:
        """Size of one slot in bytes, including the padding that aligns each layer of each part."""
        return sum(part.num_layers * part.aligned_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layout of the KV blocks on a rank.

    Args:
        num_layers: Number of attention layers.
        block_shape: (block size, kv heads, head dim).
    """

    num_layers: int
    block_shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Number of elements in one block's keys (or values) for one layer."""
        return math.prod(self.block_shape)


def state_tensors(states: SlotLayout, num_slots: int, device: torch.device | int | str) -> tuple[Tensor, ...]:
    """Allocate a separate zero tensor for each part of the layout."""
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
    """Allocate one zero-filled buffer; return the state tensors and the KV buffer as views of it.

    `SlabSpace` defines which slots and blocks each slab contains. One additional block follows the last slab.

    Args:
        unit: Sizes in bytes of a state and a block on this rank.
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


def route_table(kv_buffer: Tensor, num_layers: int, top_k: int) -> Tensor:
    """Return the routed experts that follow the keys and values of each block, as a view.

    Args:
        kv_buffer: KV buffer from `slab_tensors`, with this space in each block.

    Returns:
        [blocks, block size, layers, top_k] int16.
    """
    num_blocks, block_size = kv_buffer.shape[2:4]
    stride, first_byte = (n * kv_buffer.itemsize for n in (kv_buffer.stride(2), kv_buffer[:, :, 0].numel()))
    return _view(bytes_of(kv_buffer), ROUTE_DTYPE, (num_blocks, block_size, num_layers, top_k), (stride,), first_byte)


def bytes_of(*views: Tensor) -> Tensor:
    """Return the buffer that the views from `slab_tensors` share, as [bytes] uint8."""
    view = max(views, key=lambda tensor: tensor.untyped_storage().nbytes())
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def _num_draft_inputs(tensor: StateTensor, num_drafts: int) -> int:
    return max(num_drafts, tensor.num_draft_inputs) if tensor.motion == "window" else 0


def _view(
    memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...], lead_bytes: tuple[int, ...], first_byte: int
) -> Tensor:
    """Return a view whose leading dimensions have the strides `lead_bytes`; the other dimensions are contiguous."""
    inner = torch.empty(shape[len(lead_bytes) :], device="meta").stride()
    strides = (*(num_bytes // dtype.itemsize for num_bytes in lead_bytes), *inner)
    if math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype, device=memory.device)
    whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, strides, first_byte // dtype.itemsize)
