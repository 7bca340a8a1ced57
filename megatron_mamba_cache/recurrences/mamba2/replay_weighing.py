"""The factors of a row and some heads of a group, of their checkpoint and of the tokens behind it.

Called from inside `replay_coefficients`' kernel.
"""

import triton
import triton.language as tl

from ...kernels.masks import only_if
from ...kernels.overlap import await_then_release
from ..prefill_rows import PAD_SLOT
from .time_steps import time_step

_PAD = tl.constexpr(PAD_SLOT)


@triton.jit
def _scores(c, b):
    """Return the products [c's tokens, b's tokens]; those of bf16 or fp16 are exact, and summed in float32."""
    if c.shape[0] == 1:
        return tl.sum(c.to(tl.float32) * b.to(tl.float32), axis=1)[None, :]
    if c.dtype == b.dtype and c.dtype != tl.float32:
        return tl.trans(tl.dot(b, tl.trans(c)))
    return tl.trans(tl.dot(b.to(tl.float32), tl.trans(c.to(tl.float32)), input_precision="ieee"))


@triton.jit
def weigh(
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
    """Compute the factors of a row and some heads of a group; append their time steps, and B.

    Long because all factors follow from the same few values in registers.
    """
    if not READS_EARLY:
        await_then_release(OVERLAPS)
    HEADS_A_GROUP: tl.constexpr = HEADS // GROUPS
    BLOCKS: tl.constexpr = (HEADS_A_GROUP + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % BLOCKS
    group = tl.program_id(0) // BLOCKS % GROUPS
    row = tl.program_id(0) // (BLOCKS * GROUPS)
    is_row = row < num_rows
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    slot = tl.load(rows.slots + row, mask=is_row, other=_PAD)
    is_live = slot != _PAD
    number = tl.load(rows.rings + row, mask=is_live, other=0).to(tl.int64)
    folded = tl.load(rows.folded + row, mask=is_live, other=0)
    computed = tl.load(rows.computed + row, mask=is_live, other=0)

    # A matrix product has at least 16 rows.
    PLACES: tl.constexpr = RING if TOKENS == 1 or RING > 16 else 16
    SOURCES: tl.constexpr = TOKENS if TOKENS == 1 or TOKENS > 16 else 16
    first = tl.maximum(folded, computed // RING * RING)
    kept = computed - first  # tokens of the ring that no fold has reached, fewer than RING
    count = end - start
    h = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, triton.next_power_of_2(D_STATE) if D_STATE > 16 else 16)
    w = tl.arange(0, PLACES)
    u = tl.arange(0, SOURCES)
    t = tl.arange(0, TOKENS)
    has_h = (h < HEADS_A_GROUP)[:, None]
    has_n = (n < D_STATE)[None, :]
    head = group * HEADS_A_GROUP + h
    places = (first + w) % CAPACITY
    new_places = (computed + u) % CAPACITY
    is_kept = has_h & (w < kept)[None, :]
    is_source = has_h & only_if(is_live, u < count)[None, :]
    is_target = has_h & only_if(is_live, t < count)[None, :]

    steps = ring.steps + number * ring.steps_ring + head
    kept_steps = steps[:, None] + places[None, :] * ring.steps_place
    kept_dt = tl.load(kept_steps, mask=is_kept, other=0.0)  # [heads, PLACES]
    kept_decay = tl.load(kept_steps + HEADS, mask=is_kept, other=0.0).to(tl.float64)
    dt = tokens.dt + head[:, None]
    new_dt = tl.load(dt + (start + u).to(tl.int64)[None, :] * tokens.dt_stride, mask=is_source, other=0.0)
    own_dt = tl.load(dt + (start + t).to(tl.int64)[None, :] * tokens.dt_stride, mask=is_target, other=0.0)
    A = -tl.exp(tl.load(weights.A_log + head, mask=h < HEADS_A_GROUP, other=0.0).to(tl.float32))[:, None]
    skip = tl.load(weights.D + head, mask=h < HEADS_A_GROUP, other=0.0).to(tl.float32)
    bias = tl.load(weights.dt_bias + head, mask=h < HEADS_A_GROUP, other=0.0)[:, None]
    ring_b = ring.B + number * ring.B_ring + group * D_STATE + n[None, :]
    kept_b = tl.load(ring_b + places[:, None] * ring.B_place, mask=(w < kept)[:, None] & has_n, other=0.0)
    new_dt = tl.where(is_source, time_step(new_dt, bias, weights.dt_min, weights.dt_max), 0.0)
    own_dt = tl.where(is_target, time_step(own_dt, bias, weights.dt_min, weights.dt_max), 0.0)
    before = tl.sum(kept_decay, axis=1)[:, None]
    until_kept = tl.cumsum(kept_decay, axis=1)
    until_source = before + tl.cumsum((new_dt * A).to(tl.float64), axis=1)
    until_target = before + tl.cumsum((own_dt * A).to(tl.float64), axis=1)
    of_checkpoint = tl.exp(until_target.to(tl.float32))
    of_kept = tl.exp((until_target[:, :, None] - until_kept[:, None, :]).to(tl.float32)) * kept_dt[:, None, :]
    is_same = (t[:, None] == u[None, :])[None, :, :]
    of_new = (until_target[:, :, None] - until_source[:, None, :]).to(tl.float32)
    of_new = tl.where(is_same, 1.0, tl.exp(of_new)) * new_dt[:, None, :]  # [heads, TOKENS, SOURCES]

    if READS_EARLY:
        await_then_release(OVERLAPS)
    if slot == _PAD:
        channel = tl.arange(0, triton.next_power_of_2(BLOCK * HEAD_DIM))
        has_channel = (channel < BLOCK * HEAD_DIM) & (block * BLOCK * HEAD_DIM + channel < HEADS_A_GROUP * HEAD_DIM)
        channel += (group * HEADS_A_GROUP + block * BLOCK) * HEAD_DIM
        for token in range(start, end):
            at = tl.cast(token, tl.int64) * (HEADS * HEAD_DIM)
            tl.store(y + at + channel, tl.zeros_like(channel).to(y.dtype.element_ty), mask=has_channel)
        return

    in_group = group * D_STATE + n[None, :]
    new_b = tokens.B + (start + u).to(tl.int64)[:, None] * tokens.B_stride + in_group
    new_b = tl.load(new_b, mask=(u < count)[:, None] & has_n, other=0.0)  # [SOURCES, d_state]
    c = tokens.C + (start + t).to(tl.int64)[:, None] * tokens.C_stride + in_group
    c = tl.load(c, mask=(t < count)[:, None] & has_n, other=0.0)  # [TOKENS, d_state]
    if block == 0:
        tl.store(ring_b + new_places[:, None] * ring.B_place, new_b, mask=(u < count)[:, None] & has_n)
    new_steps = steps[:, None] + new_places[None, :] * ring.steps_place
    tl.store(new_steps, new_dt, mask=is_source)
    tl.store(new_steps + HEADS, new_dt * A, mask=is_source)

    line = (tl.cast(row, tl.int64) * max_tokens + t)[None, :] * HEADS + head[:, None]
    tl.store(checkpoint_factors + line, of_checkpoint, mask=is_target)
    lines = input_factors + line[:, :, None] * (RING + OWN)
    of_kept *= _scores(c, kept_b)[None, :, :]  # [heads, TOKENS, PLACES]
    tl.store(lines + w[None, None, :], of_kept, mask=is_target[:, :, None] & (w < RING)[None, None, :])
    of_new *= _scores(c, new_b)[None, :, :]
    of_new = tl.where(is_same, of_new + skip[:, None, None], of_new)
    of_new = tl.where((t[:, None] >= u[None, :])[None, :, :], of_new, 0.0)
    tl.store(lines + RING + u[None, None, :], of_new, mask=is_target[:, :, None] & (u < OWN)[None, None, :])
