"""Predict how many prompt tokens of a recorded workload caches of several sizes would skip."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product

import numpy as np

from ..config import CacheConfig
from ..errors import CacheCapacityError
from ..policy.admission import Refusal
from ..policy.block_growth import grow_requests
from ..policy.block_hashing import TokenIds
from ..policy.identifiers import BlockKey
from ..policy.prefix_cache import PrefixCache
from ..policy.request_settings import RequestSpec, SamplingSettings
from ..policy.requests import Candidate, RunningRequest
from ..policy.running_requests import RunningRequests
from ..policy.slabs import SlabSpace
from ..policy.tiers.copies import CopyOrder, CopyStatus, CopyTimes
from .caches import CacheSizes, empty_cache, tiered_cache
from .recorded_load import ContentId, RecordedLoad, RecordedRequest

_Content = tuple[ContentId, ...] | tuple[ContentId, int]


@dataclass(frozen=True, slots=True)
class BlockText:
    """Block keys and lengths of a request's text.

    Args:
        keys: Keys of the complete blocks in prompt and reply.
        prompt_len, length: Number of tokens in the prompt, and in prompt and reply together.
    """

    keys: Sequence[BlockKey]
    prompt_len: int
    length: int


def block_texts(load: RecordedLoad, block_size: int) -> list[BlockText]:
    """Return the text of each request in a recorded workload, in order.

    A reply's text is taken from the next prompt that continues it; all other replies are unique.

    Raises:
        ValueError: If neither the block size nor the number of tokens per hash divides the other.
    """
    size = load.tokens_per_id
    if block_size % size and size % block_size:
        raise ValueError(f"block size {block_size} and {size} tokens per hash do not match: one must divide the other")
    known: dict[tuple[BlockKey, _Content], BlockKey] = {}
    numbers = count(1)

    def key_after(parent: BlockKey, content: _Content) -> BlockKey:
        if (key := known.get((parent, content))) is None:
            key = known[parent, content] = BlockKey(next(numbers))
        return key

    def prompt_keys(request: RecordedRequest) -> list[BlockKey]:
        keys: list[BlockKey] = []
        parent = BlockKey(0)
        for block in range(request.prompt_len // block_size):
            parent = key_after(parent, _content(request.content, block, block_size, size))
            keys.append(parent)
        return keys

    prompts = [prompt_keys(request) for request in load.requests]
    following: dict[
        tuple[BlockKey, _Content], int
    ] = {}  # next request whose prompt continues after a block and further tokens
    texts: list[BlockText] = []
    for index in reversed(range(len(prompts))):
        request, keys = load.requests[index], prompts[index]
        # A prompt that differs in the tokens after the last block is not a continuation.
        rest = request.content[len(keys) * block_size // size : request.prompt_len // size]
        after = following.get((keys[-1], rest)) if keys else None
        reply = [] if after is None else prompts[after][len(keys) :]
        num_blocks = (request.prompt_len + request.reply_len) // block_size
        text = [*keys, *reply][:num_blocks]
        text += [BlockKey(next(numbers)) for _ in range(num_blocks - len(text))]
        texts.append(BlockText(text, request.prompt_len, request.prompt_len + request.reply_len))
        for block, key in enumerate(keys[:-1], 1):
            first = block * block_size // size
            for last in range(first, first + max(block_size // size, 1)):
                following[key, request.content[first:last]] = index
    return texts[::-1]


def _content(ids: tuple[ContentId, ...], block: int, block_size: int, size: int) -> _Content:
    if block_size < size:
        return ids[block * block_size // size], block * block_size % size
    first = block * block_size // size
    return ids[first : first + block_size // size]


class RecordedKeys:
    """Block keys for a recorded text, with the interface of `BlockKeyChain`."""

    def __init__(self, text: BlockText, block_size: int) -> None:
        self._text = text
        self._block_size = block_size
        self.num_tokens = text.prompt_len
        self.keys = list(text.keys[: text.prompt_len // block_size])

    def extend(self, tokens: TokenIds) -> None:
        self.num_tokens += len(tokens)
        self.keys += self._text.keys[len(self.keys) : self.num_tokens // self._block_size]


_ANY_TOKEN = 0


@dataclass(frozen=True, slots=True)
class ReplayedLoad:
    """Numbers of prompt tokens in a workload and of tokens that a cache skipped."""

    prompt_tokens: int
    skipped_tokens: int

    @property
    def share(self) -> float:
        """Fraction of the prompt tokens that were skipped."""
        return self.skipped_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(
    texts: Iterable[BlockText], cache: PrefixCache, max_tokens: int, make_copies: Callable[[], object] = lambda: None
) -> ReplayedLoad:
    """Replay requests one after another; a request that does not fit skips no tokens.

    Args:
        max_tokens: Maximum number of prompt tokens per step.
        make_copies: Function called between steps that makes the ordered copies between tiers.
    """
    prompt_tokens = skipped_tokens = 0
    for number, text in enumerate(texts):
        prompt_tokens += text.prompt_len
        skipped_tokens += _serve(number, text, cache, max_tokens, make_copies)
    return ReplayedLoad(prompt_tokens, skipped_tokens)


def _serve(number: int, text: BlockText, cache: PrefixCache, max_tokens: int, make_copies: Callable[[], object]) -> int:
    """Replay one request; return the number of prompt tokens that the cache skipped."""
    prompt = np.broadcast_to(np.int64(_ANY_TOKEN), text.prompt_len)  # takes no memory
    spec = RequestSpec(number, prompt, text.length, SamplingSettings())
    candidate = Candidate(spec, chain=RecordedKeys(text, cache.block_size), epoch=cache.epoch)
    requests = RunningRequests(cache, max_requests=1, max_tokens=max_tokens)
    cache.prefetch([candidate])
    make_copies()
    request = requests.admit(candidate, max_tokens)
    if isinstance(request, Refusal):
        cache.tiers.forget(number)
        return 0
    skipped = request.computed
    for steps in (_prefill(request, cache, max_tokens), _decode(request, cache)):
        for _ in steps:
            make_copies()
    requests.drop([request])
    make_copies()
    return skipped


def _prefill(request: RunningRequest, cache: PrefixCache, max_tokens: int) -> Iterator[None]:
    """Prefill the prompt and yield after each step."""
    while True:
        cache.publish(request, request.scheduled)
        cache.advance(request, request.scheduled)
        yield
        if not request.is_prefilling:
            return
        cache.continue_prefill(request, max_tokens)


def _decode(request: RunningRequest, cache: PrefixCache) -> Iterator[None]:
    """Generate the reply while there is room; yield at block boundaries and at the end."""
    if request.length < request.spec.max_len:
        request.append([_ANY_TOKEN])
    while request.length < request.spec.max_len:
        until_boundary = cache.block_size - request.computed % cache.block_size
        quiet = min(until_boundary, request.spec.max_len - request.length) - 1
        try:
            grow_requests([request], cache, paused_capacity=0)
        except CacheCapacityError:
            return
        request.append([_ANY_TOKEN] * (quiet + 1))
        request.advance(quiet)
        cache.schedule_decode(request)
        cache.publish(request, request.scheduled)
        cache.advance(request, request.scheduled)
        yield


_MAX_TOKENS = CacheConfig().max_tokens


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """Predicted savings of a cache with one size.

    Args:
        cache_gb: Budget of the cache in GiB.
        host_cache_gb: Budget of the host tier in GiB; 0 without a host tier.
    """

    cache_gb: float
    host_cache_gb: float
    replayed: ReplayedLoad


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted savings of an unlimited cache and of caches with several sizes."""

    unlimited: ReplayedLoad
    caches: tuple[PlannedCache, ...]


