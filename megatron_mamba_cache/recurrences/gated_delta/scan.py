"""Scan of packed prefill rows: each starts from its slot's state and stores states at boundaries and at its end."""

from torch import Tensor

from ..quantized_states import QuantizedStates
from ..rows import PrefillRows, check_prefill_rows
from .inputs import DeltaTokens, GateWeights, check_pool, check_tokens
from .reference import delta_scan_ref


def delta_scan(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    rows: PrefillRows,
    grain: int,
    quantized: QuantizedStates | None = None,
) -> Tensor:
    """Scan packed rows chunk by chunk, carrying each row's state from and to the pool.

    A row resumed at a chunk's end, in any packing, continues bit-equal where the pool holds float32. Writes the states
    at chunk and row ends in place.

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
    check_prefill_rows(rows, tokens.q.device)
    return delta_scan_ref(tokens, gates, pool, rows, quantized)
