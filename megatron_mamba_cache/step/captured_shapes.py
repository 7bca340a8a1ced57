"""Choose the step shapes that are captured as CUDA graphs."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..config import CacheConfig
from .buffers import StepLimits
from .shapes import StepShape


def engine_shapes(
    config: CacheConfig, limits: StepLimits, most_launched: int | None, *, is_shared: bool
) -> list[StepShape]:
    """Return the shapes of an engine's steps; `most_launched` and `is_shared` as in `prefill_shapes`."""
    count, max_requests, most_tokens = config.num_cuda_graphs, config.max_requests, config.most_graph_tokens
    shapes = decode_shapes(count, max_requests, limits.max_drafts, limits.max_tokens, room=limits.max_requests)
    most_launched = most_launched or most_tokens
    return shapes + prefill_shapes(most_tokens, max_requests, limits.max_tokens, most_launched, is_shared=is_shared)


def draft_shapes(config: CacheConfig, limits: StepLimits, most_launched: int | None) -> list[StepShape]:
    """Return the shapes of a draft model's steps, whose requests all prefill; `most_launched` as in `prefill_shapes`.

    A round begins with the tokens that each request got since the last round, usually few, and goes on with one draft
    of each request at a time. Prompts take the shapes of many requests.
    """
    max_requests, most_tokens = config.max_requests, config.most_graph_tokens
    most_tokens = min(most_tokens, most_launched or most_tokens)
    numbers = _batch_sizes(config.num_cuda_graphs, max_requests)
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
    """Return shapes to capture: about `count` numbers of requests, each without drafts and with `max_drafts`.

    Args:
        max_requests: The most requests that run.
        room: Requests that a shape may have, if more. A shape with a slow number of tokens gets one padding request.
    """
    shapes = []
    for width in sorted({1, 1 + max_drafts}):
        most = max_tokens // width
        numbers = _batch_sizes(count, min(max_requests, most))
        adds_one = (num_requests < min(room, most) and _is_slow(num_requests * width) for num_requests in numbers)
        shapes += sorted(
            {StepShape(num_requests + adds, width) for num_requests, adds in zip(numbers, adds_one, strict=True)}
        )
    return shapes


def prefill_shapes(
    most_tokens: int, max_requests: int, max_tokens: int, most_launched: int, *, is_shared: bool = False
) -> list[StepShape]:
    """Return shapes of up to `most_tokens` prompt tokens, with few and with many prefill requests.

    Few prefill requests have shapes without decode requests, with some and with all. They do not use those of many,
    because the scan spreads few requests over more of the device. Many prefill requests come in bursts: their shapes
    have fewer sizes, and always have decode requests. A shape may exceed the requests that can run by
    `most_padding_requests`.

    An odd number of decode requests is best, see `_is_slow`. "Some" is the largest odd number within an eighth of all.

    Args:
        most_launched: Tokens of a step up to which the host takes longer to launch it than the GPU to compute it.
            Beyond, padding costs more than a graph gains: shapes of many requests end there.
        is_shared: True if ranks that share experts take steps of the same shape, which has the decode requests of one
            rank and the prompts of another: "all" are then as many as can run, or one more.
    """
    few, many = _few_and_many(max_requests)
    some = (max_requests // _PART - 1) | 1 if max_requests >= _PART * _FEW_REQUESTS else 0
    alongside_few, alongside_many = (max_requests | 1,) * 2 if is_shared else (max_requests - 1, max_requests - few - 1)
    shapes = list(_shapes_after((0, some, alongside_few), few, _sizes_of_few, most_tokens, max_tokens))
    fullest = StepShape(max_requests - 1, 1, few, min(most_tokens, max_tokens - (max_requests - 1)))
    if is_shared and fullest.num_prefill_tokens > max(few - 1, max_tokens - alongside_few) and fullest not in shapes:
        shapes.append(fullest)  # of one rank alone
    if many > few:
        after, most_tokens = {some or alongside_many, alongside_many}, min(most_tokens, most_launched)
        shapes += _shapes_after(after, many, _sizes_of_many, most_tokens, max_tokens)
    return shapes


def most_padding_requests(max_requests: int, *, is_shared: bool = False) -> int:
    """Return how many padding requests a shape of `prefill_shapes` may have beyond `max_requests`."""
    few, many = _few_and_many(max_requests)
    return many + 1 if is_shared else max(few - 1, many - few - 1)


_FEW_REQUESTS, _MANY_REQUESTS = 4, 32
_TOKENS_A_ROUND = (1, 4, 8)
_PART = 8  # "some" decode requests are one in 8 of all
_SMALL_SIZES_OF_FEW = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792)
_SMALL_SIZES_OF_MANY = (256, 512, 768, 1024, 1280, 1536, 1792)
_SIZE_STEP = 512
_LEAST_WHOLE_STEP = 4096
_FAST_TOTALS = (351, 447, 639, 895)
_LEAST_LARGER = 24  # minimum distance between sizes, in prompt tokens


