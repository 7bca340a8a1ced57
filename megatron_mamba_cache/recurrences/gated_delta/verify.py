"""State update for decode steps: a base token and drafts per request; the state after each token is stored.

    kept = exp(g) state;  u = beta (v - k kept);  state = kept + k u;  y = q state

Each request reads the state after its last accepted token once, and writes one state per token. Between tokens the
state stays in registers, but is rounded to the pool's dtype, so a step of n tokens is bit-identical to n single-token
steps. Both sums over key_dim use the state before the token, because q state = q kept + (q k) u.

Grid: one program per request, head and `width` columns of the head's state [key_dim, value_dim]; each has all of
key_dim, so no sum spans programs. Further programs zero the outputs after the last request. Safe in CUDA graphs: no
host sync, one launch, and the grid depends only on the shapes of the arguments.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_language import only_if
from ...kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from ...kernels.overlap import await_inputs, await_launcher, overlapping, release
from ..batches import PAD_SLOT, DecodeBatch, check_decode_batch
from ..stochastic_rounding import DecodeRounding, cast_state, decode_rounding
from .inputs import (
    EPS,
    DeltaTokens,
    GateWeights,
    KernelGates,
    check_pool,
    check_tokens,
    kernel_tokens,
    log_decay,
    write_strength,
)
from .reference import delta_verify_ref


@dataclass(frozen=True, slots=True)
class VerifyTiling:
    """Tile sizes of the kernel; they affect results only through the order of sums over key_dim.

    Args:
        width: Number of columns (of value_dim) per program, a power of two.
        max_registers: Maximum number of registers per thread, which limits the programs per multiprocessor.
    """

    width: int
    num_warps: int
    max_registers: int


TILING = VerifyTiling(width=32, num_warps=4, max_registers=96)
_FOR_ROUNDING = VerifyTiling(width=32, num_warps=4, max_registers=128)
"""Tiling for stochastic rounding, which needs more registers."""
_PAD = tl.constexpr(PAD_SLOT)
_EPS = tl.constexpr(EPS)


class _Rows(NamedTuple):
    """The tensors of a `DecodeBatch` as kernel arguments."""

    cu_tokens: Tensor
    columns: Tensor
    accepted: Tensor


@triton.jit
def _load_inputs(
    tokens, columns, token, start, end, head, key_head, n, p, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Load q, k, v, b, a for one head and token, and the token's slot; zeros and PAD_SLOT from `end` on."""
    at = tl.cast(token, tl.int64)
    exists = token < end
    is_key, is_value = only_if(exists, n < KEY_DIM), only_if(exists, p < VALUE_DIM)
    q = tl.load(tokens.q + at * tokens.q_stride + key_head * KEY_DIM + n, mask=is_key, other=0.0)
    k = tl.load(tokens.k + at * tokens.k_stride + key_head * KEY_DIM + n, mask=is_key, other=0.0)
    v = tl.load(tokens.v + at * tokens.v_stride + head * VALUE_DIM + p, mask=is_value, other=0.0)
    b = tl.load(tokens.b + at * tokens.b_stride + head, mask=exists, other=0.0)
    a = tl.load(tokens.a + at * tokens.a_stride + head, mask=exists, other=0.0)
    slot = tl.load(columns + (token - start), mask=exists, other=_PAD)
    return q, k, v, b, a, slot.to(tl.int64)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "columns_stride"])
