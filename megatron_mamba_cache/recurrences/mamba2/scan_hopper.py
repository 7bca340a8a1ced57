"""SSD scan on Hopper GPUs for bf16 tokens, in Gluon; copies, matmuls and element-wise operations overlap.

Results are bit-identical to `scan_portable`. A program scans one head of a request, or two heads of a group, which
share the tiles of B and C. Four warps scan a head; another warp fills the pipeline stages. The scores of a tile do not
depend on the state, so their matmul starts before the previous tile is finished.
"""

from functools import cache
from typing import Any

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

from ..hopper_tiles import find_span, put_quantized
from ..request_tiles import TILE_LEN
from ..stochastic_rounding import cast_scanned, round_boundary
from .hopper_pipeline import (
    PackedTiles,
    Results,
    Scratch,
    Sizes,
    allocate_pipeline,
    await_scratch,
    fill,
    put_outputs,
    put_state,
)
from .inputs import SSMTokens
from .tiles import HeadSlice, HopperTiling, ScanTiles

_SCAN_REGISTERS = 240
_FILL_REGISTERS = 40


@gluon.jit
def _scan_head(
    pipeline, scratch, results, quantized, rounding, computed, span, totals, tile_slots, skip, initial, final, head,
    channel, sizes,
    PART: gl.constexpr,
):  # fmt: skip
    """Scan some channels of one head of a request, on four warps.

    Long because it interleaves asynchronous matmuls with the waits for their results.
    """
    LENGTH: gl.constexpr = sizes.LENGTH
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.CHANNELS, 16])  # for y and states
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LENGTH, 16])  # [LENGTH, LENGTH]
    no_scores = gl.zeros([LENGTH, LENGTH], gl.float32, layout=SCORES)
    no_outputs = gl.zeros([LENGTH, sizes.CHANNELS], gl.float32, layout=OUT)

    dim = gl.arange(0, sizes.D_STATE, layout=gl.SliceLayout(1, OUT))
    lane = gl.arange(0, sizes.CHANNELS, layout=gl.SliceLayout(0, OUT))
    states = results.pool + (head * sizes.D_STATE + dim)[:, None] * sizes.HEAD_DIM + (channel + lane)[None, :]
    origin = computed - span.low  # position of packed token 0
    in_states, column = head * sizes.D_STATE + dim[:, None], channel + lane[None, :]
    state = gl.zeros([sizes.D_STATE, sizes.CHANNELS], gl.float32, layout=OUT)
    if initial >= 0:
        state = gl.load(states + initial.to(gl.int64) * results.slot_stride).to(gl.float32)
    scratch.state.store(state.to(gl.bfloat16))
    fence_async_shared()
    total = gl.load(totals, mask=span.count > 0, other=0.0)
    scores = no_scores
    kept = initial * 0 - 1  # -1: no state of the previous tile is in flight
    if span.count > 0:
        mbarrier.wait(pipeline.full.index(0), 0)
        begun = warpgroup_mma(
            pipeline.C.index(0), pipeline.B.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[begun])

    for k in range(span.count):
        stage = k % sizes.STAGES
        x = pipeline.x.index(stage * sizes.TOGETHER + PART)
        decays = pipeline.decays.index(2 * (stage * sizes.TOGETHER + PART)).reshape([LENGTH])
        gains = pipeline.decays.index(2 * (stage * sizes.TOGETHER + PART) + 1).reshape([LENGTH])
        next_total = gl.load(totals + gl.minimum(k + 1, span.count - 1) * (2 * LENGTH))
        slot = gl.load(tile_slots + k)

        y = warpgroup_mma(pipeline.C.index(stage), scratch.state, no_outputs, use_acc=False, is_async=True)
        _weigh(x, gains, total, scratch.weighted)
        state = state * gl.exp2(total)
        state = warpgroup_mma(pipeline.B.index(stage).permute((1, 0)), scratch.weighted, state, is_async=True)

        shares = _share(scores, decays, gains, gl.DotOperandLayout(0, OUT, 2))
        skipped = x.load(OUT).to(gl.float32) * skip
        decay = decays.load(gl.SliceLayout(1, OUT))
        y = warpgroup_mma_wait(1, deps=[y])
        y = gl.fma(y, gl.exp2(decay)[:, None], skipped)
        y = warpgroup_mma(shares, x, y, is_async=True)

        following = (k + 1) % sizes.STAGES
        if k + 1 < span.count:
            mbarrier.wait(pipeline.full.index(following), (k + 1) // sizes.STAGES & 1)
        begun = warpgroup_mma(
            pipeline.C.index(following),
            pipeline.B.index(following).permute((1, 0)),
            no_scores,
            use_acc=False,
            is_async=True,
        )
        state = warpgroup_mma_wait(2, deps=[state])
        end = origin + gl.minimum(span.begin + (k + 1) * LENGTH, span.high)
        state = round_boundary(state, results.pool.dtype.element_ty, rounding, end, in_states, column)
        await_scratch(results, kept)
        scratch.state.store(state.to(gl.bfloat16))
        y, shares = warpgroup_mma_wait(1, deps=[y, shares])
        mbarrier.arrive(pipeline.empty.index(stage), count=1)
        put_outputs(results, scratch.y, y.to(gl.bfloat16), span, span.begin + k * LENGTH, head, channel, sizes)
        if quantized is None:
            if slot >= 0:
                put_state(results, scratch, state, kept, slot, rounding, end, in_states, column, head, channel, sizes)
            kept = slot
        elif slot >= 0:
            put_quantized(quantized, state, slot, head, channel, sizes.HEAD_DIM)
        total = next_total
        scores = warpgroup_mma_wait(0, deps=[begun])
    tma.store_wait(0)
    if final >= 0:
        stored = cast_scanned(state, results.pool.dtype.element_ty, rounding, origin + span.high, in_states, column)
        gl.store(states + final.to(gl.int64) * results.slot_stride, stored)


@gluon.jit
def _weigh(x, gains, total, weighted):
    """Multiply the inputs of a tile by their weights in the state after the tile; store them in shared memory."""
    CHANNELS: gl.constexpr = x.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // CHANNELS, CHANNELS // 8], [4, 1], [1, 0])
    gain = gains.load(gl.SliceLayout(1, FLAT))
    weighted.store((x.load(FLAT).to(gl.float32) * gl.exp2(total + gain)[:, None]).to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def _share(scores, decays, gains, OPERAND: gl.constexpr):
    """Return the weight of each earlier input in each token's output, as a bf16 matmul operand."""
    SCORES: gl.constexpr = scores.type.layout
    LENGTH: gl.constexpr = scores.shape[0]
    target = gl.arange(0, LENGTH, layout=gl.SliceLayout(1, SCORES))
    source = gl.arange(0, LENGTH, layout=gl.SliceLayout(0, SCORES))
    decay = decays.load(gl.SliceLayout(1, SCORES))
    gain = gains.load(gl.SliceLayout(0, SCORES))
    exponent = gl.where(target[:, None] >= source[None, :], decay[:, None] + gain[None, :], float("-inf"))
    return gl.convert_layout((scores * gl.exp2(exponent)).to(gl.bfloat16), OPERAND)


@gluon.jit(do_not_specialize=["num_tiles"])
def _scan_kernel(
    x_tiles, B_tiles, C_tiles, y_tiles, decay_tiles, pool_states, rows, y, D, decays, tile_slots, pool, slot_stride,
    quantized, rounding, num_tiles,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, HEAD_DIM: gl.constexpr, FIRST: gl.constexpr, SPLITS: gl.constexpr,
    D_STATE: gl.constexpr, CHANNELS: gl.constexpr, TOGETHER: gl.constexpr, LENGTH: gl.constexpr, STAGES: gl.constexpr,
    PER_CHUNK: gl.constexpr, SCAN_REGISTERS: gl.constexpr, FILL_REGISTERS: gl.constexpr,
):  # fmt: skip
    sizes = Sizes(HEADS, GROUPS, HEAD_DIM, D_STATE, CHANNELS, TOGETHER, LENGTH, STAGES)
    PER_ROW: gl.constexpr = HEADS // TOGETHER * SPLITS
    row = gl.load(rows.longest_first + gl.program_id(0) // PER_ROW)
    head = gl.program_id(0) % PER_ROW // SPLITS * TOGETHER
    channel = FIRST + gl.program_id(0) % SPLITS * CHANNELS
    initial, final = gl.load(rows.initial_slots + row), gl.load(rows.final_slots + row)
    span = find_span(rows, row, LENGTH, PER_CHUNK)

    tiles = PackedTiles(x_tiles, B_tiles, C_tiles, decay_tiles)
    results = Results(y, y_tiles, pool, pool_states, slot_stride)
    pipeline = allocate_pipeline(tiles, sizes)
    weighted = gl.allocate_shared_memory(gl.bfloat16, [TOGETHER, LENGTH, CHANNELS], x_tiles.layout)
    state = gl.allocate_shared_memory(gl.bfloat16, [TOGETHER, D_STATE, CHANNELS], x_tiles.layout)
    y_copy = gl.allocate_shared_memory(gl.bfloat16, [TOGETHER, LENGTH, CHANNELS], y_tiles.layout)
    leaving = state
    if pool.dtype.element_ty != gl.bfloat16 and quantized is None:
        leaving = gl.allocate_shared_memory(pool.dtype.element_ty, [TOGETHER, D_STATE, CHANNELS], pool_states.layout)

    slots = tile_slots + span.first
    totals = decays + (head.to(gl.int64) * num_tiles + span.first) * (2 * LENGTH) + LENGTH - 1
    scratch = Scratch(weighted.index(0), state.index(0), leaving.index(0), y_copy.index(0))
    skip = gl.load(D + head).to(gl.float32)
    computed = 0
    if rounding is not None:
        computed = gl.load(rounding.computed + row)
    first = (
        pipeline, scratch, results, quantized, rounding, computed, span, totals, slots, skip, initial, final,
        head, channel, sizes, 0,
    )  # fmt: skip
    filling = (tiles, pipeline, span, head, channel, num_tiles, sizes)
    if TOGETHER == 1:
        gl.warp_specialize([(_scan_head, first), (fill, filling)], [1], [FILL_REGISTERS])
    else:
        totals += num_tiles.to(gl.int64) * (2 * LENGTH)
        scratch = Scratch(weighted.index(1), state.index(1), leaving.index(1), y_copy.index(1))
        skip = gl.load(D + head + 1).to(gl.float32)
        second = (
            pipeline, scratch, results, quantized, rounding, computed, span, totals, slots, skip, initial, final,
            head + 1, channel, sizes, 1,
        )  # fmt: skip
        gl.warp_specialize(
            [(_scan_head, first), (_scan_head, second), (fill, filling)], [4, 1], [SCAN_REGISTERS, FILL_REGISTERS]
        )


def scan_on_hopper(
    tokens: SSMTokens, tiles: ScanTiles, channels: HeadSlice, tiling: HopperTiling, arguments: dict[str, Any]
) -> None:
    """Scan a slice of channels of all requests; write outputs to `tiles.y` and states to their slots, in place.

    Args:
        tokens: bf16; head_dim is a multiple of 16, d_state is a power of two, and both are between 64 and 128.
        tiles: The tile length must equal the tile width.
        arguments: Arguments shared with the portable kernel. Slots must be aligned to 16 bytes, and their stride must
            be a multiple of head_dim elements.
    """
    num_rows, d_state = arguments["rows"].longest_first.shape[0], arguments["D_STATE"]
    splits = channels.width // tiling.channels
    _scan_kernel[(num_rows * (arguments["HEADS"] // tiling.heads) * splits,)](
        x_tiles=_described(tokens.x.flatten(1), [TILE_LEN, tiling.channels]),
        B_tiles=_described(tokens.B.flatten(1), [TILE_LEN, d_state]),
        C_tiles=_described(tokens.C.flatten(1), [TILE_LEN, d_state]),
        y_tiles=_described(tiles.y.flatten(1), [TILE_LEN, tiling.channels]),
        decay_tiles=_described(tiles.decays.view(-1, TILE_LEN), [1, TILE_LEN]),
        pool_states=_described(_rows_of(arguments["pool"]), [d_state, tiling.channels]),
        **arguments,
        y=tiles.y,
        FIRST=channels.first,
        SPLITS=splits,
        CHANNELS=tiling.channels,
        TOGETHER=tiling.heads,
        STAGES=tiling.num_stages,
        SCAN_REGISTERS=_SCAN_REGISTERS,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _rows_of(ssm_pool: Tensor) -> Tensor:
    """View a pool, including gaps between slots, as a matrix with head_dim columns."""
    num_slots, num_heads, d_state, head_dim = ssm_pool.shape
    num_rows = (num_slots - 1) * (ssm_pool.stride(0) // head_dim) + num_heads * d_state
    return ssm_pool.as_strided((num_rows, head_dim), (head_dim, 1))


def _described(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    """Return the TMA descriptor for a matrix that is read or written in blocks of this size."""
    return TensorDescriptor.from_tensor(matrix, block, _layout(tuple(block), matrix.dtype))


@cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a block; cached because constructing it is slow."""
    if block[0] == 1:
        return gl.NVMMASharedLayout(0, 32, 2)  # vectors need no swizzling
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))
