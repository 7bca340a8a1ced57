"""Add the parts of tiles that several programs of a GEMM have computed, in a fixed order.

The programs of `split_token_hopper` share tiles: the steps of the shared tiles, in order, are divided among them. A
program writes its part of a tile that another one began to its first slot, and of a tile that it begins itself to its
second one; a tile that it computes alone is no part of these.

Grid: (tiles, blocks of outputs, blocks of tokens). Graph safe: no host sync, no atomics.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping

_OUTPUTS = 128
_FEW_OUTPUTS = 32
"""Of a block of results; few if there are few blocks."""
_FEW_BLOCKS = 128
_TOGETHER = 8
"""Parts that are loaded together."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Sums of parts of tiles.

    Args:
        sums: [2 * programs, tokens / 8, outputs of a tile, 8] float32: two slots for each program.
        steps: Of a tile.
        shared: Steps of all shared tiles; at least as many as programs.
        first_tile: The first shared one.
    """

    sums: Tensor
    steps: int
    shared: int
    first_tile: int

    @property
    def programs(self) -> int:
        """Number of programs that share the tiles."""
        return len(self.sums) // 2


@triton.jit
def program_of(step, SHARED: tl.constexpr, SHARERS: tl.constexpr):
    """Return the program that computes a shared step: the last one with `first_shared` <= step."""
    return ((step + 1) * SHARERS - 1) // SHARED


@triton.jit(do_not_specialize=["num_tokens"])
def _add_parts_kernel(
    parts, factors, out, out_stride, num_tokens,
    ROWS: tl.constexpr, FIRST_TILE: tl.constexpr, STEPS: tl.constexpr, SHARED: tl.constexpr, SHARERS: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, OUTPUTS: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_FACTORS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add all parts of OUTPUTS outputs of a tile and of 8 tokens."""
    await_inputs(OVERLAPS)
    step = tl.program_id(0) * STEPS
    begin, last = program_of(step, SHARED, SHARERS), program_of(step + STEPS - 1, SHARED, SHARERS)
    if begin < last:
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        token = tl.program_id(2) * 8 + tl.arange(0, 8)
        pointers = parts + (tl.program_id(2) * TILE + output)[:, None] * 8 + tl.arange(0, 8)[None, :]
        SLOT: tl.constexpr = TILE * PADDED
        total = tl.load(pointers + (2 * begin + 1) * SLOT, cache_modifier=".cg")
        for part in range(begin + 1, last + 1, TOGETHER):
            for other in tl.static_range(TOGETHER):
                exists = (0 * output + part + other <= last)[:, None]
                total += tl.load(pointers + 2 * (part + other) * SLOT, mask=exists, other=0, cache_modifier=".cg")
        row = (FIRST_TILE + tl.program_id(0)) * TILE + output
        if HAS_FACTORS:
            total *= tl.load(factors + row, mask=row < ROWS, other=0)[:, None]
        result = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
        is_stored = (row < ROWS)[:, None] & (token < num_tokens)[None, :]
        tl.store(result, total.to(out.dtype.element_ty), mask=is_stored)


def add_parts(parts: Parts, factors: Tensor | None, out: Tensor) -> None:
    """Write the sums of all tiles that have more than one part to `out` [tokens, outputs], times the rows' factors.

    Reference: `add_parts_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(out):
        add_parts_ref(parts, factors, out)
        return
    groups, tile = parts.sums.shape[1:3]
    tiles = parts.shared // parts.steps
    outputs = _OUTPUTS if tiles * (tile // _OUTPUTS) * groups >= _FEW_BLOCKS else _FEW_OUTPUTS
    _add_parts_kernel[(tiles, tile // outputs, triton.cdiv(len(out), 8))](
        parts=parts.sums,
        factors=parts.sums if factors is None else factors,
        out=out,
        out_stride=out.stride(0),
        num_tokens=len(out),
        ROWS=out.shape[1],
        FIRST_TILE=parts.first_tile,
        STEPS=parts.steps,
        SHARED=parts.shared,
        SHARERS=parts.programs,
        TILE=tile,
        PADDED=8 * groups,
        OUTPUTS=outputs,
        TOGETHER=_TOGETHER,
        HAS_FACTORS=factors is not None,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(out.device),
    )


def add_parts_ref(parts: Parts, factors: Tensor | None, out: Tensor) -> None:
    """Torch twin of `add_parts`, to the bit."""
    tile = parts.sums.shape[2]
    for number in range(parts.shared // parts.steps):
        begin, last = (
            ((step + 1) * parts.programs - 1) // parts.shared
            for step in (number * parts.steps, (number + 1) * parts.steps - 1)
        )
        if begin == last:
            continue
        rows = slice((parts.first_tile + number) * tile, min((parts.first_tile + number + 1) * tile, out.shape[1]))
        total = parts.sums[2 * begin + 1].clone()
        for program in range(begin + 1, last + 1):
            total += parts.sums[2 * program]
        total = total.transpose(1, 2).flatten(0, 1)[:, : rows.stop - rows.start]
        total = total if factors is None else total * factors[rows]
        out[:, rows] = total[: len(out)].to(out.dtype)
