"""The SSD scan on Hopper GPUs, in Gluon: copies, matrix products and element-wise work overlap. bf16 tokens.

The arithmetic of `ssd_scan_portable`, tile by tile. A program takes one head of a row, or two of one group that share
the tiles of B and C; each head has four warps of its own. One more warp runs ahead of them and fills a ring of tiles
by TMA. Of a tile that reaches beyond its row it clears what is not the row's before anybody sees it: a product with
a neighbour's NaN would be NaN, whatever its weight. The scores of a tile are begun while the one before it finishes.

A row's bits do not depend on how many heads a program takes nor on how its channels are split.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from .hopper_tiling import HopperTiling
from .ssd_tiles import TILE_LEN, ScanTiles
from .ssm_inputs import SSMTokens
from .varlen_rows import VarlenRows

_COMPUTE_REGISTERS = 240
_COPY_REGISTERS = 40


class _Rows(NamedTuple):
    """The kernel's view of `VarlenRows`."""

    cu_rows: Tensor
    cu_chunks: Tensor
    cu_row_chunks: Tensor
    longest_first: Tensor
    initial_slots: Tensor
    final_slots: Tensor


@aggregate
class _Sizes:
    """What is known when the kernel is compiled."""

    HEADS: gl.constexpr
    GROUPS: gl.constexpr
    HEAD_DIM: gl.constexpr
    CHANNELS: gl.constexpr
    D_STATE: gl.constexpr
    LENGTH: gl.constexpr
    STAGES: gl.constexpr
    TOGETHER: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEADS, GROUPS, HEAD_DIM, CHANNELS, D_STATE, LENGTH, STAGES, TOGETHER):
        self.HEADS = gl.constexpr(HEADS)
        self.GROUPS = gl.constexpr(GROUPS)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.CHANNELS = gl.constexpr(CHANNELS)
        self.D_STATE = gl.constexpr(D_STATE)
        self.LENGTH = gl.constexpr(LENGTH)
        self.STAGES = gl.constexpr(STAGES)
        self.TOGETHER = gl.constexpr(TOGETHER)


@aggregate
class _Packed:
    """Descriptors of packed tokens, and of what they decay by."""

    x: tma.tensor_descriptor
    B: tma.tensor_descriptor
    C: tma.tensor_descriptor
    y: tma.tensor_descriptor
    decays: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, x, B, C, y, decays):
        self.x = x
        self.B = B
        self.C = C
        self.y = y
        self.decays = decays


@aggregate
class _Ring:
    """Tiles in shared memory, with the barriers that say when one is full and when it may be overwritten."""

    C: gl.shared_memory_descriptor
    B: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    decays: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, C, B, x, decays, full, empty):
        self.C = C
        self.B = B
        self.x = x
        self.decays = decays
        self.full = full
        self.empty = empty


@aggregate
class _Span:
    """Where a row's tiles lie: packed tokens low to high, cut from `begin` on; the number of the first, and how many."""

    low: gl.tensor
    high: gl.tensor
    begin: gl.tensor
    first: gl.tensor
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, low, high, begin, first, count):
        self.low = low
        self.high = high
        self.begin = begin
        self.first = first
        self.count = count


