"""Shared memory of the "sums" kernel, into which it copies a step's tokens, their factors and due ring entries.

A load from memory takes longer than the arithmetic for a token, and more so while other programs read states. Therefore
all copies of a step are started at once, next to the loads of the state.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import _aggregate as aggregate

from ....kernels.gluon_common import copy_gathered, reinterpret
from ...replay.operands import sync_lanes
from .factors import NUM_SCALARS

SCALARS = gl.constexpr(NUM_SCALARS)
STAGED = gl.constexpr(8)
"""Number of tokens of a step in shared memory at a time."""


@aggregate
class Staged:
    """Shared memory for the tokens of a step from a multiple of STAGED on, and for their factors.

    Args:
        keys, queries: [STAGED, lanes, run / 2] pairs of bf16 numbers in int32.
        values: [STAGED, WIDTH / 2], likewise.
        inputs: [2 * STAGED, lanes, RING / lanes], those of w and of y of each token.
        scalars: [STAGED, 4].
        ring_keys, ring_values, ring_decays: Ring entries of a period: keys like those above but [RING, ...], corrected
            values [RING, WIDTH] and log decays [RING, 1].
    """

    keys: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    inputs: gl.shared_memory_descriptor
    scalars: gl.shared_memory_descriptor
    ring_keys: gl.shared_memory_descriptor
    ring_values: gl.shared_memory_descriptor
    ring_decays: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys, queries, values, inputs, scalars, ring_keys, ring_values, ring_decays):
        self.keys = keys
        self.queries = queries
        self.values = values
        self.inputs = inputs
        self.scalars = scalars
        self.ring_keys = ring_keys
        self.ring_values = ring_values
        self.ring_decays = ring_decays


@gluon.constexpr_function
def _plain_layout(rank):
    """Return the layout of shared memory whose last dimension is contiguous."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank))))


