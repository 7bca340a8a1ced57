"""Stochastic rounding of states to fp16: device functions in Triton, and their torch reference.

A value between two fp16 numbers becomes the upper one with a probability equal to its distance from the lower one, to
13 bits, so the expected error is zero. Small updates then are not lost, as they are if a decaying state is cast to the
nearest fp16 number after every token.

    random = 13 bits of a hash of (position, layer, row, column)
    result = (bits of the fp32 value + random) with the lowest 13 bits cleared

Position is the number of tokens that the state includes. Row and column are those of the element in the layer's states:
row = head * rows of a head + row within the head. The hash depends on nothing else, so the bits of a state do not
depend on its slot, its request or the other requests of a step. fp16 numbers are unchanged. Larger values become 65504
with their sign, NaN stays NaN. Below 2**-14, where fp16 numbers are subnormal and 2**-24 apart, values are rounded to
nearest.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batches import PrefillBatch

LARGEST = tl.constexpr(65504.0)
_OF_LAYER = tl.constexpr(0x9E3779B1)
_FIRST, _SECOND = tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35)  # those of MurmurHash3's finalizer (Appleby)
SEED_STEP = tl.constexpr(2)
_WORD = 2**32 - 1


class DecodeRounding(NamedTuple):
    """Arguments of a decode kernel for stochastic rounding: tokens before the step, [requests], and the seed."""

    computed: Tensor
    seed: int


class ScanRounding(NamedTuple):
    """Arguments of a scan kernel for stochastic rounding: as in `DecodeRounding`, and the period in tokens."""

    computed: Tensor
    seed: int
    period: int


def rounding_seed(dtype: torch.dtype, layer: int = 0) -> int | None:
    """Return the seed of a layer's states; None for other dtypes than fp16, which round to nearest.

    Seeds are odd and above 1, so that Triton compiles the same kernel for all of them.
    """
    return 3 + SEED_STEP.value * layer if dtype == torch.float16 else None


def decode_rounding(computed: Tensor | None, pool: Tensor, seed: int | None) -> DecodeRounding | None:
    """Return the rounding arguments of a decode kernel; None without a seed.

    Raises:
        ValueError: If there is a seed, but the pool is not in fp16, or the batch has no positions.
    """
    return None if seed is None else DecodeRounding(_positions(computed, pool, seed), seed)


def scan_rounding(rows: PrefillBatch, pool: Tensor, seed: int | None) -> ScanRounding | None:
    """Return the rounding arguments of a scan kernel; see `decode_rounding`."""
    if seed is None:
        return None
    if rows.block_size < 1:
        raise ValueError(f"stochastic rounding needs a block_size of at least 1 in the batch, found {rows.block_size}")
    return ScanRounding(_positions(rows.computed, pool, seed), seed, rows.block_size)


@triton.jit
def cast_scanned(state, DTYPE: tl.constexpr, rounding, position, row, column):
    """Cast a float32 state to DTYPE as `cast_state` does, with the seed of a `ScanRounding`; None has no seed."""
    if rounding is None:
        return state.to(DTYPE)
    else:
        return cast_state(state, DTYPE, rounding.seed, position, row, column)


@triton.jit
def round_boundary(state, DTYPE: tl.constexpr, rounding, position, row, column):
    """Return the float32 state of a scan, rounded if `position` is a multiple of the period; None rounds nothing."""
    if rounding is not None:  # noqa: SIM102 (known when it is compiled)
        if position % rounding.period == 0:
            state = cast_state(state, DTYPE, rounding.seed, position, row, column).to(tl.float32)
    return state


def check_seed(pool: Tensor, seed: int | None) -> None:
    """Raise a `ValueError` if there is a seed, but the pool is not in fp16."""
    if seed is not None and pool.dtype != torch.float16:
        raise ValueError(f"a seed needs a pool in {torch.float16}, found {pool.dtype}; leave out the seed")


def _positions(computed: Tensor | None, pool: Tensor, seed: int) -> Tensor:
    check_seed(pool, seed)
    if computed is None:
        raise ValueError("stochastic rounding needs `computed` in the batch, found None; leave out the seed without it")
    return computed


def next_seed(seed: int | None, layers: int) -> int | None:
    """Return the seed of the layer that comes `layers` after the one with `seed`; None stays None."""
    return None if seed is None else seed + layers * SEED_STEP.value


@triton.jit
def cast_state(state, DTYPE: tl.constexpr, seed, position, row, column):
    """Cast a float32 state to DTYPE: to fp16 with random bits from `seed`, or to nearest if `seed` is None.

    Args:
        position: Number of tokens that the state includes.
        row, column: Indices of each element in the layer's states; their shapes broadcast to that of `state`.
    """
    if seed is None:
        return state.to(DTYPE)
    else:
        key = tl.cast(position, tl.uint32) + tl.cast(seed, tl.uint32) * _OF_LAYER
        key = (key ^ (key >> 16)) * _FIRST
        key = (key ^ (key >> 13)) * _SECOND
        key ^= key >> 16
        # All terms depend on the key; otherwise, the compiler would keep those of all elements in registers.
        words = (tl.cast(row, tl.uint32) * (key | 1) + key) ^ (tl.cast(column, tl.uint32) * (key * _FIRST | 1))
        words = (tl.umulhi(words, _SECOND) ^ (words * _SECOND)) * _FIRST
        state = tl.clamp(state, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        bits = (state.to(tl.uint32, bitcast=True) + (words >> 19)) & 0xFFFFE000
        # The sum overflows for some NaNs; adding 0 * state restores them.
        return (bits.to(tl.float32, bitcast=True) + state * 0.0).to(tl.float16)


def cast_state_ref(
    states: Tensor, dtype: torch.dtype, seed: int | None, positions: Tensor | None, after: int = 0
) -> Tensor:
    """Torch reference for `cast_state`, for whole states [..., heads, rows, columns] at `positions` [...] + `after`."""
    if seed is None or positions is None:
        return states.to(dtype)
    heads, rows, columns = states.shape[-3:]
    first, second = _FIRST.value, _SECOND.value
    key = positions.to(torch.int64) + after + seed * _OF_LAYER.value & _WORD
    key = (key ^ (key >> 16)) * first & _WORD
    key = (key ^ (key >> 13)) * second & _WORD
    row = torch.arange(heads * rows, device=states.device).view(heads, rows, 1)
    column = torch.arange(columns, device=states.device)
    key = (key ^ (key >> 16))[..., None, None, None]
    product = ((row * (key | 1) + key & _WORD) ^ (column * (key * first & _WORD | 1) & _WORD)) * second
    words = ((product >> 32 & _WORD) ^ (product & _WORD)) * first & _WORD
    states = states.to(torch.float32).clamp(-LARGEST.value, LARGEST.value)
    cast = (states.view(torch.int32) + (words >> 19).to(torch.int32) & -0x2000).view(torch.float32)
    return torch.where(states.isnan(), states, cast).to(dtype)


@dataclass(frozen=True, slots=True)
class ScanRoundingRef:
    """Rounding of the states of a scan in its torch reference, as kernels do it with `ScanRounding`.

    Args:
        dtype: Dtype of the pool.
        ends: [n]; number of tokens that the state after each chunk (or token) includes. None rounds to nearest.
    """

    dtype: torch.dtype
    seed: int | None
    ends: Tensor | None
    period: int

    @staticmethod
    def of(rows: PrefillBatch, pool: Tensor, seed: int | None, owner: Tensor, ends: Tensor) -> "ScanRoundingRef":
        """Return the rounding for states after the packed positions `ends` [n] of the requests `owner` [n]."""
        if seed is not None:
            before = _positions(rows.computed, pool, seed) - rows.cu_seqlens[:-1]
            return ScanRoundingRef(pool.dtype, seed, before.index_select(0, owner) + ends, rows.block_size)
        return ScanRoundingRef(pool.dtype, None, None, 0)

    def within(self, state: Tensor, index: int) -> Tensor:
        """Return the state after the chunk at `index`, rounded if it ends at a multiple of the period."""
        if self.ends is None:
            return state
        end = self.ends[index]
        return torch.where(end % self.period == 0, cast_state_ref(state, self.dtype, self.seed, end), state)

    def stored(self, states: Tensor, group: slice) -> Tensor:
        """Return the states after the chunks of a group as they are stored."""
        return cast_state_ref(states, self.dtype, self.seed, None if self.ends is None else self.ends[group])