@gluon.jit
def _clear_outside(tile, begin, low, high, WIDTH: gl.constexpr):
    """Clear the tokens of a tile in shared memory that are not the row's, eight at a time."""
    LENGTH: gl.constexpr = tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    for i in gl.static_range(LENGTH // 8):
        token = begin + i * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
        inside = (token >= low) & (token < high)
        part = tile.slice(i * 8, 8, 0)
        values = part.load(layout)
        part.store(gl.where(inside[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _fill(packed, ring, stage, barrier, token, tile, head, channel, num_tiles, sizes):
    """Begin to copy a tile into the ring."""
    TILE_BYTES: gl.constexpr = 4 * sizes.LENGTH * sizes.D_STATE
    HEAD_BYTES: gl.constexpr = 2 * sizes.LENGTH * sizes.CHANNELS + 8 * sizes.LENGTH
    mbarrier.expect(barrier, TILE_BYTES + sizes.TOGETHER * HEAD_BYTES)
    group_dim = head // (sizes.HEADS // sizes.GROUPS) * sizes.D_STATE
    tma.async_copy_global_to_shared(packed.C, [token, group_dim], barrier, ring.C.index(stage))
    tma.async_copy_global_to_shared(packed.B, [token, group_dim], barrier, ring.B.index(stage))
    for part in gl.static_range(sizes.TOGETHER):
        place = stage * sizes.TOGETHER + part
        x_channel = (head + part) * sizes.HEAD_DIM + channel
        tma.async_copy_global_to_shared(packed.x, [token, x_channel], barrier, ring.x.index(place))
        decay_row = ((head + part) * num_tiles + tile) * 2
        tma.async_copy_global_to_shared(packed.decays, [decay_row, 0], barrier, ring.decays.index(2 * place))
        tma.async_copy_global_to_shared(packed.decays, [decay_row + 1, 0], barrier, ring.decays.index(2 * place + 1))


@gluon.jit
def _copy_ahead(packed, ring, clearing, span, head, channel, num_tiles, sizes):
    """Fill the ring with a row's tiles, one warp."""
    clear_phase = 0
    for k in range(span.count):
        stage = k % sizes.STAGES
        token = span.begin + k * sizes.LENGTH
        mbarrier.wait(ring.empty.index(stage), (k // sizes.STAGES & 1) ^ 1)
        if (token >= span.low) & (token + sizes.LENGTH <= span.high):
            _fill(packed, ring, stage, ring.full.index(stage), token, span.first + k, head, channel, num_tiles, sizes)
        else:
            _fill(packed, ring, stage, clearing, token, span.first + k, head, channel, num_tiles, sizes)
            mbarrier.wait(clearing, clear_phase)
            clear_phase ^= 1
            _clear_outside(ring.B.index(stage), token, span.low, span.high, sizes.D_STATE)
            for part in gl.static_range(sizes.TOGETHER):
                x_tile = ring.x.index(stage * sizes.TOGETHER + part)
                _clear_outside(x_tile, token, span.low, span.high, sizes.CHANNELS)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _scan_head(
    packed, states, ring, weighted, state_copy, y_copy, span, y, D, decays, tile_slots, pool, slot_stride, initial, final,
    head, channel, num_tiles, sizes, PART: gl.constexpr, POOL_BF16: gl.constexpr,
):  # fmt: skip
    """Scan some channels of a head of a row, four warps."""
    LENGTH: gl.constexpr = sizes.LENGTH
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LENGTH, 16])  # [LENGTH, LENGTH]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.CHANNELS, 16])  # outputs, and the state
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // sizes.CHANNELS, sizes.CHANNELS // 8], [4, 1], [1, 0])
    target = gl.arange(0, LENGTH, layout=gl.SliceLayout(1, SCORES))
    source = gl.arange(0, LENGTH, layout=gl.SliceLayout(0, SCORES))
    in_tile = gl.arange(0, LENGTH, layout=gl.SliceLayout(1, OUT))
    dim = gl.arange(0, sizes.D_STATE, layout=gl.SliceLayout(1, OUT))
    lane = gl.arange(0, sizes.CHANNELS, layout=gl.SliceLayout(0, OUT))
    no_scores = gl.zeros([LENGTH, LENGTH], gl.float32, layout=SCORES)
    no_outputs = gl.zeros([LENGTH, sizes.CHANNELS], gl.float32, layout=OUT)

    states_of_head = pool + (head * sizes.D_STATE + dim)[:, None] * sizes.HEAD_DIM + (channel + lane)[None, :]
    state = gl.zeros([sizes.D_STATE, sizes.CHANNELS], gl.float32, layout=OUT)
    if initial >= 0:
        state = gl.load(states_of_head + initial.to(gl.int64) * slot_stride).to(gl.float32)
    state_copy.store(state.to(gl.bfloat16))
    fence_async_shared()
    skip = gl.load(D + head).to(gl.float32)
    totals = decays + (head.to(gl.int64) * num_tiles + span.first) * (2 * LENGTH) + LENGTH - 1
    last = gl.maximum(span.count - 1, 0)
    total = gl.load(totals, mask=span.count > 0, other=0.0)
    scores = no_scores
    if span.count > 0:
        mbarrier.wait(ring.full.index(0), 0)
        begun = warpgroup_mma(ring.C.index(0), ring.B.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[begun])

    for k in range(span.count):
        stage = k % sizes.STAGES
        token = span.begin + k * LENGTH
        x = ring.x.index(stage * sizes.TOGETHER + PART)
        B = ring.B.index(stage)
        decays_of_tile = ring.decays.index(2 * (stage * sizes.TOGETHER + PART)).reshape([LENGTH])
        gains_of_tile = ring.decays.index(2 * (stage * sizes.TOGETHER + PART) + 1).reshape([LENGTH])
        next_total = gl.load(totals + gl.minimum(k + 1, last) * (2 * LENGTH))
        slot = gl.load(tile_slots + span.first + k)

        y_tile = warpgroup_mma(ring.C.index(stage), state_copy, no_outputs, use_acc=False, is_async=True)
        gain = gains_of_tile.load(gl.SliceLayout(1, FLAT))
        scaled = x.load(FLAT).to(gl.float32) * gl.exp2(total + gain)[:, None]
        weighted.store(scaled.to(gl.bfloat16))
        fence_async_shared()
        state = state * gl.exp2(total)
        state = warpgroup_mma(B.permute((1, 0)), weighted, state, is_async=True)

        decay = decays_of_tile.load(gl.SliceLayout(1, SCORES))
        gain = gains_of_tile.load(gl.SliceLayout(0, SCORES))
        exponent = gl.where(target[:, None] >= source[None, :], decay[:, None] + gain[None, :], float("-inf"))
        shares = gl.convert_layout((scores * gl.exp2(exponent)).to(gl.bfloat16), OPERAND)
        decay = decays_of_tile.load(gl.SliceLayout(1, OUT))
        skipped = x.load(OUT).to(gl.float32) * skip
        y_tile = warpgroup_mma_wait(1, deps=[y_tile])
        y_tile = y_tile * gl.exp2(decay)[:, None] + skipped
        y_tile = warpgroup_mma(shares, x, y_tile, is_async=True)

        following = (k + 1) % sizes.STAGES
        if k + 1 < span.count:
            mbarrier.wait(ring.full.index(following), (k + 1) // sizes.STAGES & 1)
        begun = warpgroup_mma(
            ring.C.index(following), ring.B.index(following).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        state = warpgroup_mma_wait(2, deps=[state])
        tma.store_wait(0)
        state_copy.store(state.to(gl.bfloat16))
        y_tile, shares = warpgroup_mma_wait(1, deps=[y_tile, shares])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        outputs = y_tile.to(gl.bfloat16)
        is_whole = (token >= span.low) & (token + LENGTH <= span.high)
        if is_whole:
            y_copy.store(outputs)
        fence_async_shared()
        if is_whole:
            tma.async_copy_shared_to_global(packed.y, [token, head * sizes.HEAD_DIM + channel], y_copy)
        else:
            t = token + in_tile
            place = (
                y
                + t[:, None].to(gl.int64) * (sizes.HEADS * sizes.HEAD_DIM)
                + (head * sizes.HEAD_DIM + channel + lane)[None, :]
            )
            gl.store(place, outputs, mask=((t >= span.low) & (t < span.high))[:, None])
        if slot >= 0:
            if POOL_BF16:
                row_of_state = (slot * sizes.HEADS + head) * sizes.D_STATE
                tma.async_copy_shared_to_global(states, [row_of_state, channel], state_copy)
            else:
                gl.store(states_of_head + slot.to(gl.int64) * slot_stride, state.to(pool.dtype.element_ty))
        total = next_total
        scores = warpgroup_mma_wait(0, deps=[begun])
    tma.store_wait(0)
    if final >= 0:
        gl.store(states_of_head + final.to(gl.int64) * slot_stride, state.to(pool.dtype.element_ty))


@gluon.jit
def _find_span(rows, row, LENGTH: gl.constexpr, PER_CHUNK: gl.constexpr):
    """Return where the row's tiles lie: see `ssd_tiles`."""
    low = gl.load(rows.cu_rows + row)
    high = gl.load(rows.cu_rows + row + 1)
    first_chunk = gl.load(rows.cu_row_chunks + row)
    num_chunks = gl.load(rows.cu_row_chunks + row + 1) - first_chunk
    first_end = gl.load(rows.cu_chunks + first_chunk + 1, mask=num_chunks > 0, other=0)
    in_first = (first_end - low + LENGTH - 1) // LENGTH
    begin = gl.where(num_chunks > 1, first_end - in_first * LENGTH, low)
    return _Span(low, high, begin, (first_chunk + 1) * PER_CHUNK - in_first, (high - begin + LENGTH - 1) // LENGTH)


@gluon.jit(do_not_specialize=["num_tiles"])
def _scan_kernel(
    x_tiles,
    B_tiles,
    C_tiles,
    y_tiles,
    decay_tiles,
    states,
    rows,
    y,
    D,
    decays,
    tile_slots,
    pool,
    slot_stride,
    num_tiles,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CHANNELS: gl.constexpr,
    D_STATE: gl.constexpr,
    LENGTH: gl.constexpr,
    PER_CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    packed = _Packed(x_tiles, B_tiles, C_tiles, y_tiles, decay_tiles)
    sizes = _Sizes(HEADS, GROUPS, HEAD_DIM, CHANNELS, D_STATE, LENGTH, STAGES, TOGETHER)
    SPLITS: gl.constexpr = HEAD_DIM // CHANNELS
    PER_ROW: gl.constexpr = HEADS // TOGETHER * SPLITS
    POOL_BF16: gl.constexpr = pool.dtype.element_ty == gl.bfloat16
    row = gl.load(rows.longest_first + gl.program_id(0) // PER_ROW)
    head = gl.program_id(0) % PER_ROW // SPLITS * TOGETHER
    channel = gl.program_id(0) % SPLITS * CHANNELS
    initial = gl.load(rows.initial_slots + row)
    final = gl.load(rows.final_slots + row)
    span = _find_span(rows, row, LENGTH, PER_CHUNK)

    ring = _Ring(
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, LENGTH, D_STATE], packed.C.layout),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, LENGTH, D_STATE], packed.B.layout),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * TOGETHER, LENGTH, CHANNELS], packed.x.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES * TOGETHER * 2, 1, LENGTH], packed.decays.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    clearing = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weighted = gl.allocate_shared_memory(gl.bfloat16, [TOGETHER, LENGTH, CHANNELS], packed.x.layout)
    state_copy = gl.allocate_shared_memory(gl.bfloat16, [TOGETHER, D_STATE, CHANNELS], packed.x.layout)
    y_copy = gl.allocate_shared_memory(gl.bfloat16, [TOGETHER, LENGTH, CHANNELS], packed.y.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.empty.index(i), count=TOGETHER)
    mbarrier.init(clearing, count=1)
    fence_async_shared()

    copying = (packed, ring, clearing, span, head, channel, num_tiles, sizes)
    if TOGETHER == 1:
        gl.warp_specialize(
            [
                (_scan_head, (packed, states, ring, weighted.index(0), state_copy.index(0), y_copy.index(0), span, y, D,
                              decays, tile_slots, pool, slot_stride, initial, final, head, channel, num_tiles, sizes, 0, POOL_BF16)),
                (_copy_ahead, copying),
            ],
            [1],
            [COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_scan_head, (packed, states, ring, weighted.index(0), state_copy.index(0), y_copy.index(0), span, y, D,
                              decays, tile_slots, pool, slot_stride, initial, final, head, channel, num_tiles, sizes, 0, POOL_BF16)),
                (_scan_head, (packed, states, ring, weighted.index(1), state_copy.index(1), y_copy.index(1), span, y, D,
                              decays, tile_slots, pool, slot_stride, initial, final, head + 1, channel, num_tiles, sizes, 1, POOL_BF16)),
                (_copy_ahead, copying),
            ],
            [4, 1],
            [COMPUTE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip


def scan_on_hopper(
    tokens: SSMTokens,
    D: Tensor,
    ssm_pool: Tensor,
    rows: VarlenRows,
    tiles: ScanTiles,
    y: Tensor,
    tiling: HopperTiling,
) -> None:
    """Scan the rows from and to the pool's slots; write the outputs of the rows' tokens into `y`, in place.

    Args:
        tokens: bf16; head_dim and d_state are powers of two from 64 to 128.
        ssm_pool: Contiguous.
        tiles: Full ones are as wide as long.
        y: [tokens, heads, head_dim], contiguous.
    """
    num_heads, head_dim = tokens.x.shape[1:]
    num_groups, d_state = tokens.B.shape[1:]
    x, B, C = (t.flatten(1) for t in (tokens.x, tokens.B, tokens.C))
    states = ssm_pool.view(-1, head_dim)
    state_block = [d_state, tiling.channels] if ssm_pool.dtype == torch.bfloat16 else None
    programs = rows.longest_first.shape[0] * (num_heads // tiling.heads) * (head_dim // tiling.channels)
    _scan_kernel[(programs,)](
        x_tiles=_described(x, [TILE_LEN, tiling.channels]),
        B_tiles=_described(B, [TILE_LEN, d_state]),
        C_tiles=_described(C, [TILE_LEN, d_state]),
        y_tiles=_described(y.flatten(1), [TILE_LEN, tiling.channels]),
        decay_tiles=TensorDescriptor.from_tensor(
            tiles.decays.view(-1, TILE_LEN), [1, TILE_LEN], gl.NVMMASharedLayout(0, 32, 2)
        ),
        states=_described(states, state_block) if state_block else None,
        rows=_Rows(
            rows.cu_rows,
            rows.cu_chunks,
            rows.cu_row_chunks,
            rows.longest_first,
            rows.initial_slots,
            rows.final_slots,
        ),
        y=y,
        D=D,
        decays=tiles.decays,
        tile_slots=tiles.slots,
        pool=ssm_pool,
        slot_stride=ssm_pool.stride(0),
        num_tiles=tiles.slots.shape[0],
        HEADS=num_heads,
        GROUPS=num_groups,
        HEAD_DIM=head_dim,
        CHANNELS=tiling.channels,
        D_STATE=d_state,
        LENGTH=TILE_LEN,
        PER_CHUNK=tiles.shape.per_chunk,
        STAGES=tiling.num_stages,
        TOGETHER=tiling.heads,
        COMPUTE_REGISTERS=_COMPUTE_REGISTERS,
        COPY_REGISTERS=_COPY_REGISTERS,
        num_warps=4,
    )


def _described(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))