def plan(
    load: RecordedLoad, sizes: CacheSizes, budgets_gb: Sequence[float], host_budgets_gb: Sequence[float] = (0.0,)
) -> Plan:
    """Replay a workload with each combination of device and host size; raise like `block_texts`."""
    texts = block_texts(load, sizes.block_size)
    unlimited = replay(texts, empty_cache(unlimited_space(texts, sizes.block_size), sizes), _MAX_TOKENS)
    planned = [
        PlannedCache(budget, host_budget, _replayed(texts, sizes, budget, host_budget))
        for budget, host_budget in product(budgets_gb, host_budgets_gb)
    ]
    return Plan(unlimited, tuple(planned))


def unlimited_space(texts: Sequence[BlockText], block_size: int, max_requests: int = 1) -> SlabSpace:
    """Return a space that is large enough to avoid evictions with at most `max_requests` running requests."""
    longest = max(text.length for text in texts) // block_size + 2
    num_blocks = len({key for text in texts for key in text.keys}) + max_requests * longest
    return SlabSpace(2 * num_blocks, 1, 1)


def _replayed(texts: Sequence[BlockText], sizes: CacheSizes, budget: float, host_budget: float) -> ReplayedLoad:
    if not host_budget:
        return replay(texts, empty_cache(sizes.space(budget), sizes), _MAX_TOKENS)
    # The workload has no copy or compute times, so assume that a restore is always faster than prefill.
    free_copies = CopyTimes(block=0, state=0, token=1)
    tiered = tiered_cache(sizes.space(budget), sizes.space(host_budget), sizes, CopiesAtOnce(), free_copies)
    return replay(texts, tiered.cache, _MAX_TOKENS, tiered.tier.drain)


class CopiesAtOnce:
    """Implementation of `Copies` in which every copy completes immediately."""

    def start(self, orders: Sequence[CopyOrder]) -> None:
        """Do nothing."""

    def status(self, number: int) -> CopyStatus:
        return CopyStatus.DONE

    def wait(self, numbers: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, number: int) -> None:
        """Do nothing."""
