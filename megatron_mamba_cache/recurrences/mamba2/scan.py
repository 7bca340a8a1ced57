"""SSD scan for packed prefill requests; states are read from slots and stored at chunk ends and request ends.

`tiles` splits the requests and sums the decays. Then the kernel in `scan_hopper` scans if it supports the inputs, or
else the kernel in `scan_portable`. Safe in CUDA graphs: no host sync, and the grids depend only on the shapes of the
arguments.
"""

from functools import cache
from math import prod

import torch
from torch import Tensor

from ...kernels.kernel_launches import has_tested_gluon, is_hopper, launches_kernel, num_multiprocessors
from ..batches import PrefillBatch, check_prefill_batch
from ..quantized_states import QuantizedStates, quantized_pointers
from ..request_tiles import TILE_LEN, TileShape, is_aligned, tile_shape, tiled_view
from ..stochastic_rounding import ScanRounding, scan_rounding
from .inputs import SSMTokens, SSMWeights, check_pool, check_tokens
from .reference import ssd_scan_ref
from .scan_portable import scan_portably
from .tiles import HopperTiling, ScanTiles, cut_tiles, head_slices

_DTYPES = (torch.bfloat16, torch.float32)
_POOL_DTYPES = (*_DTYPES, torch.float16)
_MAX_STATE = 128 * 128  # maximum number of elements of a head's state, limited by shared memory
_CHANNELS = 64  # number of channels per group of four warps


def cut_rows(
    dt: Tensor, weights: SSMWeights, rows: PrefillBatch, chunk_size: int, head_dim: int, dtype: torch.dtype
) -> ScanTiles | None:
    """Split requests into tiles for `ssd_scan` and sum their decays; None if the scan will use the reference.

    If the next launch is `causal_conv` with `after_cut` set, both kernels run concurrently. Head and state dimensions
    that the kernels do not support are not detected here.

    Args:
        dt: [tokens, heads], as in `SSMTokens`.
        chunk_size: As in `ssd_scan`.
        dtype: Dtype of the tokens to scan.

    CUDA-graph safe: no host sync, one launch.
    """
    shape = tile_shape(chunk_size, dtype)
    if not launches_kernel(dt) or shape is None or dtype not in _DTYPES or _is_empty(dt, rows):
        return None
    return cut_tiles(dt, weights, rows, shape, head_dim, dtype)


