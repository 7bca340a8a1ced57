"""First rounds of the top-k and top-p search: narrow the range of logits that contains that of the last kept token.

`token_cuts` describes the algorithm. In each round, a program measures one tile of a row: the number or the weight of
the logits at or above each pivot. The last program of the row to finish sums all measures in a fixed order and sets the
next pivots. After the rounds, each tile lists its tokens between the last two pivots.
"""

import triton
import triton.language as tl

from .row_tiles import least_logit, load_logits, row_peak, weights_of

# State of a row's search: upper and lower bound of the last kept logit, measure of the logits at or above the upper
# bound, measure to reach, and a flag that is set once only few tokens are between the bounds.
UPPER, LOWER, ABOVE, TARGET, IS_DONE = (tl.constexpr(index) for index in range(5))
FIELDS = tl.constexpr(5)


@triton.jit
def top_k_drops(top_k, row, vocab_size):
    """Return True if top-k excludes any token of the row."""
    k = tl.load(top_k + row)
    return (k > 1) & (k < vocab_size)


@triton.jit
def top_p_drops(top_p, row):
    """Return True if top-p may exclude tokens of the row."""
    p = tl.load(top_p + row)
    return (p > 0) & (p < 1)


@triton.jit
def is_cut(temperature, top_k, top_p, row, vocab_size):
    """Return True if top-k or top-p may exclude tokens of the row; False for a greedy row."""
    is_greedy = (tl.load(temperature + row) == 0) | (tl.load(top_k + row) == 1)
    return (is_greedy == 0) & (top_k_drops(top_k, row, vocab_size) | top_p_drops(top_p, row))


@triton.jit
def _first_pivots(peak, leasts, temperature, row, num_tiles, PIVOTS: tl.constexpr, TILES: tl.constexpr):
    """Return [PIVOTS] logits in descending order, denser near the largest logit, where most of the weight is."""
    tile = tl.arange(0, TILES)
    least = tl.min(tl.load(leasts + row * num_tiles + tile, mask=tile < num_tiles, other=float("inf")), axis=0)
    least = tl.minimum(tl.maximum(least, least_logit(peak, temperature)), peak)
    part = (tl.arange(0, PIVOTS) + 1).to(tl.float32) / PIVOTS
    part = part * part
    return tl.where(part == 1, least, peak * (1 - part) + least * part)


