"""Slots of a pool cut into tiles, so that resident programs share the copy of one slot.

Copies are blind to dtypes: a slot and layer hold [times, elements] of the widest integer that size and alignment
allow, the conv window one time for each input, an SSM state one time in all. A tile has all times of a power of two
of elements, so that a window may move left within its own slot. Two 8-byte elements make a 16-byte access.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENT_DTYPES = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_INTERPRETED_PROGRAMS = 2


@dataclass(frozen=True, slots=True)
class CopyTiling:
    """How a copy is cut over the device; every choice copies the same bytes.

    Args:
        tile_len: elements of a tile, a power of two; 8 bytes each where alignment allows.
        num_warps: warps of a program.
        programs_per_sm: programs launched for each multiprocessor.
    """

    tile_len: int
    num_warps: int
    programs_per_sm: int

    def num_programs(self, device: torch.device) -> int:
        """Return the programs of a grid that stays resident on `device`."""
        if device.type != "cuda":
            return _INTERPRETED_PROGRAMS
        return self.programs_per_sm * _num_multiprocessors(device)


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
        times, length: times of a slot and layer that are copied, elements of each.
        lanes: elements of an access.
        width: elements of a tile.
    """

    states: SlotStates
    times: int
    length: int
    lanes: int
    width: int


def cut_slots(pool: Tensor, tiling: CopyTiling) -> SlotTiles:
    """Cut a pool [layers, slots, times, elements], none of them 0, whose elements are contiguous."""
    num_times, num_elements = pool.shape[2:]
    strides = [stride * pool.element_size() for stride in pool.stride()[:3]]
    num_bytes = num_elements * pool.element_size()
    access = gcd(16, num_bytes, pool.data_ptr(), *strides)
    dtype = _ELEMENT_DTYPES[access]
    length = num_bytes // dtype.itemsize
    return SlotTiles(
        states=SlotStates(pool[0, 0, 0].view(dtype), *(stride // access for stride in strides)),
        times=num_times,
        length=length,
        lanes=access // dtype.itemsize,
        width=min(triton.next_power_of_2(length), tiling.tile_len // triton.next_power_of_2(num_times)),
    )


@triton.jit
def copy_tiles(
    states,
    source,
    target,
    shift,
    first_tile,
    LAYERS: tl.constexpr,
    TIMES: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy every n-th tile from `first_tile` on, n programs, of slot `source` to `target`, `shift` times to the left.

    Slots are int64. All layers; the slots may be equal.
    """
    TILES: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    time = tl.arange(0, triton.next_power_of_2(TIMES))[:, None]
    # Multiplying by LANES last tells the compiler that every address is aligned to LANES elements.
    from_slot = (source * states.slot_stride + shift * states.time_stride) * LANES
    to_slot = target * states.slot_stride * LANES
    for tile in range(first_tile, LAYERS * TILES, tl.num_programs(0)):
        layer = states.first + tl.cast(tile // TILES, tl.int64) * states.layer_stride * LANES
        element = tile % TILES * WIDTH + tl.arange(0, WIDTH)[None, :]
        offsets = time * states.time_stride * LANES + element  # [TIMES, WIDTH]
        if TIMES == 1 and LENGTH % WIDTH == 0:
            tl.store(layer + to_slot + offsets, tl.load(layer + from_slot + offsets))
        else:
            inside = (time < TIMES) & (element < LENGTH)
            values = tl.load(layer + from_slot + offsets, mask=inside)
            if TIMES > 1:
                tl.debug_barrier()  # a write may land on what another thread of this program reads
            tl.store(layer + to_slot + offsets, values, mask=inside)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