def ssd_scan(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: PrefillBatch,
    chunk_size: int,
    quantized: QuantizedStates | None = None,
    *,
    tiles: ScanTiles | None = None,
    seed: int | None = None,
) -> Tensor:
    """Run the recurrence over packed requests; read initial states from the pool and store states in place.

    States at chunk ends and request ends are stored. With a float32 pool, a request that is resumed at a chunk end
    continues bit-identically, however it is packed. The reference runs for float64, and if head_dim is not a multiple
    of 16, d_state is below 16 or not a power of two, or a head's state has more than 128 x 128 elements.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; each slot is contiguous.
        chunk_size: Maximum length of a chunk in `rows`.
        quantized: Storage for states at chunk ends, in `rows.chunk_slots`; None: these are slots of `ssm_pool`.
        tiles: Result of `cut_rows` for the same batch, which can be used once; None: compute it here.
        seed: Seed of the layer for stochastic rounding to an fp16 pool; None: round to nearest.

    Returns:
        [tokens, heads, head_dim] in the dtype of `x`; zeros after the last chunk.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `ssd_scan_ref`.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    if not tokens.x.dtype == tokens.B.dtype == tokens.C.dtype:
        dtypes = f"x {tokens.x.dtype}, B {tokens.B.dtype}, C {tokens.C.dtype}"
        raise ValueError(f"x, B and C must have the same dtype, found {dtypes}")
    if quantized is not None:
        quantized.check(ssm_pool)
    check_prefill_batch(rows, tokens.x.device)
    rounding = scan_rounding(rows, ssm_pool, seed)
    shape = tile_shape(chunk_size, tokens.x.dtype)
    fits = _fits_kernels(tokens, ssm_pool) and not _is_empty(tokens.dt, rows)
    if not launches_kernel(tokens.x) or shape is None or not fits:
        return ssd_scan_ref(tokens, weights, ssm_pool, rows, chunk_size, quantized, seed)
    fits_hopper = _fits_hopper(tokens, ssm_pool, shape)
    tiling = choose_tiling(tokens, rows.longest_first.shape[0]) if fits_hopper else None
    return scan_tiles(tokens, weights, ssm_pool, rows, shape, tiling, quantized, tiles=tiles, rounding=rounding)


def scan_tiles(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: PrefillBatch,
    shape: TileShape,
    tiling: HopperTiling | None,
    quantized: QuantizedStates | None = None,
    *,
    tiles: ScanTiles | None = None,
    rounding: ScanRounding | None = None,
) -> Tensor:
    """Scan with the Hopper kernel and `tiling`, or with the portable kernel if `tiling` is None.

    `ssd_scan` checks the arguments. If head_dim is not a power of two, each of its power-of-two slices takes one
    launch.
    """
    if tiles is None:
        tiles = cut_tiles(tokens.dt, weights, rows, shape, tokens.x.shape[2], tokens.x.dtype)
    num_heads, head_dim = tokens.x.shape[1:]
    num_groups, d_state = tokens.B.shape[1:]
    arguments = {
        "rows": tiled_view(rows),
        "D": weights.D,
        "decays": tiles.decays,
        "tile_slots": tiles.slots,
        "pool": ssm_pool,
        "slot_stride": ssm_pool.stride(0),
        "quantized": quantized_pointers(quantized),
        "rounding": rounding,
        "num_tiles": tiles.slots.shape[0],
        "HEADS": num_heads,
        "GROUPS": num_groups,
        "HEAD_DIM": head_dim,
        "D_STATE": d_state,
        "LENGTH": shape.length,
        "PER_CHUNK": shape.per_chunk,
    }
    for channels in head_slices(head_dim):
        if tiling is None:
            scan_portably(tokens, tiles, channels, arguments)
        else:
            from .scan_hopper import scan_on_hopper  # imported here, because other devices may lack Gluon

            scan_on_hopper(tokens, tiles, channels, tiling.within(channels.width), arguments)
    return tiles.y


def choose_tiling(tokens: SSMTokens, num_rows: int) -> HopperTiling:
    """Return the fastest tiling for `num_rows` requests.

    Few requests are spread over many programs; with many requests, programs of two heads share loads of B and C. Heads
    of more than 64 channels are always split, because their tiles and states would not fit in shared memory.
    """
    num_heads, head_dim = tokens.x.shape[1:]
    num_groups = tokens.B.shape[1]
    multiprocessors = num_multiprocessors(tokens.x.device)
    num_parts = num_rows * num_heads * (head_dim // _CHANNELS)  # number of programs for the widest slice
    if num_parts >= 2 * multiprocessors and num_heads // num_groups % 2 == 0:
        return HopperTiling(heads=2, channels=_CHANNELS, num_stages=2)
    if 2 * num_parts <= multiprocessors:
        return HopperTiling(heads=1, channels=_CHANNELS // 2, num_stages=3)
    return HopperTiling(heads=1, channels=_CHANNELS, num_stages=3)


def _is_empty(dt: Tensor, rows: PrefillBatch) -> bool:
    return 0 in (dt.shape[0], rows.chunk_requests.shape[0], rows.longest_first.shape[0])


def _fits_kernels(tokens: SSMTokens, ssm_pool: Tensor) -> bool:
    head_dim, d_state = _dims(tokens)
    return (
        head_dim % 16 == 0
        and d_state >= 16
        and d_state & (d_state - 1) == 0
        and prod(_dims(tokens)) <= _MAX_STATE
        and tokens.x.dtype in _DTYPES
        and ssm_pool.dtype in _POOL_DTYPES
        and all(is_aligned(packed) for packed in (tokens.x, tokens.B, tokens.C))
    )


def _fits_hopper(tokens: SSMTokens, ssm_pool: Tensor, shape: TileShape) -> bool:
    return (
        tokens.x.is_cuda
        and tokens.x.dtype == torch.bfloat16
        and shape.length == TILE_LEN
        and all(64 <= dim <= 128 for dim in _dims(tokens))
        and ssm_pool.stride(0) % ssm_pool.shape[-1] == 0
        and is_aligned(ssm_pool)
        and _runs_gluon(tokens.x.device)
    )


@cache
def _runs_gluon(device: torch.device) -> bool:
    return is_hopper(device) and has_tested_gluon()


def _dims(tokens: SSMTokens) -> tuple[int, int]:
    return tokens.x.shape[2], tokens.B.shape[2]
