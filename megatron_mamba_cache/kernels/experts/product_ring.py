"""A ring of tiles of weights and of rows in the shared memory of a Hopper GPU, filled ahead of their products; Gluon.

One warp fills it by boxes; rows that have to be gathered, four warps fill in by ordinary copies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_overlap import await_then_release
from ..ssm.hopper_ring import load_tile

# Gluon is experimental, and names change: the first is Triton 3.9's, the second 3.6's.
copy_gathered = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

DEPTH = 64
"""Inputs of a stage; a layer's are a multiple of it."""
GROUPS = gl.constexpr(2)
"""Groups of warps that multiply 64 weights each."""


@aggregate
class Sizes:
    """Compile-time sizes: those of the product, and how programs split it.

    A program's tile has PER_GROUP outputs of each group of warps, PER_EXPERT such tiles all of an expert's. STEPS
    stages, of which the ring holds STAGES, have all inputs. The first AHEAD stages' weights are read before the kernel
    before is waited for.
    """

    STAGES: gl.constexpr
    STEPS: gl.constexpr
    OUTPUTS: gl.constexpr
    PER_GROUP: gl.constexpr
    PER_EXPERT: gl.constexpr
    ACTIVATION: gl.constexpr
    DIVISOR: gl.constexpr
    AHEAD: gl.constexpr
    OVERLAPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, STAGES, STEPS, OUTPUTS, PER_GROUP, PER_EXPERT, ACTIVATION, DIVISOR, AHEAD, OVERLAPS):
        self.STAGES = gl.constexpr(STAGES)
        self.STEPS = gl.constexpr(STEPS)
        self.OUTPUTS = gl.constexpr(OUTPUTS)
        self.PER_GROUP = gl.constexpr(PER_GROUP)
        self.PER_EXPERT = gl.constexpr(PER_EXPERT)
        self.ACTIVATION = gl.constexpr(ACTIVATION)
        self.DIVISOR = gl.constexpr(DIVISOR)
        self.AHEAD = gl.constexpr(AHEAD)
        self.OVERLAPS = gl.constexpr(OVERLAPS)


@aggregate
class Tile:
    """A tile's expert, its first row, the row after its last, and the number of its tile of outputs."""

    expert: gl.tensor
    first: gl.tensor
    last: gl.tensor
    outputs: gl.tensor

    @gluon.constexpr_function
    def __init__(self, expert, first, last, outputs):
        self.expert = expert
        self.first = first
        self.last = last
        self.outputs = outputs


@aggregate
class Ring:
    """What is multiplied, with the barriers that signal when a stage is full and when it may be overwritten.

    weights [STAGES * groups, 64, DEPTH]; a tile's rows in pieces of 128, 64 and 32, each [STAGES, piece, DEPTH].
    """

    weights: gl.shared_memory_descriptor
    rows128: gl.shared_memory_descriptor
    rows64: gl.shared_memory_descriptor
    rows32: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, weights, rows128, rows64, rows32, full, empty):
        self.weights = weights
        self.rows128 = rows128
        self.rows64 = rows64
        self.rows32 = rows32
        self.full = full
        self.empty = empty


@gluon.jit
def allocate_ring(rows, sizes):
    """Return an empty ring; call it before warps are specialized."""
    # A stage is full once its weights have arrived, and each of three pieces or each of 128 threads' gathered rows.
    ARRIVALS: gl.constexpr = 1 + 128 if sizes.DIVISOR > 0 else 1 + 3
    ring = Ring(
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES * GROUPS, 64, 64], rows.layout),
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES, 128, 64], rows.layout),
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES, 64, 64], rows.layout),
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES, 32, 64], rows.layout),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(ring.full.index(stage), count=ARRIVALS)
        mbarrier.init(ring.empty.index(stage), count=GROUPS)
    fence_async_shared()
    return ring


@gluon.jit
def find_tile(tiles, number, sizes):
    """Return a tile of `tile_rows` and of outputs; those of one expert follow each other."""
    entry = tiles + (1 + number // sizes.PER_EXPERT) * 4
    return Tile(gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), number % sizes.PER_EXPERT)


