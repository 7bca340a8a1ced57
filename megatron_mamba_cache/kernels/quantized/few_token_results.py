"""Results of GEMMs whose steps are divided among programs, in Gluon: whole tiles, and parts of tiles that are added."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ..gluon_common import thread_barrier
from .few_token_pipeline import GROUPS, UNIT, program_of

_TOGETHER = gl.constexpr(3)
"""Parts of a tile that are loaded together to be added."""


@aggregate
class Results:
    """Where sums go: `out` [tokens, outputs], and for parts of tiles two slots per program and a counter per group."""

    out: gl.tensor
    out_stride: gl.tensor
    num_tokens: gl.tensor
    factors: gl.tensor
    parts: gl.tensor
    counters: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, out_stride, num_tokens, factors, parts, counters):
        self.out = out
        self.out_stride = out_stride
        self.num_tokens = num_tokens
        self.factors = factors
        self.parts = parts
        self.counters = counters


@gluon.jit
def put(results, total, first, sizes, SUMS: gl.constexpr):
    """Multiply sums [64, TOKENS] by their rows' factors and store them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if sizes.HAS_FACTORS:
        row = first + gl.arange(0, UNIT, layout=gl.SliceLayout(1, SUMS))
        total *= gl.load(results.factors + gl.minimum(row, sizes.ROWS - 1))[:, None]
    result = gl.convert_layout(total.to(gl.bfloat16), LAYOUT)
    row = first + gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, sizes.TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    pointers = results.out + token.to(gl.int64)[None, :] * results.out_stride + row[:, None]
    gl.store(pointers, result, mask=(row < sizes.ROWS)[:, None] & (token < results.num_tokens)[None, :])


@gluon.jit
def put_part(results, sums, tile, first, is_first, sizes, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Store the sums of a part of a tile; the last program to do so adds all parts in order and stores the results.

    A program's first slot is for a tile that another program began, the second one for a tile that it begins itself.
    """
    SLOT: gl.constexpr = GROUPS * sizes.UNITS * UNIT * sizes.TOKENS
    output = gl.arange(0, UNIT, layout=gl.SliceLayout(1, SUMS))
    token = gl.arange(0, sizes.TOKENS, layout=gl.SliceLayout(0, SUMS))
    of_unit = results.parts + (output[:, None] * sizes.TOKENS + token[None, :])
    own = (2 * gl.program_id(0) + is_first.to(gl.int32)) * SLOT
    for unit in gl.static_range(sizes.UNITS):
        gl.store(of_unit + own + (GROUP * sizes.UNITS + unit) * (UNIT * sizes.TOKENS), sums[unit])
    begin = program_of(tile * sizes.STEPS, sizes.WORK, sizes.PROGRAMS)
    count = program_of((tile + 1) * sizes.STEPS - 1, sizes.WORK, sizes.PROGRAMS) - begin + 1
    counter = results.counters + tile * GROUPS + GROUP
    thread_barrier()  # every thread's sums are written before the group counts itself
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
        gl.store(counter, 0)
        for unit in gl.static_range(sizes.UNITS):
            pointers = of_unit + (GROUP * sizes.UNITS + unit) * (UNIT * sizes.TOKENS)
            total = gl.load(pointers + (2 * begin + 1) * SLOT, cache_modifier=".cg")
            for part in range(begin + 1, begin + count, _TOGETHER):
                others = ()
                for other in gl.static_range(_TOGETHER):
                    exists = (output >= 0)[:, None] & (part + other < begin + count)
                    found = gl.load(pointers + 2 * (part + other) * SLOT, mask=exists, other=0, cache_modifier=".cg")
                    others = others + (found,)  # type: ignore[assignment]  # noqa: RUF005
                for other in gl.static_range(_TOGETHER):
                    total += others[other]
            put(results, total, first + unit * UNIT, sizes, SUMS)
