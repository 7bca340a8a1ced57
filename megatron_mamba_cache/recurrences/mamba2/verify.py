"""State update of decode and verify steps: a request's base token and drafts, and the state after each of them.

    state = exp(dt * A) * state + B (dt * x);  y = C state + D x;  dt = clamp(softplus(dt + bias));  A = -exp(A_log)

Each request reads the state that its last step accepted, once, and writes one state a token; between tokens a state
stays in registers and is rounded to the pool's dtype, so n tokens are bit-equal to n steps of one.

Grid: a program for each request and `width` columns of one head's state [d_state, head_dim], all of d_state, so that no
sum crosses programs; plus one request that clears the outputs past the last one. Graph safe: no host sync, one launch,
grid fixed by the shapes of the arguments.
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
from .inputs import SSMTokens, SSMWeights, check_pool, check_tokens, kernel_tokens, kernel_weights, time_step
from .reference import state_verify_ref


@dataclass(frozen=True, slots=True)
class VerifyTiling:
    """How states are split over programs; may change only the order of the sum over d_state.

    Args:
        width: Columns of head_dim of a program, a power of two.
        max_registers: Of a thread; they bound the programs that fit on a multiprocessor.
    """

    width: int
    num_warps: int
    max_registers: int


TILING = VerifyTiling(width=64, num_warps=4, max_registers=128)
_FEW_HEADS, _OF_FEW_HEADS = 64, VerifyTiling(width=32, num_warps=4, max_registers=128)
"""For models of so few heads that a request would keep only half of a GPU's multiprocessors busy."""
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit
def _load_inputs(tokens, token, end, head, group, n, p, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load x, B, C and dt of one head and token as they are stored; zeros from token `end` on."""
    at = tl.cast(token, tl.int64)
    exists = token < end
    x = tl.load(tokens.x + at * tokens.x_stride + head * HEAD_DIM + p, mask=only_if(exists, p < HEAD_DIM), other=0.0)
    b = tl.load(tokens.B + at * tokens.B_stride + group * D_STATE + n, mask=only_if(exists, n < D_STATE), other=0.0)
    c = tl.load(tokens.C + at * tokens.C_stride + group * D_STATE + n, mask=only_if(exists, n < D_STATE), other=0.0)
    dt = tl.load(tokens.dt + at * tokens.dt_stride + head, mask=exists, other=0.0)
    return x, b, c, dt


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "columns_stride"])
def _state_verify_kernel(
    y, tokens, weights, pool, slot_stride, rows, num_rows, num_tokens, columns_stride,
    HEADS: tl.constexpr, HEADS_A_GROUP: tl.constexpr, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, READS_EARLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Long because it is one loop with its values kept in registers."""
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
    A = -tl.exp(tl.load(weights.A_log + head).to(tl.float32))
    skip = tl.load(weights.D + head).to(tl.float32)
    bias = tl.load(weights.dt_bias + head)
    if READS_EARLY:
        await_launcher(OVERLAPS)
    inputs = _load_inputs(tokens, start, end, head, group, n, p, D_STATE, HEAD_DIM)

    for token in range(start, end):
        x, b, c, dt = inputs
        # Prefetched: only the next token waits for these inputs.
        inputs = _load_inputs(tokens, token + 1, end, head, group, n, p, D_STATE, HEAD_DIM)
        slot = tl.load(first_column + (token - start)).to(tl.int64)
        x = x.to(tl.float32)
        dt = time_step(dt, bias, weights.dt_min, weights.dt_max)
        increment = b.to(tl.float32)[:, None] * (dt * x)[None, :]
        # Fused by hand: the compiler's choice of what to fuse may differ from one compiled form to the next.
        state = tl.fma(tl.exp(dt * A), stored.to(tl.float32), increment)
        out = tl.fma(skip, x, tl.sum(state * c.to(tl.float32)[:, None], axis=0))
        tl.store(y + tl.cast(token, tl.int64) * (HEADS * HEAD_DIM), out, mask=has_p)
        stored = state.to(pool.dtype.element_ty)
        tl.store(states + slot * slot_stride, stored, mask=only_if(slot != _PAD, is_state))


def state_verify(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: DecodeBatch,
    tiling: VerifyTiling | None = None,
    *,
    after_conv: bool = False,
) -> Tensor:
    """Advance each state over its base token and drafts, and keep the state after each, in place.

    Bit-equal to as many steps of one token each: between tokens states have the pool's dtype. Padding requests and
    tokens past the last request give zeros and write nothing.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; a slot's state contiguous.
        tiling: None: by the number of heads.
        after_conv: True if `conv_verify` was launched right before and wrote x, B and C: states are read concurrently.

    Returns:
        [tokens, heads, head_dim] in x's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `state_verify_ref`, which also computes float64. CUDA-graph safe: no host sync, one launch, grid fixed at
    capture.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    check_decode_batch(rows, ssm_pool.device)
    if not launches_kernel(ssm_pool) or not is_computed_in_fp32(tokens.x, ssm_pool):
        return state_verify_ref(tokens, weights, ssm_pool, rows)
    y = torch.empty_like(tokens.x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        chosen = _OF_FEW_HEADS if y.shape[1] <= _FEW_HEADS else TILING
        _launch(y, tokens, weights, ssm_pool, rows, tiling or chosen, after_conv)
    return y


def _launch(
    y: Tensor,
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    rows: DecodeBatch,
    tiling: VerifyTiling,
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