@gluon.jit
def allocate_staged(KEY_DIM: gl.constexpr, WIDTH: gl.constexpr, LANES: gl.constexpr, RING: gl.constexpr):
    """Return shared memory for tokens and factors; the layouts are those of one token's part."""
    RUN: gl.constexpr = KEY_DIM // LANES // 2
    return Staged(
        gl.allocate_shared_memory(gl.int32, [STAGED, LANES, RUN], _plain_layout(2)),
        gl.allocate_shared_memory(gl.int32, [STAGED, LANES, RUN], _plain_layout(2)),
        gl.allocate_shared_memory(gl.int32, [STAGED, WIDTH // 2], _plain_layout(1)),
        gl.allocate_shared_memory(gl.float32, [2 * STAGED, LANES, RING // LANES], _plain_layout(2)),
        gl.allocate_shared_memory(gl.float32, [STAGED, SCALARS], _plain_layout(1)),
        gl.allocate_shared_memory(gl.int32, [RING, LANES, RUN], _plain_layout(2)),
        gl.allocate_shared_memory(gl.float32, [RING, WIDTH], _plain_layout(1)),
        gl.allocate_shared_memory(gl.float32, [RING, 1], _plain_layout(1)),
    )


@gluon.jit
def _copy(memory, pointers, mask):
    """Start to copy from pointers to all tokens' parts of shared memory."""
    SHAPE: gl.constexpr = pointers.shape
    copy_gathered(reinterpret(memory, memory.dtype, SHAPE, _plain_layout(len(SHAPE))), pointers, mask=mask)


@gluon.jit
def _run_offsets(first, COUNT: gl.constexpr, LANES: gl.constexpr, RUN: gl.constexpr):
    """Return the tokens from `first` on [COUNT, 1, 1], and the offsets of a key's pairs [1, LANES, RUN]."""
    VECTOR: gl.constexpr = min(RUN, 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, VECTOR], [32 * VECTOR // (LANES * RUN), LANES, RUN // VECTOR], [1, 1, 1], [2, 1, 0]
    )
    token = first + gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    return token, lane * RUN + gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def await_staged(NUM_OUTSTANDING: gl.constexpr):
    """Wait for all groups of copies but the last NUM_OUTSTANDING."""
    async_copy.wait_group(NUM_OUTSTANDING)
    sync_lanes()


@gluon.jit
def stage_entries(
    staged, ring_pointers, ring, first, end,
    HEADS: gl.constexpr, CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Copy the ring entries from `first` to `end` - 1, which one period has, and wait for them and all other copies.

    Args:
        ring_pointers: To the request's corrected values of the program's columns, its keys (in pairs) and its steps.
    """
    LANES: gl.constexpr = staged.ring_keys.shape[1]
    RUN: gl.constexpr = staged.ring_keys.shape[2]
    WIDTH: gl.constexpr = staged.ring_values.shape[1]
    x, b, steps = ring_pointers
    begin = first // RING * RING
    sync_lanes()  # other lanes may still read the entries before
    position, pair = _run_offsets(begin, RING, LANES, RUN)
    is_entry = (position >= first) & (position < end)
    _copy(staged.ring_keys, b + position % CAPACITY * (ring.B_stride // 2) + pair, is_entry)
    OF_VALUES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [1, 1], [1, 0])
    position = begin + gl.arange(0, RING, layout=gl.SliceLayout(1, OF_VALUES))[:, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OF_VALUES))[None, :]
    is_entry = (position >= first) & (position < end)
    _copy(staged.ring_values, x + position % X_CAPACITY * ring.x_stride + column, is_entry)
    OF_DECAYS: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [1, 0])
    position = begin + gl.arange(0, RING, layout=gl.SliceLayout(1, OF_DECAYS))[:, None]
    is_entry = (position >= first) & (position < end)
    _copy(staged.ring_decays, steps + HEADS + position % CAPACITY * ring.steps_stride, is_entry)
    async_copy.commit_group()
    await_staged(0)


@gluon.jit
def load_entry(staged, index, PAIRS: gl.constexpr, SUMS: gl.constexpr):
    """Load a staged ring entry: key (in pairs), corrected values and log decay."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)
    values, decay = staged.ring_values.index(index).load(COLUMNS), staged.ring_decays.index(index).load(COLUMNS)
    return staged.ring_keys.index(index).load(PAIRS), values, decay


@gluon.jit
def stage_tokens(staged, keys, k_stride, queries, q_stride, values, v_stride, first, count, WIDTH: gl.constexpr):
    """Start to copy keys, queries and values of the step's tokens from `first` on, as pairs of bf16 numbers."""
    LANES: gl.constexpr = staged.keys.shape[1]
    RUN: gl.constexpr = staged.keys.shape[2]
    token, pair = _run_offsets(first, STAGED, LANES, RUN)
    _copy(staged.keys, keys + token * k_stride + pair, token < count)
    _copy(staged.queries, queries + token * q_stride + pair, token < count)
    OF_VALUES: gl.constexpr = gl.BlockedLayout([1, 4], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    token = first + gl.arange(0, STAGED, layout=gl.SliceLayout(1, OF_VALUES))[:, None]
    pair = gl.arange(0, WIDTH // 2, layout=gl.SliceLayout(0, OF_VALUES))[None, :]
    _copy(staged.values, values + token * v_stride + pair, token < count)
    async_copy.commit_group()


@gluon.jit
def stage_factors(staged, scalars, inputs, first, count, HEADS: gl.constexpr):
    """Start to copy the factors of the step's tokens from `first` on, for one head."""
    LANES: gl.constexpr = staged.inputs.shape[1]
    KEPT: gl.constexpr = staged.inputs.shape[2]
    RING: gl.constexpr = LANES * KEPT
    VECTOR: gl.constexpr = min(KEPT, 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, VECTOR], [max(1, 16 * VECTOR // RING), 2, LANES, KEPT // VECTOR], [1, 1, 1, 1], [3, 2, 1, 0]
    )
    token = (
        first
        + gl.arange(0, STAGED, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[
            :, None, None, None
        ]
    )
    of_y = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[None, :, None, None]
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    index = gl.arange(0, KEPT, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = of_y * RING + lane[None, None, :, None] * KEPT + index[None, None, None, :]
    _copy(staged.inputs, inputs + token * (HEADS * 2 * RING) + offsets, token < count)
    OF_SCALARS: gl.constexpr = gl.BlockedLayout([1, SCALARS], [STAGED, 32 // STAGED], [1, 1], [1, 0])
    token = first + gl.arange(0, STAGED, layout=gl.SliceLayout(1, OF_SCALARS))[:, None]
    index = gl.arange(0, SCALARS, layout=gl.SliceLayout(0, OF_SCALARS))[None, :]
    _copy(staged.scalars, scalars + token * (HEADS * SCALARS) + index, token < count)
    async_copy.commit_group()


@gluon.jit
def restage(
    staged, keys, k_stride, queries, q_stride, values, v_stride, scalars, inputs, first, count,
    HEADS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Copy the step's tokens from `first` on and their factors over the tokens before, and wait for them."""
    sync_lanes()
    stage_tokens(staged, keys, k_stride, queries, q_stride, values, v_stride, first, count, WIDTH)
    stage_factors(staged, scalars, inputs, first, count, HEADS)
    await_staged(0)


@gluon.jit
def load_keys(staged, t, PAIRS: gl.constexpr):
    """Load the key and the query of a staged token."""
    index = t % STAGED
    return staged.keys.index(index).load(PAIRS), staged.queries.index(index).load(PAIRS)


@gluon.jit
def load_factors(staged, t, WIDTH: gl.constexpr, SUMS: gl.constexpr, FACTORS: gl.constexpr):
    """Load a staged token's value and its factors, in the order of `ReplayFactors`."""
    index = t % STAGED
    v = reinterpret(staged.values.index(index), gl.bfloat16, [WIDTH], _plain_layout(1)).load(gl.SliceLayout(0, SUMS))
    scalars, inputs = staged.scalars.index(index), staged.inputs
    ONE: gl.constexpr = gl.SliceLayout(0, SUMS)
    of_value, of_held = scalars.slice(0, 1).load(ONE), scalars.slice(1, 1).load(ONE)
    of_asked = scalars.slice(2, 1).load(ONE)
    of_keys, of_queries = inputs.index(2 * index).load(FACTORS), inputs.index(2 * index + 1).load(FACTORS)
    return v, of_value, of_held, of_asked, of_keys, of_queries
