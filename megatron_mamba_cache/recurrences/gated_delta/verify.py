"""State update of decode and verify steps: a row's base token and drafts, and the state after each of them."""

from torch import Tensor

from ..rows import DecodeRows, check_decode_rows
from .inputs import DeltaTokens, GateWeights, check_pool, check_tokens
from .reference import delta_verify_ref


def delta_verify(
    tokens: DeltaTokens, gates: GateWeights, pool: Tensor, rows: DecodeRows, *, after_conv: bool = False
) -> Tensor:
    """Advance each row's state over its base token and drafts, keep the state after each in place; return the outputs.

    Bit-equal to as many steps of one token each: between tokens a state is rounded to the pool's dtype. A padded row
    and tokens past the last row give zeros and touch nothing.

    Args:
        pool: [slots, value heads, key_dim, value_dim]; a slot's state contiguous.
        after_conv: True if `conv_verify` was launched right before and wrote q, k and v.

    Returns:
        [tokens, value heads, value_dim] in v's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `delta_verify_ref`, which also computes float64.
    """
    check_tokens(tokens, gates)
    check_pool(tokens, pool)
    check_decode_rows(rows, pool.device)
    return delta_verify_ref(tokens, gates, pool, rows)
