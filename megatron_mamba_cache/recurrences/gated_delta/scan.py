"""Scan of packed prefills: each starts from its slot's state and stores states at boundaries and at its end.

`tile_systems` computes what depends on no state, for all tiles at once; `scan_portable` walks the tiles of each
request. Graph safe: no host sync, grids fixed by the shapes of the arguments.
"""

import torch
from torch import Tensor

from ...kernels.kernel_launches import launches_kernel
from ..batches import PrefillBatch, check_prefill_batch
from ..quantized_states import QuantizedStates
from ..request_tiles import TileShape, tile_shape
from .inputs import DeltaTokens, GateWeights, check_pool, check_tokens
from .reference import delta_scan_ref
from .scan_portable import scan_portably
from .tile_systems import solve_tiles

_DTYPES = (torch.bfloat16, torch.float32)
_MOST_KEY_DIM = 256


def delta_scan(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    rows: PrefillBatch,
    grain: int,
    quantized: QuantizedStates | None = None,
) -> Tensor:
    """Scan packed requests chunk by chunk, carrying each request's state from and to the pool.

    A request resumed at a chunk's end, in any packing, continues bit-equal where the pool holds float32. Writes the
    states at chunk and request ends in place. Keys of more than 256 dimensions, and dtypes other than bfloat16 and
    float32, use the twin.

    Args:
        pool: [slots, value heads, key_dim, value_dim]; a slot's state contiguous.
        grain: The longest chunk in `rows`.
        quantized: The states that `rows.chunk_slots` number, for those at chunk ends; None: `pool`.

    Returns:
        [tokens, value heads, value_dim] in v's dtype; zeros past the last chunk.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `delta_scan_ref`, which also computes float64.
    """
    check_tokens(tokens, gates)
    check_pool(tokens, pool)
    if quantized is not None:
        quantized.check(pool)
    check_prefill_batch(rows, tokens.q.device)
    shape = tile_shape(grain, tokens.q.dtype)
    if not launches_kernel(tokens.q) or shape is None or not _fits_kernels(tokens, pool) or _is_empty(tokens, rows):
        return delta_scan_ref(tokens, gates, pool, rows, quantized)
    return scan_tiles(tokens, gates, pool, rows, shape, quantized)


def scan_tiles(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    rows: PrefillBatch,
    shape: TileShape,
    quantized: QuantizedStates | None = None,
) -> Tensor:
    """Scan with the kernels and tiles of this shape; see `delta_scan`, which checks and chooses."""
    tiles = solve_tiles(tokens, gates, rows, shape)
    scan_portably(tokens, pool, rows, tiles, quantized)
    return tiles.y


def _is_empty(tokens: DeltaTokens, rows: PrefillBatch) -> bool:
    return 0 in (tokens.v.numel(), rows.chunk_requests.shape[0], rows.longest_first.shape[0])


def _fits_kernels(tokens: DeltaTokens, pool: Tensor) -> bool:
    return tokens.k.shape[2] <= _MOST_KEY_DIM and tokens.q.dtype in _DTYPES and pool.dtype in _DTYPES
