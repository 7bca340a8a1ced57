"""State update for decode steps: a base token and drafts per request; the state after each token is stored.

    state = exp(dt * A) * state + B (dt * x);  y = C state + D x;  dt = clamp(softplus(dt + bias));  A = -exp(A_log)

Each request reads the state after its last accepted token once, and writes one state per token. Between tokens the
state stays in registers, but is rounded to the pool's dtype, so a step of n tokens is bit-identical to n single-token
steps.

Grid: one program per request, head and `width` columns of the head's state [d_state, head_dim]; each has all of
d_state, so no sum spans programs. Further programs zero the outputs after the last request. Safe in CUDA graphs: no
host sync, one launch, and the grid depends only on the shapes of the arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_language import only_if
from ...kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from ...kernels.overlap import await_inputs, await_launcher, overlapping, release
from ..batches import PAD_SLOT, DecodeBatch, DecodeView, check_decode_batch
from ..stochastic_rounding import DecodeRounding, cast_state, decode_rounding
from .inputs import SSMTokens, SSMWeights, check_pool, check_tokens, kernel_tokens, kernel_weights, time_step
from .reference import state_verify_ref


@dataclass(frozen=True, slots=True)
class VerifyTiling:
    """Tile sizes of the kernel; they affect results only through the order of the sum over d_state.

    Args:
        width: Number of columns (of head_dim) per program, a power of two.
        max_registers: Maximum number of registers per thread, which limits the programs per multiprocessor.
    """

    width: int
    num_warps: int
    max_registers: int


TILING = VerifyTiling(width=64, num_warps=4, max_registers=128)
_FEW_HEADS, _OF_FEW_HEADS = 64, VerifyTiling(width=32, num_warps=4, max_registers=128)
"""Tiling for models with at most 64 heads, where one request would use only half of a GPU's multiprocessors."""
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit
def _load_inputs(tokens, token, end, head, group, n, p, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load x, B, C and dt for one head and token without conversion; zeros from token `end` on."""
    at = tl.cast(token, tl.int64)
    exists = token < end
    x = tl.load(tokens.x + at * tokens.x_stride + head * HEAD_DIM + p, mask=only_if(exists, p < HEAD_DIM), other=0.0)
    b = tl.load(tokens.B + at * tokens.B_stride + group * D_STATE + n, mask=only_if(exists, n < D_STATE), other=0.0)
    c = tl.load(tokens.C + at * tokens.C_stride + group * D_STATE + n, mask=only_if(exists, n < D_STATE), other=0.0)
    dt = tl.load(tokens.dt + at * tokens.dt_stride + head, mask=exists, other=0.0)
    return x, b, c, dt


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "columns_stride"])
def _state_verify_kernel(
    y, tokens, weights, pool, slot_stride, rows, rounding, num_rows, num_tokens, columns_stride,
    HEADS: tl.constexpr, HEADS_A_GROUP: tl.constexpr, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, READS_EARLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Advance one head's state over the tokens of a request. Long because the loop keeps its values in registers."""
    if READS_EARLY:
        release(OVERLAPS)
    else:
        await_inputs(OVERLAPS)
    PARTS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HEADS
    row = tl.program_id(0) // (PARTS * HEADS)
    is_row = row < num_rows
    first_column = rows.columns + row.to(tl.int64) * columns_stride
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    live = tl.load(first_column, mask=is_row, other=_PAD)
    accepted = tl.load(rows.accepted + row, mask=is_row, other=1)

    n = tl.arange(0, triton.next_power_of_2(D_STATE))
    p = part * WIDTH + tl.arange(0, WIDTH)
    has_p = p < HEAD_DIM
    y += head * HEAD_DIM + p
    if live == _PAD:
        if READS_EARLY:
            await_launcher(OVERLAPS)
        for token in range(start, end):
            tl.store(y + tl.cast(token, tl.int64) * (HEADS * HEAD_DIM), tl.zeros_like(p), mask=has_p)
        return

    source = tl.load(first_column + accepted - 1).to(tl.int64)
    group = head // HEADS_A_GROUP
    states = pool + head * (D_STATE * HEAD_DIM) + n[:, None] * HEAD_DIM + p[None, :]
    is_state = (n < D_STATE)[:, None] & has_p[None, :]
    stored = tl.load(
        states + source * slot_stride, mask=only_if(source != _PAD, is_state), other=0.0
    )  # [d_state, width]
    seed, computed = None, 0
    if rounding is not None:
        seed, computed = rounding.seed, tl.load(rounding.computed + row)
    A = -tl.exp(tl.load(weights.A_log + head).to(tl.float32))
    skip = tl.load(weights.D + head).to(tl.float32)
    bias = tl.load(weights.dt_bias + head)
    if READS_EARLY:
        await_launcher(OVERLAPS)
    inputs = _load_inputs(tokens, start, end, head, group, n, p, D_STATE, HEAD_DIM)

    for token in range(start, end):
        x, b, c, dt = inputs
        # Prefetch the inputs of the next token.
        inputs = _load_inputs(tokens, token + 1, end, head, group, n, p, D_STATE, HEAD_DIM)
        slot = tl.load(first_column + (token - start)).to(tl.int64)
        x = x.to(tl.float32)
        dt = time_step(dt, bias, weights.dt_min, weights.dt_max)
        increment = b.to(tl.float32)[:, None] * (dt * x)[None, :]
        # Explicit fma, because the compiler may fuse differently in each compiled variant.
        state = tl.fma(tl.exp(dt * A), stored.to(tl.float32), increment)
        out = tl.fma(skip, x, tl.sum(state * c.to(tl.float32)[:, None], axis=0))
        tl.store(y + tl.cast(token, tl.int64) * (HEADS * HEAD_DIM), out, mask=has_p)
        after = computed + (token - start) + 1
        stored = cast_state(state, pool.dtype.element_ty, seed, after, head * D_STATE + n[:, None], p[None, :])
        tl.store(states + slot * slot_stride, stored, mask=only_if(slot != _PAD, is_state))


def state_verify(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: DecodeBatch,
    tiling: VerifyTiling | None = None,
    *,
    after_conv: bool = False,
    seed: int | None = None,
) -> Tensor:
    """Advance the state of each request over its base token and drafts; store the state after each token in place.

    The result is bit-identical to separate single-token steps. For padding, outputs are zeros and nothing is
    written.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; each slot is contiguous.
        tiling: None: choose by the number of heads.
        after_conv: True if the previous launch is the `conv_verify` that computes x, B and C. The kernel then reads
            states before `conv_verify` ends.
        seed: Seed of the layer for stochastic rounding to an fp16 pool; None: round to nearest.

    Returns:
        [tokens, heads, head_dim] in the dtype of `x`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `state_verify_ref`, which runs for float64 inputs. CUDA-graph safe: no host sync, one launch, grid fixed
    at capture.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    check_decode_batch(rows, ssm_pool.device)
    rounding = decode_rounding(rows.computed, ssm_pool, seed)
    if not launches_kernel(ssm_pool) or not is_computed_in_fp32(tokens.x, ssm_pool):
        return state_verify_ref(tokens, weights, ssm_pool, rows, seed)
    y = torch.empty_like(tokens.x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        is_narrow = y.shape[1] <= _FEW_HEADS or seed is not None  # stochastic rounding needs registers
        chosen = _OF_FEW_HEADS if is_narrow else TILING
        _launch(y, tokens, weights, ssm_pool, rows, tiling or chosen, rounding, after_conv)
    return y


def _launch(
    y: Tensor,
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: DecodeBatch,
    tiling: VerifyTiling,
    rounding: DecodeRounding | None,
    after_conv: bool,
) -> None:
    num_tokens, heads, head_dim = y.shape
    num_rows = rows.accepted.shape[0]
    width = min(tiling.width, triton.next_power_of_2(head_dim))
    _state_verify_kernel[((num_rows + 1) * heads * triton.cdiv(head_dim, width),)](
        y=y,
        tokens=kernel_tokens(tokens),
        weights=kernel_weights(weights),
        pool=ssm_pool,
        slot_stride=ssm_pool.stride(0),
        rows=DecodeView(rows.cu_tokens, rows.columns, rows.accepted),
        rounding=rounding,
        num_rows=num_rows,
        num_tokens=num_tokens,
        columns_stride=rows.columns.stride(0),
        HEADS=heads,
        HEADS_A_GROUP=heads // tokens.B.shape[1],
        D_STATE=tokens.B.shape[2],
        HEAD_DIM=head_dim,
        WIDTH=width,
        READS_EARLY=after_conv,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=True,
        **overlapping(ssm_pool.device),
    )