def _few_and_many(max_requests: int) -> tuple[int, int]:
    """Return the numbers of prefill requests of the two kinds of shapes; equal if `max_requests` is small."""
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
    """Return sizes in prompt tokens: closely spaced for small steps, then 512 apart, and wider from 4,096 on.

    A small step mostly reads weights, so padding costs little; in a large one each token takes its time. Some sizes
    give a step one of `_FAST_TOTALS` tokens, decode requests included: GEMMs of 351 tokens take 0.86 of the time of
    384, 447 of that of 512, 639 and 895 take 0.84 to 0.85 of that of 768 and 1,024 (8B model, H100).
    """
    regular = list(_regular_sizes(_SMALL_SIZES_OF_FEW, most_tokens))
    between = [total - num_decode for total in _FAST_TOTALS if total - num_decode > regular[0]]
    for size in between:
        if min((other - size for other in regular if other >= size), default=0) >= _LEAST_LARGER:
            regular.append(size)
    return _without_slow_totals(regular, most_tokens, num_decode)


def _sizes_of_many(most_tokens: int, num_decode: int) -> list[int]:
    """Return sizes in prompt tokens: 256 apart, 512 apart from 2,048 on, and wider from 4,096 on."""
    return _without_slow_totals(_regular_sizes(_SMALL_SIZES_OF_MANY, most_tokens), most_tokens, num_decode)


def _regular_sizes(small: Sequence[int], most_tokens: int) -> Iterator[int]:
    """Yield small sizes, those between them and whole steps, sizes of whole steps, and the most."""
    sizes = (*small, *range(small[-1] + _SIZE_STEP // 2, _LEAST_WHOLE_STEP, _SIZE_STEP))
    yield from (size for size in sizes if size < most_tokens)
    yield from _whole_steps(most_tokens)
    yield most_tokens


def _whole_steps(most_tokens: int) -> Iterator[int]:
    """Yield sizes for steps of long prompts, each at most a quarter larger than the previous."""
    size = _LEAST_WHOLE_STEP
    while size < most_tokens:
        yield size
        size += 2 ** (size.bit_length() - 1) // 4


def _without_slow_totals(sizes: Iterable[int], most_tokens: int, num_decode: int) -> list[int]:
    """Return sorted sizes; reduce a size by one if its total number of tokens is slow, except for the largest."""
    return sorted({size - (size < most_tokens and _is_slow(num_decode + size)) for size in sizes})


def _is_slow(num_tokens: int) -> bool:
    """Return whether GEMMs with one token more or less are faster.

    Those of 448 tokens take 15.1 ms, of 447 9.8 and of 449 10.3; those of 415 take 0.83 of the time of 416 (8B model,
    H100). From 320 on, all measured multiples of 32 are slow except those of 128.
    """
    return 320 <= num_tokens <= 1056 and num_tokens % 32 == 0 and num_tokens % 128 != 0


def _batch_sizes(count: int, max_requests: int) -> list[int]:
    """Return up to `count` batch sizes that grow by a constant factor and end with `max_requests`.

    From 8 on they are multiples of 8, which costs no time.
    """
    if not max_requests:
        return []
    numbers = [round(float(number)) for number in np.geomspace(1, max_requests, count)] if count > 1 else [max_requests]
    return sorted({min(number if number <= 8 else -(-number // 8) * 8, max_requests) for number in numbers})
