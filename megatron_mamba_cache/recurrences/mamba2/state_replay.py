"""Outputs of decode and verify steps whose states are replayed: a state is read once, and written only by a fold.

    y_t = factor_t (C_t S) + sum over the tokens j since the checkpoint S of factor_tj x_j

`replay_coefficients` computes the factors and appends B and time steps; `state_replay_sums`, `state_replay_products` or
`state_replay_portable` does the rest. Where a row's kept tokens have passed a multiple of the ring's length, they are
folded first: S = exp(dt * A) * S + B (dt * x), token by token as `state_verify` does or, on a Hopper GPU where x and B
are bf16, a period at once; rounded to the pool's dtype at every multiple. So a checkpoint's bits depend on its tokens
alone. x is appended after that, by the programs that have folded it, and may take the places of what they have folded.
Graph safe: no host sync, two launches, grids fixed by the shapes of the arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from .boundary_folds import fold_boundaries
from .reference_replay import fold_boundaries_ref, state_replay_ref
from .replay_coefficients import append_and_weigh
from .replay_rows import BoundaryFolds, ReplayRing, ReplayRows, check_replay_rows, check_ring
from .replay_tiling import ReplayTiling, choose_tiling
from .ssm_inputs import SSMTokens, SSMWeights
from .state_replay_portable import replay_portably
from .state_verify import check_pool, check_tokens

__all__ = [
    "BoundaryFolds",
    "ReplayRing",
    "ReplayRows",
    "fold_boundaries",
    "fold_boundaries_ref",
    "state_replay",
    "state_replay_ref",
]


def state_replay(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayRows,
    ring_len: int,
    *,
    after_conv: bool = False,
) -> Tensor:
    """Fold what may be folded, compute the outputs of each row's tokens, and append the tokens to its ring, in place.

    With boundary = computed // ring_len * ring_len, a row with boundary > folded first brings the ring's entries from
    `folded` to `boundary` into its checkpoint, which the caller then counts as folded up to there. No other state is
    written. A checkpoint's bits depend on its tokens alone, not on the steps that fed them. A padding row and tokens
    past the last row give zeros and touch nothing.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; a slot's state contiguous.
        ring: Of the inputs' dtypes; at least ring_len + 2 * max_tokens - 1 positions, of x ring_len + max_tokens - 1.
        ring_len: Positions from one fold to the next, a power of two from 4 on.
        after_conv: True if the launch right before is `conv_verify`'s, which wrote x, B and C: all else is read while
            it still runs.

    Returns:
        [tokens, heads, head_dim] in x's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `state_replay_ref`, which also computes float64. CUDA-graph safe: no host sync, two launches, grids fixed
    at capture.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    check_replay_rows(rows, ssm_pool.device)
    check_ring(ring, tokens, ring_len, rows.max_tokens)
    if not launches_kernel(ssm_pool) or not is_computed_in_fp32(tokens.x, ssm_pool):
        return state_replay_ref(tokens, weights, ssm_pool, ring, rows, ring_len)
    return replay_tiled(
        tokens,
        weights,
        ssm_pool,
        ring,
        rows,
        ring_len,
        choose_tiling(tokens, ssm_pool, rows.max_tokens),
        after_conv=after_conv,
    )


def replay_tiled(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayRows,
    ring_len: int,
    tiling: ReplayTiling,
    *,
    after_conv: bool = False,
) -> Tensor:
    """Compute with this tiling's kernel; see `state_replay`, which checks and chooses."""
    y = torch.empty_like(tokens.x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    factors = append_and_weigh(y, tokens, weights, ring, rows, ring_len, after_conv=after_conv)
    if rows.slots.shape[0] > 0:
        _KERNELS[tiling.kernel](y, tokens, ssm_pool, ring, rows, factors, tiling)
    return y


def _replay_by_sums(*arguments: Any) -> None:
    from .state_replay_sums import replay_by_sums

    replay_by_sums(*arguments)


def _replay_by_products(*arguments: Any) -> None:
    from .state_replay_products import replay_by_products

    replay_by_products(*arguments)


# Gluon is imported where it is used: other devices need none.
_KERNELS: dict[str, Callable[..., None]] = {
    "portable": replay_portably,
    "sums": _replay_by_sums,
    "products": _replay_by_products,
}
