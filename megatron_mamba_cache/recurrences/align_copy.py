"""Align copy: cache the state at the block boundary that a request's accepted tokens reached in a verify step.

The kernel decides on the device which requests to copy. With running = computed + scheduled - drafts,

    aligned = (running + max(accepted, 1) - 1) // block_size * block_size
    copy iff aligned >= running and aligned > 0;  shift = aligned - running

A tensor that each token replaces is copied from the slot in column state_column + shift. A window is copied from the
slot in column state_column, starting at input `shift`; its last inputs may be in a separate buffer, the tail.

Layout: as in `slot_tiles`; a tile of a quantized tensor covers all rows of some channels of a head. Grid: as many
programs as can run concurrently. Each evaluates the rule for all requests and copies every n-th tile over all layers
and tensors. So one request uses the whole device, and a step without copies only evaluates the rule. Safe in CUDA
graphs: no host sync, one launch, grid fixed at capture.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.kernel_launches import is_computed_in_fp32, launches_kernel, resident_programs
from .batches import PAD_SLOT, AlignBatch
from .draft_inputs import DraftInputs
from .moves import StateMove, align_copy_ref, check_moves, check_rows
from .quantized_states import QuantizedStates, quantized_pointers, store_quantized
from .slot_tiles import (
    CopyTiling,
    SlotStates,
    access_bytes,
    copy_tiles,
    copy_windows,
    cut_slots,
    next_turn,
    numbered,
    of_number,
    one_time,
)

TILING = CopyTiling(tile_len=4096, num_warps=16, programs_per_sm=1)
QUANTIZING = CopyTiling(tile_len=1024, num_warps=4, programs_per_sm=4)  # used if any tensor is quantized
ROWS_AT_A_TIME = 256
"""Number of requests that one loop iteration evaluates."""
_QUANTIZED_WIDTH = 32
_PAD = tl.constexpr(PAD_SLOT)
_WHOLE, _WINDOW, _QUANTIZED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class _Rows(NamedTuple):
    """Tensors of an `AlignBatch` as kernel arguments, and the indices of their tail buffers (None without tails)."""

    computed: Tensor
    scheduled: Tensor
    drafts: Tensor
    accepted: Tensor
    columns: Tensor
    state_columns: Tensor
    targets: Tensor
    buffers: Tensor | None
    accepted_stride: int
    columns_stride: int
    num_columns: int


class _Cut(NamedTuple):
    """Kernel arguments for one `StateMove`: source, target, tail, and the compile-time sizes of its tiles.

    For a quantized tensor, `times`, `length` and `lanes` are the numbers of heads, rows and channels.
    """

    source: Any
    target: Any
    tail: SlotStates  # ignored if `has_tail` is False
    motion: int
    layers: int
    times: int
    length: int
    lanes: int
    width: int
    has_tail: bool = False

    @property
    def num_tiles(self) -> int:
        """Number of tiles per slot."""
        if self.motion == _QUANTIZED.value:
            return self.layers * self.times * triton.cdiv(self.lanes, self.width)
        return self.layers * triton.cdiv(self.length, self.width)


@triton.jit
def _decide(rows, first_row, num_rows, block_size, ROWS: tl.constexpr):
    """Evaluate the copy rule for ROWS requests.

    Returns five [ROWS] tensors: True if a state is to be cached; True if its target differs from its source; (slot of
    whole tensors << 32 | slot of windows); (target << 32 | shift); and the index of the tail buffer.
    """
    row = first_row + tl.arange(0, ROWS)
    exists = row < num_rows
    computed = tl.load(rows.computed + row, mask=exists, other=0)
    scheduled = tl.load(rows.scheduled + row, mask=exists, other=0)
    drafts = tl.load(rows.drafts + row, mask=exists, other=0)
    target = tl.load(rows.targets + row, mask=exists, other=_PAD)
    running = computed + scheduled - drafts
    # Most requests cannot reach a boundary, however many tokens they accept; skip the remaining loads for them.
    is_near = (target != _PAD) & ((running + block_size - 1) // block_size * block_size - running < rows.num_columns)
    accepted = tl.load(rows.accepted + row * rows.accepted_stride, mask=is_near, other=1).to(tl.int32)
    state_column = tl.load(rows.state_columns + row, mask=is_near, other=0)

    aligned = (running + tl.maximum(accepted, 1) - 1) // block_size * block_size
    shift = aligned - running
    # The counts of padding requests may be stale, so check the column index against the number of columns.
    reached = is_near & (shift >= 0) & (aligned > 0) & (state_column + shift < rows.num_columns)

    column = rows.columns + row * rows.columns_stride + state_column
    window_source = tl.load(column, mask=reached, other=_PAD)
    whole_source = tl.load(column + shift, mask=reached, other=_PAD)
    is_real = (window_source != _PAD) & (whole_source != _PAD)
    is_elsewhere = (shift > 0) | (window_source != target)
    sources, destinations = (whole_source.to(tl.int64) << 32) | window_source, (target.to(tl.int64) << 32) | shift
    buffers = tl.zeros_like(sources)
    if rows.buffers is not None:
        buffers += tl.load(rows.buffers + row, mask=reached, other=0)
    return reached & is_real, is_elsewhere, sources, destinations, buffers


@triton.jit
def _quantize_tiles(
    matrices, pointers, source, target, first_tile,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, D_STATE: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantize every n-th tile of slot `source`, starting at `first_tile`, into slot `target`; n is the grid size."""
    PARTS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    n = tl.arange(0, triton.next_power_of_2(D_STATE))
    has_n = n < D_STATE
    for tile in range(first_tile, LAYERS * HEADS * PARTS, tl.num_programs(0)):
        layer = tl.cast(tile // (HEADS * PARTS), tl.int64)
        head = tile % (HEADS * PARTS) // PARTS
        p = tile % PARTS * WIDTH + tl.arange(0, WIDTH)
        has_p = p < CHANNELS
        states = matrices.first + layer * matrices.layer_stride + source * matrices.slot_stride
        states += head * (D_STATE * CHANNELS)
        inside = has_n[:, None] & has_p[None, :]
        state = tl.load(states + n[:, None] * CHANNELS + p[None, :], mask=inside, other=0.0)
        store_quantized(pointers, layer, target, state.to(tl.float32), head, n, p, has_n, has_p, D_STATE, CHANNELS)


@triton.jit(do_not_specialize=["num_rows", "block_size"])
def _align_copy_kernel(
    rows, sources, targets, tails, num_rows, block_size,
    ROWS: tl.constexpr, IN_PLACE: tl.constexpr, MOTIONS: tl.constexpr, TILES: tl.constexpr, LAYERS: tl.constexpr,
    TIMES: tl.constexpr, LENGTHS: tl.constexpr, LANES: tl.constexpr, WIDTHS: tl.constexpr, HAS_TAILS: tl.constexpr,
):  # fmt: skip
    turn = tl.program_id(0)
    for first_row in range(0, num_rows, ROWS):
        keeps, is_elsewhere, from_slots, to_slots, buffers = _decide(rows, first_row, num_rows, block_size, ROWS)
        moves = keeps
        if IN_PLACE:
            moves = keeps & is_elsewhere
        num_moves = tl.sum(moves.to(tl.int32), axis=0)
        if num_moves > 0:
            numbers = numbered(moves)
            for number in range(1, num_moves + 1):
                source = of_number(from_slots, numbers, number)
                destination = of_number(to_slots, numbers, number)
                buffer = of_number(buffers, numbers, number)
                whole = source >> 32
                target = destination >> 32
                for i in tl.static_range(len(MOTIONS)):
                    if MOTIONS[i] == _WHOLE:
                        if (not IN_PLACE) or whole != target:
                            copy_tiles(
                                sources[i], targets[i], whole, target, turn, LAYERS[i], LENGTHS[i], LANES[i], WIDTHS[i]
                            )
                    elif MOTIONS[i] == _WINDOW:
                        copy_windows(
                            sources[i], targets[i], tails[i], source & 0x7FFFFFFF, target, destination & 0x7FFFFFFF,
                            buffer, turn, LAYERS[i], TIMES[i], LENGTHS[i], LANES[i], WIDTHS[i], HAS_TAILS[i],
                        )  # fmt: skip
                    else:
                        _quantize_tiles(
                            sources[i], targets[i], whole, target, turn,
                            LAYERS[i], TIMES[i], LENGTHS[i], LANES[i], WIDTHS[i],
                        )  # fmt: skip
                    turn = next_turn(turn, TILES[i])


def align_copy(moves: Sequence[StateMove], rows: AlignBatch, block_size: int, tiling: CopyTiling | None = None) -> None:
    """Copy the state at the boundary that each request's accepted tokens reached into the request's target slot.

    Nothing is copied for padding, or for requests that reach no boundary or have no target. If source and target are
    in the same pool, the target may be one of the request's own `columns`, even the source. Other bytes are unchanged.

    Args:
        moves: The tensors to copy; either each target is its own source tensor, or none is.
        tiling: None: `QUANTIZING` if a tensor is quantized, else `TILING`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `align_copy_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    moves = [move for move in moves if move.source.shape[0]]
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, found {block_size}")
    if not moves:
        return
    check_moves(moves, rows.targets.shape[0])
    check_rows(rows, moves[0].source.device)
    if rows.targets.shape[0] == 0 or not moves[0].source.shape[1] or not moves[0].num_targets:
        return
    quantizes = [move for move in moves if isinstance(move.target, QuantizedStates)]
    if not launches_kernel(rows.targets) or not all(is_computed_in_fp32(move.source) for move in quantizes):
        align_copy_ref(moves, rows, block_size)
        return
    tiling = tiling or (QUANTIZING if quantizes else TILING)
    cut = [_cut(move, tiling) for move in sorted(moves, key=lambda move: move.window_len > 0)]
    _align_copy_kernel[(resident_programs(rows.targets.device, tiling.programs_per_sm),)](
        rows=_view(rows, next((move.tail for move in moves if move.tail is not None), None)),
        sources=tuple(tensor.source for tensor in cut),
        targets=tuple(tensor.target for tensor in cut),
        tails=tuple(tensor.tail for tensor in cut),
        num_rows=rows.targets.shape[0],
        block_size=block_size,
        ROWS=ROWS_AT_A_TIME,
        IN_PLACE=moves[0].is_in_place,
        MOTIONS=tuple(tensor.motion for tensor in cut),
        TILES=tuple(tensor.num_tiles for tensor in cut),
        LAYERS=tuple(tensor.layers for tensor in cut),
        TIMES=tuple(tensor.times for tensor in cut),
        LENGTHS=tuple(tensor.length for tensor in cut),
        LANES=tuple(tensor.lanes for tensor in cut),
        WIDTHS=tuple(tensor.width for tensor in cut),
        HAS_TAILS=tuple(tensor.has_tail for tensor in cut),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


def _cut(move: StateMove, tiling: CopyTiling) -> _Cut:
    source, target, num_layers = move.source, move.target, move.source.shape[0]
    if isinstance(target, QuantizedStates):
        heads, d_state, channels = source.shape[2:]
        width = min(_QUANTIZED_WIDTH, triton.next_power_of_2(channels))
        matrices = SlotStates(source, source.stride(0), source.stride(1), time_stride=0)  # strides in elements
        pointers = quantized_pointers(target)
        assert pointers is not None
        return _Cut(matrices, pointers, matrices, _QUANTIZED.value, num_layers, heads, d_state, channels, width)
    pools = [one_time(source), one_time(target)]
    if move.window_len:
        pools = [pool[:, :, : move.window_len].flatten(3) for pool in (source, target)]
    if move.tail is not None:
        pools.append(move.tail.inputs.flatten(3))
    access = access_bytes(*pools)
    sources, targets, *tails = (cut_slots(pool, tiling, access) for pool in pools)
    motion = _WINDOW.value if move.window_len else _WHOLE.value
    tail = tails[0].states if tails else targets.states
    sizes = targets.times, targets.length, targets.lanes, targets.width, bool(tails)
    return _Cut(sources.states, targets.states, tail, motion, num_layers, *sizes)


def _view(rows: AlignBatch, tail: DraftInputs | None) -> _Rows:
    return _Rows(
        rows.computed,
        rows.scheduled,
        rows.drafts,
        rows.accepted,
        rows.columns,
        rows.state_columns,
        rows.targets,
        None if tail is None else tail.buffers,
        accepted_stride=rows.accepted.stride(0),
        columns_stride=rows.columns.stride(0),
        num_columns=rows.columns.shape[1],
    )
