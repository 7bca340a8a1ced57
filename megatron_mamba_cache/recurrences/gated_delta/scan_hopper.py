"""Scan kernel for the gated delta rule on Hopper GPUs for bf16 tokens, in Gluon; see `tile_updates` for the terms.

A program scans 64 channels of one head of a request on four warps, or 128 channels on two groups of four warps. Each
group keeps its channels of the state in registers, transposed and in float32, as `scan_portable` does. Other warps fill
the pipeline; see `hopper_pipeline`. Matmuls are asynchronous: outputs are computed while the state's next tile begins.

Outputs are sums of the values that a tile writes, which cancel if its keys are alike: the rounding errors of bf16 would
add up. So this matmul uses fp16, which is more accurate; written values must not exceed its largest number, 65504.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...kernels.gluon_common import await_launcher
from ...kernels.kernel_launches import num_multiprocessors
from ...kernels.overlap import overlapping
from ..batches import PrefillBatch
from ..hopper_tiles import find_span
from ..quantized_states import QuantizedStates, quantized_pointers
from ..request_tiles import TILE_LEN, tiled_view
from .hopper_pipeline import (
    CHANNELS,
    PackedTiles,
    Results,
    Sizes,
    allocate_pipeline,
    fill,
    put_outputs,
    put_state,
    score,
)
from .inputs import DeltaTokens
from .tile_systems import TileSystems
from .tile_systems_hopper import BETA, LEFT, NUM_FACTORS, REACH, READ

_FACTORS = gl.constexpr(NUM_FACTORS)


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """Tile sizes of the Hopper scan kernel; they do not affect the result.

    Args:
        parts: Number of groups of 64 channels per program, 1 or 2.
        num_stages: Number of tiles whose inputs are in shared memory at a time.
        registers: Registers per thread of the warps that carry the state, and of those that load.
    """

    parts: int
    num_stages: int
    registers: tuple[int, int]


NARROW = HopperTiling(1, num_stages=3, registers=(240, 24))
WIDE = HopperTiling(2, num_stages=3, registers=(208, 24))


def choose_tiling(tokens: DeltaTokens, num_rows: int) -> HopperTiling:
    """Return the fastest tiling: few requests use more multiprocessors if each program has fewer channels."""
    num_heads, value_dim = tokens.v.shape[1:]
    num_narrow = num_rows * num_heads * (value_dim // CHANNELS.value)
    is_wide = num_narrow > num_multiprocessors(tokens.v.device) and value_dim % (2 * CHANNELS.value) == 0
    return WIDE if is_wide else NARROW


@gluon.jit
def _carry(
    pipeline, y_copy, results, quantized, span, kept, tile_slots, initial, final, head, first_channel, sizes,
    PART: gl.constexpr,
):  # fmt: skip
    """Scan 64 channels of one head of a request, on four warps.

    Long because it interleaves asynchronous matmuls with the waits for their results.
    """
    L: gl.constexpr = sizes.LENGTH
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])  # [CHANNELS, LENGTH]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.KEY_DIM, 16])  # [CHANNELS, KEY_DIM]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    TOKENS: gl.constexpr = gl.SliceLayout(0, OUT)
    # With two groups of warps, one computes while the other waits, and registers are scarce.
    PENDING: gl.constexpr = 2 - sizes.PARTS
    zeros = gl.zeros([CHANNELS, L], gl.float32, layout=OUT)

    channel = first_channel + PART * CHANNELS
    dim = gl.arange(0, sizes.KEY_DIM, layout=gl.SliceLayout(0, STATE))
    lane = gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, STATE))
    offsets = dim[None, :] * sizes.VALUE_DIM + lane[:, None]
    states = results.pool + head * (sizes.KEY_DIM * sizes.VALUE_DIM) + channel
    state = gl.zeros([CHANNELS, sizes.KEY_DIM], gl.float32, layout=STATE)
    if initial >= 0:
        state = gl.load(states + initial.to(gl.int64) * results.slot_stride + offsets).to(gl.float32)
    wanted = zeros
    decay = gl.load(kept, mask=span.count > 0, other=0.0)
    if span.count > 0:
        mbarrier.wait(pipeline.full.index(0), 0)
        operand = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        held = warpgroup_mma(operand, pipeline.k.index(0).permute((1, 0)), zeros, use_acc=False)
        reach = pipeline.factors.index(REACH).load(TOKENS)
        wanted = gl.fma(reach[None, :], held, pipeline.v.index(PART).permute((1, 0)).load(OUT).to(gl.float32))

    for t in range(span.count):
        stage = t % sizes.STAGES
        first_factor = stage * _FACTORS
        following = gl.minimum(t + 1, span.count - 1)  # after the last tile, multiply by its keys again
        next_stage = following % sizes.STAGES
        slot = gl.load(tile_slots + t)
        next_decay = gl.load(kept + following)
        # Wait here for scores and the next tile: a branch after matmuls would make the compiler wait for each of them.
        mbarrier.wait(pipeline.scored.index(stage), t // sizes.STAGES & 1)
        mbarrier.wait(pipeline.full.index(next_stage), following // sizes.STAGES & 1)

        beta = pipeline.factors.index(first_factor + BETA).load(TOKENS)
        in_bf16 = gl.convert_layout(wanted.to(gl.bfloat16), OPERAND)
        solved = pipeline.solved.index(stage).permute((1, 0))
        written = warpgroup_mma(in_bf16, solved, wanted * beta[None, :], is_async=True)
        operand = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        q = pipeline.q.index(stage).permute((1, 0))
        asked = warpgroup_mma(operand, q, zeros, use_acc=False, is_async=True)
        state = state * decay
        written, state = warpgroup_mma_wait(PENDING, deps=[written, state])

        left = pipeline.factors.index(first_factor + LEFT).load(TOKENS)
        weighted = gl.convert_layout((written * left[None, :]).to(gl.bfloat16), OF_STATE)
        state = warpgroup_mma(weighted, pipeline.k.index(stage), state, is_async=True)
        asked = warpgroup_mma_wait(1, deps=[asked])
        in_fp16 = gl.convert_layout(written.to(gl.float16), OPERAND)
        read = pipeline.factors.index(first_factor + READ).load(TOKENS)
        scores = pipeline.scores.index(stage).permute((1, 0))
        y = warpgroup_mma(in_fp16, scores, asked * read[None, :], is_async=True)
        state = warpgroup_mma_wait(1, deps=[state])
        operand = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        k = pipeline.k.index(next_stage).permute((1, 0))
        begun = warpgroup_mma(operand, k, zeros, use_acc=False, is_async=True)
        y = warpgroup_mma_wait(1, deps=[y])
        mbarrier.arrive(pipeline.empty.index(stage), count=1)
        put_outputs(results, y_copy, y.to(gl.bfloat16), span, span.begin + t * L, head, channel, sizes)
        if slot >= 0:
            put_state(results, quantized, states, offsets, state, slot, head, channel, sizes)
        v = pipeline.v.index(next_stage * sizes.PARTS + PART).permute((1, 0)).load(OUT).to(gl.float32)
        reach = pipeline.factors.index(next_stage * _FACTORS + REACH).load(TOKENS)
        held, v, reach = warpgroup_mma_wait(0, deps=[begun, v, reach])
        wanted = gl.fma(reach[None, :], held, v)
        decay = next_decay
    tma.store_wait(0)
    if final >= 0:
        gl.store(states + final.to(gl.int64) * results.slot_stride + offsets, state.to(results.pool.dtype.element_ty))


@gluon.jit(do_not_specialize=["num_tiles"])
def _scan_kernel(
    q_tiles, k_tiles, v_tiles, y_tiles, solved_tiles, factor_tiles, rows, y, kept, tile_slots, pool, slot_stride,
    quantized, num_tiles,
    HEADS: gl.constexpr, HEADS_A_KEY: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    PARTS: gl.constexpr, LENGTH: gl.constexpr, STAGES: gl.constexpr, PER_CHUNK: gl.constexpr,
    CARRY_REGISTERS: gl.constexpr, FILL_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    await_launcher(OVERLAPS)
    sizes = Sizes(HEADS, HEADS_A_KEY, KEY_DIM, VALUE_DIM, PARTS, LENGTH, STAGES)
    SPLITS: gl.constexpr = VALUE_DIM // (PARTS * CHANNELS)
    channel = gl.program_id(0) % SPLITS * (PARTS * CHANNELS)
    head = gl.program_id(0) // SPLITS % HEADS
    row = gl.load(rows.longest_first + gl.program_id(0) // (SPLITS * HEADS))
    initial = gl.load(rows.initial_slots + row)
    final = gl.load(rows.final_slots + row)
    span = find_span(rows, row, LENGTH, PER_CHUNK)

    tiles = PackedTiles(q_tiles, k_tiles, v_tiles, solved_tiles, factor_tiles)
    results = Results(y, y_tiles, pool, slot_stride)
    pipeline = allocate_pipeline(tiles, sizes)
    y_copies = gl.allocate_shared_memory(gl.bfloat16, [PARTS, LENGTH, CHANNELS], y_tiles.layout)
    slots = tile_slots + span.first
    kept += head.to(gl.int64) * num_tiles + span.first

    scoring = (pipeline, span, sizes)
    filling = (tiles, pipeline, span, head, channel, num_tiles, sizes)
    first = (
        pipeline, y_copies.index(0), results, quantized, span, kept, slots, initial, final, head, channel, sizes, 0,
    )  # fmt: skip
    if PARTS == 1:
        gl.warp_specialize(
            [(score, scoring), (_carry, first), (fill, filling)], [4, 1], [CARRY_REGISTERS, FILL_REGISTERS]
        )
    else:
        second = (
            pipeline, y_copies.index(1), results, quantized, span, kept, slots, initial, final, head, channel, sizes,
            1,
        )  # fmt: skip
        gl.warp_specialize(
            [(score, scoring), (_carry, first), (_carry, second), (fill, filling)],
            [4, 4, 1],
            [CARRY_REGISTERS, CARRY_REGISTERS, FILL_REGISTERS],
        )


def scan_on_hopper(
    tokens: DeltaTokens,
    pool: Tensor,
    rows: PrefillBatch,
    tiles: TileSystems,
    quantized: QuantizedStates | None = None,
    tiling: HopperTiling | None = None,
) -> None:
    """Scan all requests; write outputs to `tiles.y` and states to their slots, in place.

    Args:
        tokens: bf16; 64 or 128 key channels and a multiple of 64 value channels per head, aligned to 16 bytes.
        tiles: The result of `solve_tiles_on_hopper`.
        quantized: Receives the states at chunk ends; None: they are stored in slots of `pool`.
    """
    tiling = tiling or choose_tiling(tokens, rows.longest_first.shape[0])
    num_heads, value_dim = tokens.v.shape[1:]
    key_heads, key_dim = tokens.q.shape[1:]
    splits = value_dim // (tiling.parts * CHANNELS.value)
    _scan_kernel[(rows.longest_first.shape[0] * num_heads * splits,)](
        q_tiles=_described(tokens.q.flatten(1), TILE_LEN, key_dim),
        k_tiles=_described(tokens.k.flatten(1), TILE_LEN, key_dim),
        v_tiles=_described(tokens.v.flatten(1), TILE_LEN, CHANNELS.value),
        y_tiles=_described(tiles.y.flatten(1), TILE_LEN, CHANNELS.value),
        solved_tiles=_described(tiles.solved.flatten(0, 2), TILE_LEN, TILE_LEN),
        factor_tiles=_described(tiles.factors.view(-1, NUM_FACTORS // 2 * TILE_LEN), 1, NUM_FACTORS // 2 * TILE_LEN),
        rows=tiled_view(rows),
        y=tiles.y,
        kept=tiles.kept,
        tile_slots=tiles.slots,
        pool=pool,
        slot_stride=pool.stride(0),
        quantized=quantized_pointers(quantized),
        num_tiles=tiles.slots.shape[0],
        HEADS=num_heads,
        HEADS_A_KEY=num_heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PARTS=tiling.parts,
        LENGTH=TILE_LEN,
        STAGES=tiling.num_stages,
        PER_CHUNK=tiles.shape.per_chunk,
        CARRY_REGISTERS=tiling.registers[0],
        FILL_REGISTERS=tiling.registers[1],
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(tokens.q.device),
    )


def _described(matrix: Tensor, length: int, channels: int) -> TensorDescriptor:
    """Return the TMA descriptor for a matrix that is read or written in blocks of this size."""
    return TensorDescriptor.from_tensor(matrix, [length, channels], _layout(length, channels, matrix.dtype))


@cache
def _layout(length: int, channels: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a block; cached because constructing it is slow."""
    if length == 1:
        return gl.NVMMASharedLayout(0, 32, 2)  # vectors need no swizzling
    return gl.NVMMASharedLayout.get_default_for([length, channels], getattr(gl, str(dtype).removeprefix("torch.")))