def _delta_verify_kernel(
    y,
    tokens,
    gates,
    pool,
    slot_stride,
    rows,
    rounding,
    scale,
    num_rows,
    num_tokens,
    columns_stride,
    HEADS: tl.constexpr,
    HEADS_A_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    READS_EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Advance one head's state over the tokens of a request. Long because the loop keeps its values in registers."""
    if READS_EARLY:
        release(OVERLAPS)
    else:
        await_inputs(OVERLAPS)
    PARTS: tl.constexpr = (VALUE_DIM + WIDTH - 1) // WIDTH
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HEADS
    row = tl.program_id(0) // (PARTS * HEADS)
    is_row = row < num_rows
    first_column = rows.columns + row.to(tl.int64) * columns_stride
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    live = tl.load(first_column, mask=is_row, other=_PAD)
    accepted = tl.load(rows.accepted + row, mask=is_row, other=1)

    n = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    p = part * WIDTH + tl.arange(0, WIDTH)
    has_p = p < VALUE_DIM
    y += head * VALUE_DIM + p
    if live == _PAD:
        if READS_EARLY:
            await_launcher(OVERLAPS)
        for token in range(start, end):
            tl.store(y + tl.cast(token, tl.int64) * (HEADS * VALUE_DIM), tl.zeros_like(p), mask=has_p)
        return

    source = tl.load(first_column + accepted - 1).to(tl.int64)
    key_head = head // HEADS_A_KEY
    states = pool + head * (KEY_DIM * VALUE_DIM) + n[:, None] * VALUE_DIM + p[None, :]
    is_state = (n < KEY_DIM)[:, None] & has_p[None, :]
    stored = tl.load(
        states + source * slot_stride, mask=only_if(source != _PAD, is_state), other=0.0
    )  # [key_dim, width]
    seed, computed = None, 0
    if rounding is not None:
        seed, computed = rounding.seed, tl.load(rounding.computed + row)
    A_log, dt_bias = tl.load(gates.A_log + head), tl.load(gates.dt_bias + head)
    if READS_EARLY:
        await_launcher(OVERLAPS)
    inputs = _load_inputs(tokens, first_column, start, start, end, head, key_head, n, p, KEY_DIM, VALUE_DIM)

    for token in range(start, end):
        q, k, v, b, a, slot = inputs
        # Prefetch the inputs of the next token.
        inputs = _load_inputs(tokens, first_column, token + 1, start, end, head, key_head, n, p, KEY_DIM, VALUE_DIM)
        q, k = q.to(tl.float32), k.to(tl.float32)
        q *= scale * tl.rsqrt(tl.sum(q * q, axis=0) + _EPS)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
        decay, strength = tl.exp(log_decay(a, A_log, dt_bias)), write_strength(b)
        state = stored.to(tl.float32)
        held = tl.sum(state * k[:, None], axis=0)
        asked = tl.sum(state * q[:, None], axis=0)
        # Explicit fma, because the compiler may fuse differently in each compiled variant.
        written = strength * tl.fma(-decay, held, v.to(tl.float32))
        out = tl.fma(tl.sum(q * k, axis=0), written, decay * asked)
        tl.store(y + tl.cast(token, tl.int64) * (HEADS * VALUE_DIM), out, mask=has_p)
        state = tl.fma(k[:, None], written[None, :], decay * state)
        after = computed + (token - start) + 1
        stored = cast_state(state, pool.dtype.element_ty, seed, after, head * KEY_DIM + n[:, None], p[None, :])
        tl.store(states + slot * slot_stride, stored, mask=only_if(slot != _PAD, is_state))


def delta_verify(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
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
        pool: [slots, value heads, key_dim, value_dim]; each slot is contiguous.
        after_conv: True if the previous launch is the `conv_verify` that computes q, k and v. The kernel then reads
            states before `conv_verify` ends.
        seed: Seed of the layer for stochastic rounding to an fp16 pool; None: round to nearest.

    Returns:
        [tokens, value heads, value_dim] in the dtype of `v`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `delta_verify_ref`, which runs for float64 inputs. CUDA-graph safe: no host sync, one launch, grid fixed
    at capture.
    """
    check_tokens(tokens, gates)
    check_pool(tokens, pool)
    check_decode_batch(rows, pool.device)
    rounding = decode_rounding(rows.computed, pool, seed)
    if not launches_kernel(pool) or not is_computed_in_fp32(tokens.v, pool):
        return delta_verify_ref(tokens, gates, pool, rows, seed)
    y = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        chosen = TILING if seed is None else _FOR_ROUNDING
        _launch(y, tokens, gates, pool, rows, tiling or chosen, rounding, after_conv)
    return y


def _launch(
    y: Tensor,
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    rows: DecodeBatch,
    tiling: VerifyTiling,
    rounding: DecodeRounding | None,
    after_conv: bool,
) -> None:
    num_tokens, heads, value_dim = y.shape
    key_heads, key_dim = tokens.k.shape[1:]
    num_rows, width = rows.accepted.shape[0], min(tiling.width, triton.next_power_of_2(value_dim))
    _delta_verify_kernel[((num_rows + 1) * heads * triton.cdiv(value_dim, width),)](
        y=y,
        tokens=kernel_tokens(tokens),
        gates=KernelGates(gates.A_log, gates.dt_bias),
        pool=pool,
        slot_stride=pool.stride(0),
        rows=_Rows(rows.cu_tokens, rows.columns, rows.accepted),
        rounding=rounding,
        scale=key_dim**-0.5,
        num_rows=num_rows,
        num_tokens=num_tokens,
        columns_stride=rows.columns.stride(0),
        HEADS=heads,
        HEADS_A_KEY=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        READS_EARLY=after_conv,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=True,
        **overlapping(pool.device),
    )