@triton.jit
def _narrow(
    levels, measures, pivots, searches, top_k, top_p, row, round, peak, temperature, num_tiles, vocab_size,
    FEW: tl.constexpr, PIVOTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sum the tiles' measures for the pivots `levels`, narrow the row's search range, and set its next pivots."""
    tile, pivot, search = tl.arange(0, TILES)[:, None], tl.arange(0, PIVOTS), searches + FIELDS * row
    pointers = (row * num_tiles + tile) * PIVOTS + pivot
    of_tiles = tl.load(measures + pointers, mask=tile < num_tiles, other=0.0, cache_modifier=".cg")
    reached = tl.sum(of_tiles.to(tl.float64), axis=0)
    upper, above = tl.full((), float("inf"), tl.float64), tl.full((), 0.0, tl.float64)
    target = tl.load(top_p + row).to(tl.float64) * tl.max(reached, axis=0)
    counts = top_k_drops(top_k, row, vocab_size)
    if counts:
        target = tl.load(top_k + row).to(tl.float64)
    if round > 0:
        upper, above, target = tl.load(search + UPPER), tl.load(search + ABOVE), tl.load(search + TARGET)
    # If top-k keeps all tokens above -inf, the last kept logit is the lowest of them; several pivots may equal it.
    least = tl.sum(tl.where(pivot == PIVOTS - 1, levels, 0.0), axis=0)
    first = tl.min(tl.where((reached >= target) | (levels <= least), pivot, PIVOTS - 1), axis=0)
    lower = tl.sum(tl.where(pivot == first, levels, 0.0), axis=0)
    if first > 0:
        upper = tl.sum(tl.where(pivot == first - 1, levels, 0.0), axis=0).to(tl.float64)
        above = tl.sum(tl.where(pivot == first - 1, reached, 0.0), axis=0)
    between = tl.sum(tl.where(pivot == first, reached, 0.0), axis=0) - above
    least_weight = tl.where(counts, 1.0, weights_of(lower, peak, temperature)).to(tl.float64)
    tl.store(search + UPPER, upper)
    tl.store(search + LOWER, lower.to(tl.float64))
    tl.store(search + ABOVE, above)
    tl.store(search + TARGET, target)
    tl.store(search + IS_DONE, (between <= FEW * least_weight).to(tl.float64))
    part = (pivot + 1).to(tl.float32) / PIVOTS
    top = tl.minimum(upper, peak.to(tl.float64)).to(tl.float32)
    tl.store(pivots + row * PIVOTS + pivot, tl.where(part == 1, lower, top * (1 - part) + lower * part))


@triton.jit(do_not_specialize=["round"], do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def measure_kernel(
    logits, stride, temperature, top_k, top_p, peaks, leasts, pivots, measures, searches, num_finished, round,
    num_tiles, vocab_size,
    FEW: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, PIVOTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    searched = is_cut(temperature, top_k, top_p, row, vocab_size)
    if round > 0:
        searched = searched & (tl.load(searches + FIELDS * row + IS_DONE) == 0)
    if searched:
        heat = tl.load(temperature + row).to(tl.float32)
        peak, pivot = row_peak(peaks, row, num_tiles, TILES), tl.arange(0, PIVOTS)
        if round == 0:
            levels = _first_pivots(peak, leasts, heat, row, num_tiles, PIVOTS, TILES)
        else:
            levels = tl.load(pivots + row * PIVOTS + pivot)
        counts = top_k_drops(top_k, row, vocab_size)
        result = tl.zeros((PIVOTS, PART), tl.float32)
        for start in range(tile * TILE, tile * TILE + TILE, PART):
            found = load_logits(logits, row, stride, start + tl.arange(0, PART), vocab_size)
            measure = tl.where(counts, 1.0, weights_of(found, peak, heat))
            result += tl.where(found[None, :] >= levels[:, None], measure[None, :], 0.0)
        result = tl.sum(result, axis=1)
        tl.store(measures + (row * num_tiles + tile) * PIVOTS + pivot, result)
        tl.debug_barrier()
        if tl.atomic_add(num_finished + row, 1, sem="acq_rel") == num_tiles - 1:
            _narrow(
                levels, measures, pivots, searches, top_k, top_p, row, round, peak, heat, num_tiles, vocab_size,
                FEW, PIVOTS, TILES,
            )  # fmt: skip
            tl.store(num_finished + row, 0)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def list_kernel(
    logits, stride, temperature, top_k, top_p, peaks, searches, listed, listed_ids, num_listed, tile_weights,
    num_tiles, vocab_size,
    TILE: tl.constexpr, LISTED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    found = load_logits(logits, row, stride, token, vocab_size)
    heat, index = tl.load(temperature + row).to(tl.float32), row * num_tiles + tile
    peak = row_peak(peaks, row, num_tiles, TILES)
    weights = tl.where(found >= least_logit(peak, heat), weights_of(found, peak, heat), 0.0)
    if is_cut(temperature, top_k, top_p, row, vocab_size):
        search = searches + FIELDS * row
        lower, upper = tl.load(search + LOWER).to(tl.float32), tl.load(search + UPPER).to(tl.float32)
        if top_k_drops(top_k, row, vocab_size) & top_p_drops(top_p, row):
            upper = float("inf")
        is_listed = (found >= lower) & (found < upper)
        flags, bits = tl.reshape(is_listed, (TILE // 32, 32)).to(tl.int32), tl.arange(0, 32)
        words, counts = tl.sum(flags << bits[None, :], axis=1), tl.sum(flags, axis=1)
        rank = tl.cumsum(counts, axis=0) - counts
        for _ in range(0, tl.max(counts, axis=0)):  # few tokens are listed, so take one per 32-bit word and iteration
            lowest = words & -words
            bit = (lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            listed_token = tl.where(lowest == 0, vocab_size, tile * TILE + 32 * tl.arange(0, TILE // 32) + bit)
            fits = (lowest != 0) & (rank < LISTED)
            at = index.to(tl.int64) * LISTED + rank
            tl.store(listed + at, load_logits(logits, row, stride, listed_token, vocab_size), mask=fits)
            tl.store(listed_ids + at, listed_token, mask=fits)
            words, rank = words & (words - 1), rank + 1
        tl.store(num_listed + index, tl.sum(counts, axis=0))
        weights = tl.where(found >= upper, weights, 0.0)
    tl.store(tile_weights + index, tl.sum(weights, axis=0))
