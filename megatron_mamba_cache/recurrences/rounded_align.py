"""Align copy into rounded places: what `align_copy` decides, with the state rounded on its way.

Layout: a tile of a state is a head's channels over all of d_state, whose largest value gives their scale; conv windows
are copied as in `align_copy`. Grid and graph safety are those of `align_copy`.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from .align_copy import ROWS_AT_A_TIME, check_pools, check_rows, decide, rows_to_decide
from .align_rows import AlignRows
from .draft_inputs import DraftInputs, check_draft_inputs
from .reference_align import rounded_align_copy_ref
from .rounded_states import RoundedStates, rounded_places, store_rounded
from .slot_tiles import CopyTiling, next_turn, numbered, of_number
from .window_tiles import copy_windows, cut_windows

__all__ = ["TILING", "rounded_align_copy", "rounded_align_copy_ref"]

TILING = CopyTiling(tile_len=1024, num_warps=4, programs_per_sm=4)
WIDTH = 32


@triton.jit(do_not_specialize=["num_rows", "block_size"])
def _rounded_align_kernel(
    rows,
    conv,
    behind,
    ends,
    pool,
    layer_stride,
    slot_stride,
    rounded,
    num_rows,
    block_size,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    CONV_TIMES: tl.constexpr,
    CONV_LENGTH: tl.constexpr,
    CONV_LANES: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    D_STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """Long because what is decided stays in registers."""
    programs = tl.num_programs(0)
    CONV_TILES: tl.constexpr = LAYERS * ((CONV_LENGTH + CONV_WIDTH - 1) // CONV_WIDTH)
    PARTS: tl.constexpr = (HEAD_DIM + TILE_WIDTH - 1) // TILE_WIDTH
    A_LAYER: tl.constexpr = HEADS * PARTS
    n = tl.arange(0, triton.next_power_of_2(D_STATE))
    has_n = n < D_STATE
    turn = tl.program_id(0)
    for first_row in range(0, num_rows, ROWS):
        keeps, _, sources, destinations, rings = decide(rows, first_row, num_rows, block_size, ROWS)
        num_kept = tl.sum(keeps.to(tl.int32), axis=0)
        if num_kept > 0:
            numbers = numbered(keeps)
            for number in range(1, num_kept + 1):
                source = of_number(sources, numbers, number)
                destination = of_number(destinations, numbers, number)
                target = destination >> 32
                for tile in range(turn, LAYERS * A_LAYER, programs):
                    layer = tl.cast(tile // A_LAYER, tl.int64)
                    head = tile % A_LAYER // PARTS
                    p = tile % PARTS * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
                    has_p = p < HEAD_DIM
                    states = pool + layer * layer_stride + (source >> 32) * slot_stride + head * (D_STATE * HEAD_DIM)
                    inside = has_n[:, None] & has_p[None, :]
                    state = tl.load(states + n[:, None] * HEAD_DIM + p[None, :], mask=inside, other=0.0)
                    store_rounded(
                        rounded, layer, target, state.to(tl.float32), head, n, p, has_n, has_p, D_STATE, HEAD_DIM
                    )
                turn = next_turn(turn, LAYERS * A_LAYER)
                copy_windows(
                    conv, ends, behind, source & 0x7FFFFFFF, target, destination & 0x7FFFFFFF,
                    of_number(rings, numbers, number), turn,
                    LAYERS, CONV_TIMES, CONV_LENGTH, CONV_LANES, CONV_WIDTH,
                )  # fmt: skip
                turn = next_turn(turn, CONV_TILES)


def rounded_align_copy(
    conv_pool: Tensor,
    ssm_pool: Tensor,
    rows: AlignRows,
    block_size: int,
    window_len: int,
    ends: Tensor,
    rounded: RoundedStates,
    *,
    drafts: DraftInputs | None = None,
) -> None:
    """Round each row's state at the block boundary that its accepted tokens reached into its target, in place.

    The rows, `conv_pool` and `ssm_pool` are those of `align_copy`, but for `rows.targets`, which are slots of the last
    two arguments. Every other slot stays as it is.

    Args:
        ends: [layers, slots, window_len, conv_dim], of conv_pool's dtype, channels contiguous; takes the conv windows.
        rounded: With the layers as first dimension; takes the states. Without heads, as `ssm_pool`, nothing.
        drafts: As in `align_copy`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `rounded_align_copy_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    check_pools(conv_pool, ssm_pool, block_size, window_len)
    check_rows(rows, conv_pool.device)
    rounded.check(ssm_pool)
    _check_ends(ends, conv_pool, window_len)
    if drafts is not None:
        check_draft_inputs(drafts, conv_pool, rows.targets.shape[0])
    if 0 in (rows.targets.shape[0], conv_pool.numel(), ends.numel()):
        return
    if not launches_kernel(conv_pool) or not is_computed_in_fp32(ssm_pool):
        rounded_align_copy_ref(
            conv_pool, ssm_pool, rows, block_size, window_len, ends, rounded.values, rounded.scales, drafts
        )
        return
    _launch(conv_pool, ssm_pool, rows, block_size, window_len, ends, rounded, drafts)


def _launch(
    conv_pool: Tensor,
    ssm_pool: Tensor,
    rows: AlignRows,
    block_size: int,
    window_len: int,
    ends: Tensor,
    rounded: RoundedStates,
    drafts: DraftInputs | None,
) -> None:
    windows = cut_windows(conv_pool[:, :, :window_len], ends, drafts, TILING)
    num_layers, _, heads, d_state, head_dim = ssm_pool.shape
    _rounded_align_kernel[(TILING.num_programs(conv_pool.device),)](
        rows=rows_to_decide(rows, drafts),
        conv=windows.sources.states,
        behind=windows.behind,
        ends=windows.targets.states,
        pool=ssm_pool,
        layer_stride=ssm_pool.stride(0),
        slot_stride=ssm_pool.stride(1),
        rounded=rounded_places(rounded),
        num_rows=rows.targets.shape[0],
        block_size=block_size,
        ROWS=ROWS_AT_A_TIME,
        LAYERS=num_layers,
        **windows.sizes,
        HEADS=heads,
        D_STATE=d_state,
        HEAD_DIM=head_dim,
        TILE_WIDTH=min(WIDTH, triton.next_power_of_2(head_dim)),
        num_warps=TILING.num_warps,
        enable_fp_fusion=True,
    )


def _check_ends(ends: Tensor, conv_pool: Tensor, window_len: int) -> None:
    num_layers, conv_dim = conv_pool.shape[0], conv_pool.shape[3]
    fits = ends.dim() == 4 and (ends.shape[0], *ends.shape[2:]) == (num_layers, window_len, conv_dim)
    if not fits or ends.dtype != conv_pool.dtype or not ends[:1, :1, :1].is_contiguous():
        raise ValueError(
            f"need ends [{num_layers}, slots, {window_len}, {conv_dim}] of {conv_pool.dtype} and contiguous channels, "
            f"found {tuple(ends.shape)} of {ends.dtype} with strides {ends.stride()}"
        )