@gluon.jit
def _copy_weights(weight, ring, stage, tile, begin, sizes):
    """Start copying a tile's weights; the stage's barrier signals when they have arrived."""
    full = ring.full.index(stage)
    output = tile.outputs * (GROUPS * sizes.PER_GROUP)
    mbarrier.expect(full, GROUPS * 64 * 64 * 2)
    if sizes.ACTIVATION == "gated_silu":
        row = tile.expert * (2 * sizes.OUTPUTS) + output
        for box in gl.static_range(GROUPS * 4):
            group = ring.weights.index(stage * GROUPS + box // 4)
            gates, others = group.slice(box % 4 * 16, 8), group.slice(box % 4 * 16 + 8, 8)
            load_tile(weight, [row + 8 * box, begin], full, gates)
            load_tile(weight, [row + 8 * box + sizes.OUTPUTS, begin], full, others)
    else:
        row = tile.expert * sizes.OUTPUTS + output
        for group in gl.static_range(GROUPS):
            load_tile(weight, [row + 64 * group, begin], full, ring.weights.index(stage * GROUPS + group))


@gluon.jit
def _copy_rows(rows, full, place, first, begin, is_used):
    """Start copying a piece of a tile's rows, or signal that there is none."""
    if is_used:
        mbarrier.expect(full, place.shape[0] * 64 * 2)
        load_tile(rows, [first, begin], full, place)
    else:
        mbarrier.arrive(full, count=1)


@gluon.jit
def fill_by_boxes(weight, x128, x64, x32, ring, tiles, sizes):
    """Fill the ring with weights, and with rows unless they are gathered, as stages become empty; one warp."""
    num_tiles = gl.load(tiles) * sizes.PER_EXPERT
    if sizes.AHEAD > 0:
        if gl.program_id(0) < num_tiles:
            tile = find_tile(tiles, gl.program_id(0), sizes)
            for k in range(sizes.AHEAD):
                _copy_weights(weight, ring, k, tile, k * 64, sizes)
        await_then_release(sizes.OVERLAPS)
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, sizes)
        num_32 = (tile.last - tile.first + 31) // 32
        second, third = tile.first + (num_32 & 4) * 32, tile.first + (num_32 & 6) * 32
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            mbarrier.wait(ring.empty.index(stage), ((step + k) // sizes.STAGES & 1) ^ 1)
            if sizes.AHEAD == 0:  # noqa: SIM114 (known when it is compiled)
                _copy_weights(weight, ring, stage, tile, k * 64, sizes)
            elif step + k >= sizes.AHEAD:
                _copy_weights(weight, ring, stage, tile, k * 64, sizes)
            if sizes.DIVISOR == 0:
                full = ring.full.index(stage)
                _copy_rows(x128, full, ring.rows128.index(stage), tile.first, k * 64, (num_32 & 4) != 0)
                _copy_rows(x64, full, ring.rows64.index(stage), second, k * 64, (num_32 & 2) != 0)
                _copy_rows(x32, full, ring.rows32.index(stage), third, k * 64, (num_32 & 1) != 0)
        step += sizes.STEPS


@gluon.jit
def _places(x, x_stride, pairs, first, last, ROWS: gl.constexpr, DIVISOR: gl.constexpr):
    """Return where the first inputs of rows are [ROWS, 64]; after the last row, those of the last."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), last - 1)
    token = (gl.load(pairs + row) // DIVISOR).to(gl.int64)
    return x + token[:, None] * x_stride + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def gather_ahead(x, x_stride, pairs, ring, tiles, sizes):
    """Fill the ring with gathered rows, as stages become empty; four warps."""
    num_tiles = gl.load(tiles) * sizes.PER_EXPERT
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, sizes)
        num_32 = (tile.last - tile.first + 31) // 32
        x128 = _places(x, x_stride, pairs, tile.first, tile.last, 128, sizes.DIVISOR)
        x64 = _places(x, x_stride, pairs, tile.first + (num_32 & 4) * 32, tile.last, 64, sizes.DIVISOR)
        x32 = _places(x, x_stride, pairs, tile.first + (num_32 & 6) * 32, tile.last, 32, sizes.DIVISOR)
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            mbarrier.wait(ring.empty.index(stage), ((step + k) // sizes.STAGES & 1) ^ 1)
            if (num_32 & 4) != 0:
                copy_gathered(ring.rows128.index(stage), x128 + k * 64)
            if (num_32 & 2) != 0:
                copy_gathered(ring.rows64.index(stage), x64 + k * 64)
            if (num_32 & 1) != 0:
                copy_gathered(ring.rows32.index(stage), x32 + k * 64)
            async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
        step += sizes.STEPS
