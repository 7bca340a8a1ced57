"""Gated delta rule for packed prefill requests; states are read from slots and stored at chunk ends and request ends.

`tile_systems` computes the terms that do not depend on states, for all tiles in parallel; `scan_portable` processes the
tiles of each request in order. On Hopper GPUs, `tile_systems_hopper` and `scan_hopper` do so for bf16 tokens, unless
the scan is given a `seed`. Safe in CUDA graphs: no host sync, and the grids depend only on the shapes of the arguments.
"""

from functools import cache

import torch
from torch import Tensor

from ...kernels.kernel_launches import has_tested_gluon, is_hopper, launches_kernel
from ..batches import PrefillBatch, check_prefill_batch
from ..quantized_states import QuantizedStates
from ..request_tiles import TILE_LEN, TileShape, is_aligned, tile_shape
from ..stochastic_rounding import ScanRounding, scan_rounding
from .inputs import DeltaTokens, GateWeights, check_pool, check_tokens
from .reference import delta_scan_ref
from .scan_portable import scan_portably
from .tile_systems import TileSystems, solve_tiles

_DTYPES = (torch.bfloat16, torch.float32)
_POOL_DTYPES = (*_DTYPES, torch.float16)
_MOST_KEY_DIM = 256


def delta_scan(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    rows: PrefillBatch,
    grain: int,
    quantized: QuantizedStates | None = None,
    *,
    seed: int | None = None,
) -> Tensor:
    """Run the gated delta rule over packed requests; read initial states from the pool and store states in place.

    States at chunk ends and request ends are stored. With a float32 pool, a request that is resumed at a chunk end
    continues bit-identically, however it is packed. The reference runs if key_dim is above 256, and for dtypes other
    than bfloat16 and float32.

    Args:
        pool: [slots, value heads, key_dim, value_dim]; each slot is contiguous.
        grain: Maximum length of a chunk in `rows`.
        quantized: Storage for states at chunk ends, in `rows.chunk_slots`; None: these are slots of `pool`.
        seed: Seed of the layer for stochastic rounding to an fp16 pool; None: round to nearest.

    Returns:
        [tokens, value heads, value_dim] in the dtype of `v`; zeros after the last chunk.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `delta_scan_ref`.
    """
    check_tokens(tokens, gates)
    check_pool(tokens, pool)
    if quantized is not None:
        quantized.check(pool)
    check_prefill_batch(rows, tokens.q.device)
    rounding = scan_rounding(rows, pool, seed)
    shape = tile_shape(grain, tokens.q.dtype)
    if not launches_kernel(tokens.q) or shape is None or not _fits_kernels(tokens, pool) or _is_empty(tokens, rows):
        return delta_scan_ref(tokens, gates, pool, rows, quantized, seed)
    return scan_tiles(tokens, gates, pool, rows, shape, quantized, rounding)


def scan_tiles(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    rows: PrefillBatch,
    shape: TileShape,
    quantized: QuantizedStates | None = None,
    rounding: ScanRounding | None = None,
) -> Tensor:
    """Run the scan kernels with tiles of the given shape; `delta_scan` checks the arguments."""
    if rounding is None:
        tiles = solve(tokens, gates, rows, shape)
        carry_states(tokens, pool, rows, tiles, quantized)
    else:
        tiles = solve_tiles(tokens, gates, rows, shape)
        scan_portably(tokens, pool, rows, tiles, quantized, rounding=rounding)
    return tiles.y


def solve(tokens: DeltaTokens, gates: GateWeights, rows: PrefillBatch, shape: TileShape) -> TileSystems:
    """Run the first kernel of the scan: compute the terms of each tile that do not depend on states."""
    if not _fits_hopper(tokens, shape):
        return solve_tiles(tokens, gates, rows, shape)
    from .tile_systems_hopper import solve_tiles_on_hopper  # imported here, because other devices may lack Gluon

    return solve_tiles_on_hopper(tokens, gates, rows, shape)


def carry_states(
    tokens: DeltaTokens,
    pool: Tensor,
    rows: PrefillBatch,
    tiles: TileSystems,
    quantized: QuantizedStates | None = None,
) -> None:
    """Run the second kernel of the scan: write outputs to `tiles.y`, and states to their slots, in place."""
    if _fits_hopper(tokens, tiles.shape):
        from .scan_hopper import scan_on_hopper

        scan_on_hopper(tokens, pool, rows, tiles, quantized)
    else:
        scan_portably(tokens, pool, rows, tiles, quantized)


def _is_empty(tokens: DeltaTokens, rows: PrefillBatch) -> bool:
    return 0 in (tokens.v.numel(), rows.chunk_requests.shape[0], rows.longest_first.shape[0])


def _fits_kernels(tokens: DeltaTokens, pool: Tensor) -> bool:
    return tokens.k.shape[2] <= _MOST_KEY_DIM and tokens.q.dtype in _DTYPES and pool.dtype in _POOL_DTYPES


def _fits_hopper(tokens: DeltaTokens, shape: TileShape) -> bool:
    return (
        tokens.q.is_cuda
        and tokens.q.dtype == torch.bfloat16
        and shape.length == TILE_LEN
        and tokens.q.shape[2] in (64, 128)
        and tokens.v.shape[2] % 64 == 0
        and all(is_aligned(packed) for packed in (tokens.q, tokens.k, tokens.v))
        and _runs_gluon(tokens.q.device)
    )


@cache
def _runs_gluon(device: torch.device) -> bool:
    return is_hopper(device) and has_tested_gluon()
