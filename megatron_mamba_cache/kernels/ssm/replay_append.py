"""Append x of a step's tokens to their rows' rings."""

import triton
import triton.language as tl

from ..masks import only_if
from ..prefill_rows import PAD_SLOT

_PAD = tl.constexpr(PAD_SLOT)


@triton.jit
def append_input(
    odd, tokens, ring, rows, program, max_tokens, CHANNELS: tl.constexpr, CAPACITY: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Copy some channels of x of a row's token to the ring; note whether any of it is infinite or NaN."""
    CHUNKS: tl.constexpr = (CHANNELS + AT_ONCE - 1) // AT_ONCE
    chunk = program % CHUNKS
    t = program // CHUNKS % max_tokens
    row = program // CHUNKS // max_tokens
    start = tl.load(rows.cu_tokens + row)
    exists = (t < tl.load(rows.cu_tokens + row + 1) - start) & (tl.load(rows.slots + row) != _PAD)
    channel = chunk * AT_ONCE + tl.arange(0, AT_ONCE)
    has_channel = only_if(exists, channel < CHANNELS)
    x = tl.load(tokens.x + (start + t).to(tl.int64) * tokens.x_stride + channel, mask=has_channel, other=0.0)
    place = (tl.load(rows.computed + row) + t) % CAPACITY
    target = ring.x + tl.load(rows.rings + row).to(tl.int64) * ring.x_ring + place * ring.x_place
    tl.store(target + channel, x, mask=has_channel)
    tl.store(odd + program, tl.max((x.to(tl.float32) * 0.0 != 0.0).to(tl.int32), axis=0))
