"""Choose the step shapes that are captured as CUDA graphs."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..config import CacheConfig
from .buffers import StepLimits
from .shapes import StepShape


def engine_shapes(
    config: CacheConfig, limits: StepLimits, most_launched: int | None, *, is_shared: bool
) -> list[StepShape]:
    """Return the shapes to capture for an engine; see `prefill_shapes`. None as `most_launched` sets no limit."""
    count, max_requests, most_tokens = config.num_cuda_graphs, config.max_requests, config.most_graph_tokens
    shapes = decode_shapes(count, max_requests, limits.max_drafts, limits.max_tokens, room=limits.max_requests)
    most_launched = most_launched or most_tokens
    return shapes + prefill_shapes(most_tokens, max_requests, limits.max_tokens, most_launched, is_shared=is_shared)


def draft_shapes(config: CacheConfig, limits: StepLimits, most_launched: int | None) -> list[StepShape]:
    """Return the shapes to capture for a draft model. Its steps contain only prefill requests.

    A drafting round first computes the tokens that each request gained since the last round, usually a few. Each
    further step computes one draft token per request. Prompts use the shapes for many requests. `most_launched` limits
    the number of tokens, as in `prefill_shapes`; None sets no limit.
    """
    max_requests, most_tokens = config.max_requests, config.most_graph_tokens
    most_tokens = min(most_tokens, most_launched or most_tokens)
    numbers = batch_sizes(config.num_cuda_graphs, max_requests)
    shapes = {
        StepShape(0, 1, num_requests, num_requests * tokens_each)
        for num_requests in numbers
        for tokens_each in _TOKENS_A_ROUND
    }
    shapes |= set(
        _shapes_after((0,), min(_MANY_REQUESTS, max_requests), _sizes_of_many, most_tokens, limits.max_tokens)
    )
    return sorted(shape for shape in shapes if shape.num_tokens <= limits.max_tokens)


def decode_shapes(count: int, max_requests: int, max_drafts: int, max_tokens: int, room: int = 0) -> list[StepShape]:
    """Return decode shapes for about `count` batch sizes, each with no drafts and with `max_drafts`.

    Args:
        max_requests: Maximum number of running requests.
        room: Maximum number of requests in a shape, padding included. If GEMMs are slow for a shape's number of tokens
            (see `_is_slow`), the shape gets one more request, within this limit.
    """
    shapes = []
    for width in sorted({1, 1 + max_drafts}):
        most = max_tokens // width
        numbers = batch_sizes(count, min(max_requests, most))
        adds_one = (num_requests < min(room, most) and _is_slow(num_requests * width) for num_requests in numbers)
        shapes += sorted(
            {StepShape(num_requests + adds, width) for num_requests, adds in zip(numbers, adds_one, strict=True)}
        )
    return shapes


def prefill_shapes(
    most_tokens: int, max_requests: int, max_tokens: int, most_launched: int, *, is_shared: bool = False
) -> list[StepShape]:
    """Return shapes of up to `most_tokens` prompt tokens, with few and with many prefill requests.

    Few prefill requests get their own shapes, because the scan then uses more thread blocks per request. These shapes
    have no decode requests, some or all. "Some" means about an eighth of `max_requests`; the number is odd to avoid
    slow GEMM sizes, see `_is_slow`. Shapes with many prefill requests serve bursts of prompts: there are fewer of them,
    and each has decode requests. A shape may have up to `most_padding_requests` more requests than can run.

    Args:
        most_launched: Number of tokens up to which launching a step takes longer than computing it. Above it, padding
            costs more than a graph saves, so no shape with many requests is larger.
        is_shared: True if expert-parallel ranks run steps of the same shape. One rank may have `max_requests` decode
            requests while another has prompts, so "all" then means `max_requests`, or one more to make it odd.
    """
    few, many = _few_and_many(max_requests)
    some = (max_requests // _PART - 1) | 1 if max_requests >= _PART * _FEW_REQUESTS else 0
    alongside_few, alongside_many = (max_requests | 1,) * 2 if is_shared else (max_requests - 1, max_requests - few - 1)
    shapes = list(_shapes_after((0, some, alongside_few), few, _sizes_of_few, most_tokens, max_tokens))
    fullest = StepShape(max_requests - 1, 1, few, min(most_tokens, max_tokens - (max_requests - 1)))
    if is_shared and fullest.num_prefill_tokens > max(few - 1, max_tokens - alongside_few) and fullest not in shapes:
        shapes.append(fullest)  # the largest step of a single rank
    if many > few:
        after, most_tokens = {some or alongside_many, alongside_many}, min(most_tokens, most_launched)
        shapes += _shapes_after(after, many, _sizes_of_many, most_tokens, max_tokens)
    return shapes


def most_padding_requests(max_requests: int, *, is_shared: bool = False) -> int:
    """Return by how many requests a shape from `prefill_shapes` may exceed `max_requests`."""
    few, many = _few_and_many(max_requests)
    return many + 1 if is_shared else max(few - 1, many - few - 1)


_FEW_REQUESTS, _MANY_REQUESTS = 4, 32
_TOKENS_A_ROUND = (1, 4, 8)
_PART = 8  # "some" decode requests are about 1 / 8 of all
_SMALL_SIZES_OF_FEW = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792)
_SMALL_SIZES_OF_MANY = (256, 512, 768, 1024, 1280, 1536, 1792)
_SIZE_STEP = 512
_LEAST_WHOLE_STEP = 4096
_FAST_TOTALS = (351, 447, 639, 895)
_LEAST_LARGER = 24  # minimum distance between sizes, in prompt tokens


def _few_and_many(max_requests: int) -> tuple[int, int]:
    """Return the number of prefill requests in shapes with few and with many; equal if `max_requests` is small."""
    return min(_FEW_REQUESTS, max_requests), min(_MANY_REQUESTS, max_requests)


def _shapes_after(
    decode_counts: Iterable[int],
    num_prefill_requests: int,
    sizes: Callable[[int, int], Iterable[int]],
    most_tokens: int,
    max_tokens: int,
) -> Iterator[StepShape]:
    """Yield shapes with the given number of prefill requests, for each number of decode requests."""
    for num_decode in sorted(set(decode_counts)):
        for size in sizes(min(most_tokens, max_tokens - num_decode), num_decode):
            if size >= num_prefill_requests:
                yield StepShape(num_decode, 1, num_prefill_requests, size)


def _sizes_of_few(most_tokens: int, num_decode: int) -> list[int]:
    """Return prompt-token counts for few requests: dense for small steps, then 512 apart, wider from 4,096 on.

    Some counts are added so that the step's total, decode requests included, is one of `_FAST_TOTALS`. GEMMs over 351
    tokens take 0.86 of the time for 384 tokens, and 447 tokens 0.86 of the time for 512. GEMMs over 639 and 895 tokens
    take 0.84 to 0.85 of the time for 768 and 1,024 (8B model, H100).
    """
    regular = list(_regular_sizes(_SMALL_SIZES_OF_FEW, most_tokens))
    between = [total - num_decode for total in _FAST_TOTALS if total - num_decode > regular[0]]
    for size in between:
        if min((other - size for other in regular if other >= size), default=0) >= _LEAST_LARGER:
            regular.append(size)
    return _without_slow_totals(regular, most_tokens, num_decode)


def _sizes_of_many(most_tokens: int, num_decode: int) -> list[int]:
    """Return prompt-token counts for many requests: 256 apart, 512 apart from 2,048 on, wider from 4,096 on."""
    return _without_slow_totals(_regular_sizes(_SMALL_SIZES_OF_MANY, most_tokens), most_tokens, num_decode)


def _regular_sizes(small: Sequence[int], most_tokens: int) -> Iterator[int]:
    """Yield the small sizes, then multiples of `_SIZE_STEP`, the sizes from `_whole_steps`, and `most_tokens`."""
    sizes = (*small, *range(small[-1] + _SIZE_STEP // 2, _LEAST_WHOLE_STEP, _SIZE_STEP))
    yield from (size for size in sizes if size < most_tokens)
    yield from _whole_steps(most_tokens)
    yield most_tokens


def _whole_steps(most_tokens: int) -> Iterator[int]:
    """Yield sizes from `_LEAST_WHOLE_STEP` on, each at most a quarter larger than the previous."""
    size = _LEAST_WHOLE_STEP
    while size < most_tokens:
        yield size
        size += 2 ** (size.bit_length() - 1) // 4


def _without_slow_totals(sizes: Iterable[int], most_tokens: int, num_decode: int) -> list[int]:
    """Return sorted sizes; reduce each size except the largest by one if its total number of tokens is slow."""
    return sorted({size - (size < most_tokens and _is_slow(num_decode + size)) for size in sizes})


def _is_slow(num_tokens: int) -> bool:
    """Return whether GEMMs over this number of tokens are slower than with one token more or less.

    GEMMs over 448 tokens take 15.1 ms, but 9.8 ms over 447 tokens and 10.3 ms over 449; 415 tokens take 0.83 of the
    time for 416 (8B model, H100). From 320 on, every measured multiple of 32 is slow unless it is a multiple of 128.
    """
    return 320 <= num_tokens <= 1056 and num_tokens % 32 == 0 and num_tokens % 128 != 0


def batch_sizes(count: int, max_requests: int) -> list[int]:
    """Return up to `count` batch sizes that grow by a constant factor and end with `max_requests`.

    Sizes above 8 are rounded up to multiples of 8, which does not make a step slower.
    """
    if not max_requests:
        return []
    numbers = [round(float(number)) for number in np.geomspace(1, max_requests, count)] if count > 1 else [max_requests]
    return sorted({min(number if number <= 8 else -(-number // 8) * 8, max_requests) for number in numbers})
