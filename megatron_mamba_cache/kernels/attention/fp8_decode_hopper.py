"""Attention of few queries over slots of FP8 keys and values on Hopper GPUs, in Gluon.

Each of four warps attends to its own tokens of a tile. While a tile is computed, the next ones are copied to shared
memory, also those of the next item; threads read back the codes that they copied. Products are fp16 with fp32 sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ..gluon_common import await_launcher, release, thread_barrier
from .fp8_tiles import (
    ROWS_OF_GROUP,
    copy_tile,
    counter_layout,
    decoded_keys,
    decoded_values,
    in_order,
    key_layout,
    result_layout,
    run_of,
    value_layout,
)

EXPONENT = gl.constexpr(0x7F000000)
"""The exponent bits of an fp32 number but the lowest: those of a power of two, whose inverse has the others."""
_WARPS = gl.constexpr(4)
_STAGES = gl.constexpr(2)
_LEAST = gl.constexpr(-1e30)


@gluon.jit
def _block_of(table, begin, end, BLOCK: gl.constexpr):
    """Return the block of the token at each warp's position `begin`; 0 unless it is before `end`."""
    return gl.load(table + begin // BLOCK, mask=begin < end, other=0)


@gluon.jit
def _located(
    item, num_items, all_ends, cu_query, kv_lengths, num_tiles, KV_HEADS: gl.constexpr, SLOT: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Return an item's request, KV head, first row, first position and the one after its last; none if there is none.

    Also return the first query token, the number of query tokens and the KV length of the request.
    """
    exists = item < num_items
    item = gl.minimum(item, num_items - 1)
    unit = item // num_tiles // KV_HEADS
    is_before = all_ends <= unit
    request = gl.sum(is_before.to(gl.int32), axis=0)
    first = (unit - gl.max(gl.where(is_before, all_ends, 0), axis=0)) * SLOT
    start = gl.load(cu_query + request)
    query_len = gl.load(cu_query + request + 1) - start
    kv_len = gl.load(kv_lengths + request)
    end = gl.where(exists, gl.minimum(first + SLOT, kv_len), 0)
    head = item // num_tiles % KV_HEADS
    return request, head, item % num_tiles * ROWS, first, end, start, query_len, kv_len


@gluon.jit
def _load_queries(
    q, row, head, start, query_len, KV_HEADS: gl.constexpr, QUERIES: gl.constexpr, DIM: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Load the queries [rows, dim] from `row` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // min(32, DIM // 8), min(32, DIM // 8)], [4 * GROUPS, 1], [1, 0]
    )
    row += gl.arange(0, GROUPS * ROWS_OF_GROUP, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    of_row = (row // QUERIES * KV_HEADS + head) * QUERIES + row % QUERIES
    queries = q + start.to(gl.int64) * (KV_HEADS * QUERIES * DIM) + (of_row * DIM + channel)
    return gl.load(queries, mask=row < query_len * QUERIES, other=0.0)


@gluon.jit
def _put_queries(shared, query, SCORES: gl.constexpr):
    """Put queries [rows, dim], divided by powers of two, in shared memory; return the powers [1, rows, 1]."""
    rows: gl.constexpr = query.shape[0]
    dim: gl.constexpr = query.shape[1]
    query = query.to(gl.float32)
    power = gl.max(gl.abs(query), axis=1).to(gl.int32, bitcast=True) & EXPONENT
    query = (query * (power ^ EXPONENT).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
    query = query.reshape([rows, dim // 64, 4, 8, 2]).permute([0, 1, 3, 2, 4])  # the order of tensor cores' inputs
    shared.store(query.reshape([rows, dim]))
    thread_barrier()
    return gl.convert_layout(power.to(gl.float32, bitcast=True), gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))[
        None, :, None
    ]


@gluon.jit
def _query_part(shared, PART: gl.constexpr, DIM: gl.constexpr, SCORES: gl.constexpr):
    """Return up to 128 channels of the queries as a left operand, in the order of a tensor core's inputs."""
    WIDTH: gl.constexpr = min(DIM, 128)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    rows: gl.constexpr = shared.shape[0]
    part = shared.slice(PART * WIDTH, WIDTH, 1).load(gl.SliceLayout(0, LEFT))
    same, _ = gl.broadcast(gl.expand_dims(part, 0), gl.zeros([4, rows, WIDTH], gl.float16, layout=LEFT))
    return same


@gluon.jit
def _scores(shared, words, DIM: gl.constexpr, SCORES: gl.constexpr):
    """Return products [4, rows, run] of queries and keys; two sums are shorter chains of products than one."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    run: gl.constexpr = words.shape[1]
    rows: gl.constexpr = shared.shape[0]
    nothing = gl.zeros([4, rows, run], gl.float32, layout=SCORES)
    if DIM > 128:
        first, second = words.reshape([4, run, 2, DIM // 8]).permute([0, 1, 3, 2]).split()
        scores = mma_v2(_query_part(shared, 0, DIM, SCORES), decoded_keys(first, RIGHT), nothing)
        scores += mma_v2(_query_part(shared, 1, DIM, SCORES), decoded_keys(second, RIGHT), nothing)
    else:
        scores = mma_v2(_query_part(shared, 0, DIM, SCORES), decoded_keys(words, RIGHT), nothing)
    return scores


@gluon.jit
def _put_mean(parts, gathered, out, divisor, item, kept, FIRST: gl.constexpr, DIM: gl.constexpr, GROUPS: gl.constexpr):
    """Add the warps' sums [4, rows, width] of the channels from FIRST on; store the mean values."""
    width: gl.constexpr = out.shape[2]
    RESULT: gl.constexpr = result_layout(width, GROUPS)
    gathered.store(out)
    thread_barrier()
    mean = gl.sum(gathered.load(RESULT), axis=0)  # [rows, width]
    divisor = gl.convert_layout(divisor, gl.SliceLayout(1, gl.SliceLayout(0, RESULT)))
    row = gl.arange(0, GROUPS * ROWS_OF_GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(0, RESULT)))[:, None]
    channel = FIRST + gl.arange(0, width, layout=gl.SliceLayout(0, gl.SliceLayout(0, RESULT)))[None, :]
    pointers = parts + item * kept * DIM + (row * DIM + channel)
    gl.store(pointers, (mean * (256.0 / divisor)[:, None]).to(gl.float16), mask=row < kept)


@gluon.jit
def _put_item(parts, sums, gathered, most, total, out, item, kept, DIM: gl.constexpr, GROUPS: gl.constexpr):
    """Add the warps' results [4, rows, dim]; store the mean values and the log2 of the softmax sums."""
    factor = gl.exp2(most - gl.max(most, axis=0, keep_dims=True))
    out = in_order(out * factor[:, :, None])
    # The warps' sums in a thread, so that they are added in the same order for any number of rows.
    IN_THREAD: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 4 * GROUPS], [1, 0])
    total = gl.sum(gl.convert_layout(total * factor, IN_THREAD), axis=0)
    highest = gl.convert_layout(gl.max(most, axis=0), gl.SliceLayout(0, IN_THREAD))
    divisor = gl.where(total > 0, total, 1.0)
    if DIM > 128:
        first, second = out.reshape([4, GROUPS * ROWS_OF_GROUP, 2, DIM // 2]).permute([0, 1, 3, 2]).split()
        _put_mean(parts, gathered, first, divisor, item, kept, 0, DIM, GROUPS)
        _put_mean(parts, gathered, second, divisor, item, kept, DIM // 2, DIM, GROUPS)
    else:
        _put_mean(parts, gathered, out, divisor, item, kept, 0, DIM, GROUPS)
    log = gl.where(total > 0, gl.log2(total) + highest, float("-inf"))
    sum_row = gl.arange(0, GROUPS * ROWS_OF_GROUP, layout=log.type.layout)
    gl.store(sums + item * kept + sum_row, log, mask=sum_row < kept)


@gluon.jit(
    do_not_specialize=["num_requests", "table_stride", "most_rows"],
    do_not_specialize_on_alignment=["ends", "cu_query", "kv_lengths", "block_table"],  # of a group of requests
)
def attend_slots_hopper_kernel(
    q, k_cache, v_cache, parts, sums, ends, cu_query, kv_lengths, block_table, scale, num_requests, table_stride,
    block_stride, most_rows,
    REQUESTS: gl.constexpr, KV_HEADS: gl.constexpr, QUERIES: gl.constexpr, DIM: gl.constexpr, BLOCK: gl.constexpr,
    SLOT: gl.constexpr, GROUPS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Hopper form of `attend_slots_kernel`. Long because a loop keeps its values in registers."""
    release(OVERLAPS)
    await_launcher(OVERLAPS)
    ROWS: gl.constexpr = GROUPS * ROWS_OF_GROUP
    RUN: gl.constexpr = run_of(DIM)
    TILE: gl.constexpr = _WARPS * RUN
    STRIDE: gl.constexpr = KV_HEADS * DIM // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, GROUPS, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, SCORES))
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SCORES))
    COUNTER: gl.constexpr = counter_layout(REQUESTS, GROUPS)

    KEYS: gl.constexpr = key_layout(RUN, DIM, GROUPS)
    VALUES: gl.constexpr = value_layout(RUN, DIM, GROUPS)
    STAGED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    key_stages = gl.allocate_shared_memory(gl.int32, [_STAGES, _WARPS, RUN, DIM // 4], STAGED)
    value_stages = gl.allocate_shared_memory(gl.int32, [_STAGES, _WARPS, RUN, DIM // 4], STAGED)
    gathered = gl.allocate_shared_memory(gl.float32, [_WARPS, ROWS, min(DIM, 128)], STAGED)
    shared = gl.allocate_shared_memory(gl.float16, [ROWS, DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    requests = gl.arange(0, REQUESTS, layout=COUNTER)
    all_ends = gl.load(ends + requests, mask=requests < num_requests, other=2147483647)
    num_tiles = (most_rows + ROWS - 1) // ROWS
    num_items = gl.load(ends + num_requests - 1) * KV_HEADS * num_tiles
    if num_items == 0:
        return
    kept = gl.minimum(most_rows, ROWS)
    warp_first = gl.arange(0, 4, layout=OF_WARP) * RUN
    run_token = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))

    now = _located(gl.program_id(0), num_items, all_ends, cu_query, kv_lengths, num_tiles, KV_HEADS, SLOT, ROWS)
    item = gl.program_id(0) + gl.num_programs(0)
    then = _located(item, num_items, all_ends, cu_query, kv_lengths, num_tiles, KV_HEADS, SLOT, ROWS)
    query = _load_queries(q, now[2], now[1], now[5], now[6], KV_HEADS, QUERIES, DIM, GROUPS)
    for stage in gl.static_range(_STAGES):
        begin = now[3] + stage * TILE + warp_first
        block = _block_of(block_table + now[0].to(gl.int64) * table_stride, begin, now[4], BLOCK)
        base = block.to(gl.int64) * block_stride + (begin % BLOCK * STRIDE + now[1] * (DIM // 4))
        copy_tile(key_stages.index(stage), k_cache, base, begin, now[4], STRIDE, KEYS)
        copy_tile(value_stages.index(stage), v_cache, base, begin, now[4], STRIDE, VALUES)
    stage = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        request, head, row, first, end, _, query_len, kv_len = now
        factors = _put_queries(shared, query, SCORES) * (scale * 256.0)
        query = _load_queries(q, then[2], then[1], then[5], then[6], KV_HEADS, QUERIES, DIM, GROUPS)
        own_row = row + gl.arange(0, ROWS, layout=OF_ROW)
        last = gl.minimum(kv_len - query_len + own_row // QUERIES, end - 1)[None, :, None]
        num_left = gl.maximum((end - first + TILE - 1) // TILE, _STAGES)
        later = _located(
            item + 2 * gl.num_programs(0), num_items, all_ends, cu_query, kv_lengths, num_tiles, KV_HEADS, SLOT, ROWS
        )

        most = gl.full([4, ROWS], _LEAST, gl.float32, layout=gl.SliceLayout(2, SCORES))
        total = gl.zeros([4, ROWS], gl.float32, layout=gl.SliceLayout(2, SCORES))
        out = gl.zeros([4, ROWS, DIM], gl.float32, layout=SCORES)
        for tile in range(num_left):
            ahead = tile + _STAGES - num_left  # not negative: the number of a tile of the next item
            is_then = ahead >= 0
            begin = gl.where(is_then, then[3] + ahead * TILE, first + (tile + _STAGES) * TILE) + warp_first
            copied_end = gl.where(is_then, then[4], end)
            table = block_table + gl.where(is_then, then[0], request).to(gl.int64) * table_stride
            block = _block_of(table, begin, copied_end, BLOCK)
            base = block.to(gl.int64) * block_stride
            base += begin % BLOCK * STRIDE + gl.where(is_then, then[1], head) * (DIM // 4)
            async_copy.wait_group(2 * _STAGES - 1)
            scores = _scores(shared, key_stages.index(stage).load(KEYS), DIM, SCORES)
            copy_tile(key_stages.index(stage), k_cache, base, begin, copied_end, STRIDE, KEYS)
            position = (first + tile * TILE + warp_first)[:, None, None] + run_token[None, None, :]
            scores = gl.where(position <= last, scores * factors, float("-inf"))
            higher = gl.maximum(most, gl.max(scores, axis=2))
            weights = gl.exp2(scores - higher[:, :, None])
            factor = gl.exp2(most - higher)
            most = higher
            total = total * factor + gl.sum(weights, axis=2)
            weights = gl.convert_layout(weights.to(gl.float16), LEFT, assert_trivial=True)
            async_copy.wait_group(2 * _STAGES - 1)
            values = decoded_values(value_stages.index(stage).load(VALUES), RIGHT)
            out = mma_v2(weights, values, out * factor[:, :, None])
            copy_tile(value_stages.index(stage), v_cache, base, begin, copied_end, STRIDE, VALUES)
            stage = (stage + 1) % _STAGES
        _put_item(parts, sums, gathered, most, total, out, item, kept, DIM, GROUPS)
        now, then = then, later
    async_copy.wait_group(0)
