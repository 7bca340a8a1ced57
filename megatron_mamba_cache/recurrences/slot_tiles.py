"""Split slots into tiles, so that all resident programs share the copy of one slot.

Copies ignore dtypes: each layer of a slot is viewed as [times, elements], with the widest integers that its size and
alignment allow. A window has one time per input; other tensors have a single time. A tile covers all times for a power
of two of elements, so a window can be shifted within its own slot. A 16-byte access consists of two 8-byte elements.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENT_DTYPES = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class CopyTiling:
    """Tile and grid sizes for a copy; they do not affect the result.

    Args:
        tile_len: Number of elements per tile, a power of two; an element has 8 bytes if the alignment allows it.
        programs_per_sm: Number of programs per multiprocessor.
    """

    tile_len: int
    num_warps: int
    programs_per_sm: int


class SlotStates(NamedTuple):
    """A pool as kernel arguments; strides count accesses of `lanes` elements."""

    first: Tensor  # the elements of layer 0, slot 0, time 0; its address is the base of the pool
    layer_stride: int
    slot_stride: int
    time_stride: int


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """A pool as kernel arguments, and the compile-time sizes for `copy_tiles`.

    Args:
        times: Number of times to copy per layer of a slot.
        length: Number of elements per time.
        lanes: Number of elements per memory access.
        width: Number of elements per tile and time.
    """

    states: SlotStates
    times: int
    length: int
    lanes: int
    width: int


def access_bytes(*pools: Tensor) -> int:
    """Return the size in bytes, at most 16, of the widest access that is aligned everywhere in these pools."""
    addresses = [pool.data_ptr() for pool in pools]
    sizes = [number * pool.element_size() for pool in pools for number in (pool.shape[3], *pool.stride()[:3])]
    return gcd(16, *addresses, *sizes)


def cut_slots(pool: Tensor, tiling: CopyTiling, access: int | None = None) -> SlotTiles:
    """Split the slots of a pool [layers, slots, times, elements] into tiles; there must be at least one slot.

    Args:
        pool: The last dimension must be contiguous.
        access: Size of a memory access in bytes, at most `access_bytes(pool)`; None: that maximum.
    """
    num_times, num_elements = pool.shape[2:]
    strides = [stride * pool.element_size() for stride in pool.stride()[:3]]
    num_bytes = num_elements * pool.element_size()
    access = access_bytes(pool) if access is None else access
    dtype = _ELEMENT_DTYPES[access]
    length = num_bytes // dtype.itemsize
    return SlotTiles(
        states=SlotStates(pool[0, 0, 0].view(dtype) if length else pool, *(stride // access for stride in strides)),
        times=num_times,
        length=length,
        lanes=access // dtype.itemsize,
        width=min(triton.next_power_of_2(max(length, 1)), tiling.tile_len // triton.next_power_of_2(num_times)),
    )


def one_time(pool: Tensor) -> Tensor:
    """Reshape a pool [layers, slots, ...] to [layers, slots, 1, elements]."""
    return pool.flatten(2)[:, :, None]


@triton.jit
def numbered(chosen):
    """Number the True entries of `chosen` from 1 on; False entries get 0."""
    return tl.where(chosen, tl.cumsum(chosen.to(tl.int32), axis=0), 0)


@triton.jit
def of_number(values, numbers, number):
    """Return the entry of `values` whose entry in `numbers` equals `number`."""
    return tl.sum(tl.where(numbers == number, values, 0), axis=0)


@triton.jit
def next_turn(turn, TILES: tl.constexpr):
    """Return a program's first tile in the next slot, given its first tile `turn` in this slot of TILES tiles.

    Programs take tiles round-robin across slots; for the first slot, `turn` is the program id.
    """
    programs = tl.num_programs(0)
    return (turn + programs - TILES % programs) % programs


@triton.jit
def copy_tiles(
    states, target_states, source, target, first_tile,
    LAYERS: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy every n-th tile of slot `source` to slot `target`, starting at `first_tile`; n is the grid size.

    Tensors have one time. Slots are int64; `target_states` may be `states`.
    """
    TILES: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    # Multiplying by LANES last lets the compiler know that every address is aligned to LANES elements.
    from_slot, to_slot = source * states.slot_stride * LANES, target * target_states.slot_stride * LANES
    for tile in range(first_tile, LAYERS * TILES, tl.num_programs(0)):
        layer = tl.cast(tile // TILES, tl.int64)
        element = tile % TILES * WIDTH + tl.arange(0, WIDTH)
        sources = states.first + layer * states.layer_stride * LANES + from_slot + element
        targets = target_states.first + layer * target_states.layer_stride * LANES + to_slot + element
        if LENGTH % WIDTH == 0:
            tl.store(targets, tl.load(sources))
        else:
            tl.store(targets, tl.load(sources, mask=element < LENGTH), mask=element < LENGTH)


@triton.jit
def copy_windows(
    states, target_states, tail, source, target, shift, buffer, first_tile,
    LAYERS: tl.constexpr, TIMES: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """Copy every n-th tile of a window, starting at input `shift`, as `copy_tiles` does for whole tensors.

    Source and target may be the same slot of the same tensor.

    Args:
        tail: If HAS_TAIL, its entry `buffer` holds the inputs from TIMES on; otherwise they are in the slot.
    """
    TILES: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    time = tl.arange(0, triton.next_power_of_2(TIMES))[:, None]
    # Multiplying by LANES last lets the compiler know that every address is aligned to LANES elements.
    from_slot = (source * states.slot_stride + shift * states.time_stride) * LANES
    to_slot = target * target_states.slot_stride * LANES
    for tile in range(first_tile, LAYERS * TILES, tl.num_programs(0)):
        layer = tl.cast(tile // TILES, tl.int64)
        element = tile % TILES * WIDTH + tl.arange(0, WIDTH)[None, :]
        sources = states.first + layer * states.layer_stride * LANES + from_slot
        sources += time * states.time_stride * LANES + element  # [TIMES, WIDTH]
        targets = target_states.first + layer * target_states.layer_stride * LANES + to_slot
        targets += time * target_states.time_stride * LANES + element
        inside = (time < TIMES) & (element < LENGTH)
        if not HAS_TAIL:
            values = tl.load(sources, mask=inside)
        else:
            is_in_tail = shift + time >= TIMES
            from_buffer = (buffer * tail.slot_stride + (shift - TIMES) * tail.time_stride) * LANES
            later = tail.first + layer * tail.layer_stride * LANES + from_buffer
            later += time * tail.time_stride * LANES + element
            values = tl.where(
                is_in_tail, tl.load(later, mask=inside & is_in_tail), tl.load(sources, mask=inside & ~is_in_tail)
            )
        tl.debug_barrier()  # all threads must read before any writes, as source and target may overlap
        tl.store(targets, values, mask=inside)
