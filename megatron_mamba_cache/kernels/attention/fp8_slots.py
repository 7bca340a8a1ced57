"""Kernels of attention over slots of FP8 keys and values, for any GPU; see `fp8_decode`."""

import triton
import triton.language as tl

from ..overlap import await_inputs
from .fp8_decode_hopper import EXPONENT
from .fp8_tiles import ROWS_OF_GROUP

_ROWS, _EXPONENT = tl.constexpr(ROWS_OF_GROUP.value), tl.constexpr(EXPONENT.value)
_LEAST = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["num_requests", "per_group"])
def count_slots_kernel(
    ends, cu_query, kv_lengths, num_requests, per_group, SLOT: tl.constexpr, GROUP: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Write the cumulative numbers of slots of the requests in each group."""
    await_inputs(OVERLAPS)
    number = tl.arange(0, GROUP)
    request = tl.program_id(0) * per_group + number
    exists = (number < per_group) & (request < num_requests)
    query_len = tl.load(cu_query + request + 1, mask=exists, other=0) - tl.load(
        cu_query + request, mask=exists, other=0
    )
    kv_len = tl.load(kv_lengths + request, mask=exists, other=0)
    slots = tl.where(query_len > 0, (kv_len + SLOT - 1) // SLOT, 0)
    tl.store(ends + request, tl.cumsum(slots, axis=0), mask=exists)


@triton.jit
def _decoded(codes):
    """Return the values of e4m3 codes in fp16, exactly; NaN becomes 480."""
    wide = codes.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "most_rows"],
    do_not_specialize_on_alignment=["ends", "cu_query", "kv_lengths", "block_table"],  # of a group of requests
)
def attend_slots_kernel(
    q, k_cache, v_cache, parts, sums, ends, cu_query, kv_lengths, block_table, scale, num_requests, table_stride,
    block_stride, most_rows,
    REQUESTS: tl.constexpr, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SLOT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the mean values and the softmax sums of items. Long because a loop keeps its values in registers."""
    await_inputs(OVERLAPS)
    requests = tl.arange(0, REQUESTS)
    all_ends = tl.load(ends + requests, mask=requests < num_requests, other=2147483647)
    num_tiles = (most_rows + _ROWS - 1) // _ROWS
    num_items = tl.load(ends + num_requests - 1) * KV_HEADS * num_tiles
    kept = tl.minimum(most_rows, _ROWS)
    number = tl.arange(0, _ROWS)
    channel = tl.arange(0, WIDTH)[None, :]
    is_channel = channel < DIM
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        unit = item // num_tiles // KV_HEADS
        head = item // num_tiles % KV_HEADS
        row = item % num_tiles * _ROWS + number
        is_before = all_ends <= unit
        request = tl.sum(is_before.to(tl.int32), axis=0)
        slot = unit - tl.max(tl.where(is_before, all_ends, 0), axis=0)
        start = tl.load(cu_query + request)
        query_len = tl.load(cu_query + request + 1) - start
        kv_len = tl.load(kv_lengths + request)
        table = block_table + request.to(tl.int64) * table_stride
        end = tl.minimum(slot * SLOT + SLOT, kv_len)
        last = tl.minimum(kv_len - query_len + row // QUERIES, end - 1)

        of_row = (row // QUERIES * KV_HEADS + head) * QUERIES + row % QUERIES
        queries = q + start.to(tl.int64) * (KV_HEADS * QUERIES * DIM) + (of_row[:, None] * DIM + channel)
        is_query = (row < query_len * QUERIES)[:, None] & is_channel
        query = tl.load(queries, mask=is_query, other=0.0).to(tl.float32)
        power = tl.max(tl.abs(query), axis=1).to(tl.int32, bitcast=True) & _EXPONENT
        query = (query * (power ^ _EXPONENT).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
        factors = power.to(tl.float32, bitcast=True) * scale

        most = tl.full([_ROWS], _LEAST, tl.float32)
        total = tl.zeros([_ROWS], tl.float32)
        out = tl.zeros([_ROWS, WIDTH], tl.float32)
        for first in range(slot * SLOT, end, TILE):
            position = first + tl.arange(0, TILE)
            exists = position < end
            block = tl.load(table + position // BLOCK, mask=exists, other=0).to(tl.int64)
            offset = block * block_stride + position % BLOCK * (KV_HEADS * DIM) + head * DIM
            is_stored = exists[:, None] & is_channel
            keys = _decoded(tl.load(k_cache + offset[:, None] + channel, mask=is_stored, other=0))
            scores = tl.dot(query, tl.trans(keys)) * factors[:, None]
            scores = tl.where(position[None, :] <= last[:, None], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            weights = tl.exp2(scores - higher[:, None])
            factor = tl.exp2(most - higher)
            most = higher
            total = total * factor + tl.sum(weights, axis=1)
            values = _decoded(tl.load(v_cache + offset[:, None] + channel, mask=is_stored, other=0))
            out = tl.dot(weights.to(tl.float16), values, out * factor[:, None])

        mean = (out / tl.where(total > 0, total, 1.0)[:, None]).to(tl.float16)
        of_item = item * kept + number
        is_kept = number < kept
        tl.store(parts + of_item[:, None] * DIM + channel, mean, mask=is_kept[:, None] & is_channel)
        log = tl.where(total > 0, tl.log2(tl.where(total > 0, total, 1.0)) + most, float("-inf"))
        tl.store(sums + of_item, log, mask=is_kept)


@triton.jit(do_not_specialize=["most_rows"], do_not_specialize_on_alignment=["ends", "cu_query", "kv_lengths"])
def combine_slots_kernel(
    out, parts, sums, ends, cu_query, kv_lengths, value_scale, most_rows,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, SLOT: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, TOGETHER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Combine the items of a query."""
    await_inputs(OVERLAPS)
    request, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(cu_query + request)
    query_len = tl.load(cu_query + request + 1) - start
    token = row // QUERIES
    if token >= query_len:
        return
    num_seen = tl.load(kv_lengths + request) - query_len + token + 1
    num_slots = (tl.maximum(num_seen, 0) + SLOT - 1) // SLOT
    num_tiles = (most_rows + ROWS - 1) // ROWS
    kept = tl.minimum(most_rows, ROWS)
    first = tl.load(ends + request - 1, mask=request > 0, other=0)
    channel = tl.arange(0, WIDTH)[None, :]
    most = -1e30
    total = 0.0
    mean = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, num_slots, TOGETHER):
        slot = begin + tl.arange(0, TOGETHER)
        exists = slot < num_slots
        item = ((first + slot) * KV_HEADS + head) * num_tiles + row // ROWS
        index = item * kept + row % ROWS
        log = tl.load(sums + index, mask=exists, other=float("-inf"))
        found = tl.load(parts + index[:, None] * DIM + channel, mask=exists[:, None] & (channel < DIM), other=0.0)
        higher = tl.maximum(most, tl.max(log, axis=0))
        factor, weights = tl.exp2(most - higher), tl.exp2(log - higher)
        most = higher
        total = total * factor + tl.sum(weights, axis=0)
        mean = mean * factor + tl.sum(found.to(tl.float32) * weights[:, None], axis=0)
    result = mean * (value_scale / tl.where(total > 0, total, 1.0))
    of_row = ((start + token).to(tl.int64) * KV_HEADS + head) * QUERIES + row % QUERIES
    lane = tl.arange(0, WIDTH)
    tl.store(out + of_row * DIM + lane, result.to(out.dtype.element_ty), mask=lane < DIM)
