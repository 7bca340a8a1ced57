"""What all states of a group share when they are replayed: the weights of the ring's tokens, and their appending.

With L the sum of dt * A from the checkpoint on, C_t the step's t-th token and S the checkpoint,

    y_t = exp(L_t) (C_t S) + sum over j <= t of exp(L_t - L_j) dt_j (B_j . C_t) x_j + D x_t

This kernel computes the factors of S and of each x_j, D among them, appends B and the time steps of the step's tokens
to the ring and clears the outputs of padding; `state_replay` does the rest.

Logarithms of decays are summed in float64: differences of long sums keep their digits. Behind a convolution, what that
does not write is read while it still runs. Grid: a program for each row and block of heads, plus one row that clears
the outputs past the last row. Graph safe: no host sync, one launch, grid fixed by the shapes of the arguments.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.overlap import overlapping
from .replay_rows import ReplayRing, ReplayRows
from .replay_views import kernel_ring, kernel_rows, kernel_tokens
from .replay_weighing import weigh
from .ssm_inputs import SSMTokens, SSMWeights

_LEAST_OWN = 8  # one form of the kernels up to that many tokens
_HEADS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class ReplayCoefficients:
    """The factors of a step's outputs, float32; those of tokens that a row lacks are undefined.

    Args:
        checkpoint: [rows, max_tokens, heads]; of the checkpoint's product with C.
        inputs: [rows, max_tokens, heads, ring_len + own]; of x of the ring's tokens, oldest first, then of the step's
            tokens; 0 for one that comes later, undefined from the row's last one on.
        ring_len: Places for the ring's tokens.
        own: Places for the step's tokens, a power of two.
    """

    checkpoint: Tensor
    inputs: Tensor
    ring_len: int
    own: int


class _Weights(NamedTuple):
    """The kernel's view of `SSMWeights`."""

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_min: float
    dt_max: float


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_tokens"])
def _coefficients_kernel(
    y,
    checkpoint_factors,
    input_factors,
    tokens,
    weights,
    ring,
    rows,
    num_rows,
    num_tokens,
    max_tokens,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D_STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    READS_EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Call `weigh`; it is long because of its arguments."""
    weigh(
        y,
        checkpoint_factors,
        input_factors,
        tokens,
        weights,
        ring,
        rows,
        num_rows,
        num_tokens,
        max_tokens,
        HEADS,
        GROUPS,
        D_STATE,
        HEAD_DIM,
        CAPACITY,
        RING,
        OWN,
        BLOCK,
        TOKENS,
        READS_EARLY,
        OVERLAPS,
    )


def append_and_weigh(
    y: Tensor,
    tokens: SSMTokens,
    weights: SSMWeights,
    ring: ReplayRing,
    rows: ReplayRows,
    ring_len: int,
    *,
    after_conv: bool,
) -> ReplayCoefficients:
    """Append each row's B and time steps to its ring, clear outputs of padding in `y`, in place; return the factors.

    Long because it names what the kernel takes.

    Args:
        after_conv: See `state_replay`.
    """
    heads, head_dim = tokens.x.shape[1:]
    groups, d_state = tokens.B.shape[1:]
    num_rows = rows.slots.shape[0]
    block = min(_HEADS_AT_A_TIME, triton.next_power_of_2(heads // groups))
    num_blocks = groups * triton.cdiv(heads // groups, block)
    own = max(_LEAST_OWN, triton.next_power_of_2(rows.max_tokens))
    factors = ReplayCoefficients(
        torch.empty(num_rows, rows.max_tokens, heads, dtype=torch.float32, device=y.device),
        torch.empty(num_rows, rows.max_tokens, heads, ring_len + own, dtype=torch.float32, device=y.device),
        ring_len,
        own,
    )
    _coefficients_kernel[((num_rows + 1) * num_blocks,)](
        y=y,
        checkpoint_factors=factors.checkpoint,
        input_factors=factors.inputs,
        tokens=kernel_tokens(tokens),
        weights=_Weights(weights.A_log, weights.D, weights.dt_bias, *weights.dt_limit),
        ring=kernel_ring(ring),
        rows=kernel_rows(rows),
        num_rows=num_rows,
        num_tokens=tokens.x.shape[0],
        max_tokens=rows.max_tokens,
        HEADS=heads,
        GROUPS=groups,
        D_STATE=d_state,
        HEAD_DIM=head_dim,
        CAPACITY=ring.capacity,
        RING=ring_len,
        OWN=own,
        BLOCK=block,
        TOKENS=1 if rows.max_tokens == 1 else own,
        READS_EARLY=after_conv,
        num_warps=8 if rows.max_tokens == 1 else 4,
        enable_fp_fusion=True,
        **overlapping(y.device),
    )
    return factors
