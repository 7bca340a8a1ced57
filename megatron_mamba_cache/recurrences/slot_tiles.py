"""Slots of a pool cut into tiles, so that resident programs share the copy of one slot.

Copies ignore dtypes: a slot and layer hold [times, elements] of the widest integer that size and alignment allow. A
window that moves has one time for each input, all else only one. A tile has all times of a power of two of elements, so
a window may move left within its own slot. Two 8-byte elements make a 16-byte access.
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
    """How a copy is split over the device; every choice copies the same bytes.

    Args:
        tile_len: Elements of a tile, a power of two; 8 bytes each where alignment allows.
        programs_per_sm: Programs launched for each multiprocessor.
    """

    tile_len: int
    num_warps: int
    programs_per_sm: int


class SlotStates(NamedTuple):
    """A kernel's view of a pool; strides count accesses of `lanes` elements."""

    first: Tensor  # elements of layer 0, slot 0, time 0
    layer_stride: int
    slot_stride: int
    time_stride: int


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """A pool's view and the compile-time sizes of `copy_tiles`.

    Args:
        times, length: Times of a slot and layer that are copied, elements of each.
        lanes: Elements of an access.
        width: Elements of a tile.
    """

    states: SlotStates
    times: int
    length: int
    lanes: int
    width: int


def access_bytes(*pools: Tensor) -> int:
    """Return the widest access, at most 16 bytes, that is aligned everywhere in pools of `cut_slots`."""
    return min(map(_access_bytes, pools))


def _access_bytes(pool: Tensor) -> int:
    size = pool.element_size()
    return gcd(16, pool.shape[3] * size, pool.data_ptr(), *(stride * size for stride in pool.stride()[:3]))


def cut_slots(pool: Tensor, tiling: CopyTiling, access: int | None = None) -> SlotTiles:
    """Cut a pool [layers, slots, times, elements] of some slots, whose elements, if any, are contiguous.

    Args:
        access: Bytes of an access, at most those of `access_bytes`, which is the default.
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
    """Return a pool [layers, slots, ...] as [layers, slots, 1, elements]."""
    return pool.flatten(2)[:, :, None]


@triton.jit
def numbered(chosen):
    """Number the chosen ones from 1 on; 0 for the others."""
    return tl.where(chosen, tl.cumsum(chosen.to(tl.int32), axis=0), 0)


@triton.jit
def of_number(values, numbers, number):
    """Return the value with a number of `numbered`."""
    return tl.sum(tl.where(numbers == number, values, 0), axis=0)


@triton.jit
def next_turn(turn, TILES: tl.constexpr):
    """Return a program's first tile of the next slot, from its first tile (`turn`) of this slot's TILES.

    Tiles are dealt out without a gap between slots: a program's first turn is its number.
    """
    programs = tl.num_programs(0)
    return (turn + programs - TILES % programs) % programs


@triton.jit
def copy_tiles(
    states, target_states, source, target, first_tile,
    LAYERS: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy every n-th tile of slot `source` to `target`, from `first_tile` on, for n programs: all layers, one time.

    Slots are int64; `target` is one of `target_states`, which may be `states`.
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
    """Copy every n-th tile of a window, all layers, from input `shift` on, as `copy_tiles` does.

    The source and target slots may be equal if the states are.

    Args:
        tail: Holds the inputs from TIMES on, at `buffer`, if HAS_TAIL; else they are in the slot as well.
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
        tl.debug_barrier()  # a write may overwrite what another thread of this program reads
        tl.store(targets, values, mask=inside)
