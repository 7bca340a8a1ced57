"""SSD scan of packed prefills: each starts from its slot's state and stores states at boundaries and at its end.

`tiles` cuts the requests and sums the decays, then one of two kernels scans: that of `scan_hopper` if it can run, else
that of `scan_portable`. Graph safe: no host sync, grids fixed by the shapes of the arguments.
"""

from functools import cache
from math import prod

import torch
from torch import Tensor

from ...kernels.kernel_launches import has_tested_gluon, is_hopper, launches_kernel, num_multiprocessors
from ..batches import PrefillBatch, check_prefill_batch
from ..quantized_states import QuantizedStates, quantized_pointers
from ..request_tiles import TILE_LEN, TileShape, tile_shape, tiled_view
from .inputs import SSMTokens, SSMWeights, check_pool, check_tokens
from .reference import ssd_scan_ref
from .scan_portable import scan_portably
from .tiles import HopperTiling, ScanTiles, cut_tiles, head_slices

_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16  # bytes, for TMA
_MAX_STATE = 128 * 128  # elements of a head's state: shared memory holds no more of it
_CHANNELS = 64  # channels of a head scanned by four warps


def cut_rows(
    dt: Tensor, weights: SSMWeights, rows: PrefillBatch, chunk_size: int, head_dim: int, dtype: torch.dtype
) -> ScanTiles | None:
    """Cut requests into tiles for a scan, from their time steps; None if the scan uses the twin.

    Launched right before `causal_conv`, with its `after_cut` set, it runs concurrently. Sizes of heads and states that
    use the twin too are not checked.

    Args:
        dt: [tokens, heads]; as in `SSMTokens`.
        chunk_size: As in `ssd_scan`.
        dtype: Of the tokens that will be scanned.

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
) -> Tensor:
    """Scan packed requests chunk by chunk, carrying each request's state from and to the pool.

    A request resumed at a chunk's end, in any packing, continues bit-equal where the pool holds float32. Writes the
    states at chunk and request ends into `ssm_pool` in place. A head_dim that is not a multiple of 16, a d_state that
    is not a power of two from 16 on, states of more than 128 x 128 a head, and float64 use the twin.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; a slot's state contiguous.
        chunk_size: The longest chunk in `rows`.
        quantized: The states that `rows.chunk_slots` number, for those at chunk ends; None: `ssm_pool`.
        tiles: What `cut_rows` returned for these rows and time steps, used once; None: cut them here.

    Returns:
        [tokens, heads, head_dim] in x's dtype; zeros past the last chunk.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `ssd_scan_ref`.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    if not tokens.x.dtype == tokens.B.dtype == tokens.C.dtype:
        raise ValueError(f"need x, B and C of one dtype, found {tokens.x.dtype}, {tokens.B.dtype}, {tokens.C.dtype}")
    if quantized is not None:
        quantized.check(ssm_pool)
    check_prefill_batch(rows, tokens.x.device)
    shape = tile_shape(chunk_size, tokens.x.dtype)
    if (
        not launches_kernel(tokens.x)
        or shape is None
        or not _fits_kernels(tokens, ssm_pool)
        or _is_empty(tokens.dt, rows)
    ):
        return ssd_scan_ref(tokens, weights, ssm_pool, rows, chunk_size, quantized)
    tiling = None
    if _fits_hopper(tokens, ssm_pool, shape):
        tiling = choose_tiling(tokens, rows.longest_first.shape[0])
    return scan_tiles(tokens, weights, ssm_pool, rows, shape, tiling, quantized, tiles=tiles)


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
) -> Tensor:
    """Scan with the Hopper kernel and this tiling, or the portable one; `ssd_scan` checks and chooses.

    A head with a number of channels that is not a power of two takes a launch for each of its slices.
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
            from .scan_hopper import scan_on_hopper  # Gluon is imported on demand

            scan_on_hopper(tokens, tiles, channels, tiling.within(channels.width), arguments)
    return tiles.y


def choose_tiling(tokens: SSMTokens, num_rows: int) -> HopperTiling:
    """Return the fastest tiling for `num_rows` requests: few must be spread, many share what they read.

    A head of more than 64 channels is split in any case: the tiles and states of two such heads outgrow shared memory.
    """
    num_heads, head_dim = tokens.x.shape[1:]
    num_groups = tokens.B.shape[1]
    multiprocessors = num_multiprocessors(tokens.x.device)
    num_parts = num_rows * num_heads * (head_dim // _CHANNELS)  # narrower slices have fewer
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
        and ssm_pool.dtype in _DTYPES
        and all(_is_aligned(packed) for packed in (tokens.x, tokens.B, tokens.C))
    )


def _fits_hopper(tokens: SSMTokens, ssm_pool: Tensor, shape: TileShape) -> bool:
    return (
        tokens.x.is_cuda
        and tokens.x.dtype == torch.bfloat16
        and shape.length == TILE_LEN
        and all(64 <= dim <= 128 for dim in _dims(tokens))
        and ssm_pool.stride(0) % ssm_pool.shape[-1] == 0
        and ssm_pool.data_ptr() % _ALIGNMENT == 0
        and _runs_gluon(tokens.x.device)
    )


@cache
def _runs_gluon(device: torch.device) -> bool:
    return is_hopper(device) and has_tested_gluon()


def _dims(tokens: SSMTokens) -> tuple[int, int]:
    return tokens.x.shape[2], tokens.B.shape[2]


def _is_aligned(packed: Tensor) -> bool:
    return (packed.stride(0) * packed.element_size()) % _ALIGNMENT == 0 and packed.data_ptr() % _ALIGNMENT == 0
