"""Predict how many prompt tokens of a recorded workload would need no prefill, for several cache sizes."""

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
    """Prompt and reply of a recorded request, as block keys.

    Args:
        keys: Keys of the complete blocks in the prompt and the reply.
        prompt_len: Number of prompt tokens.
        length: Number of tokens in the prompt and the reply together.
    """

    keys: Sequence[BlockKey]
    prompt_len: int
    length: int


def block_texts(load: RecordedLoad, block_size: int) -> list[BlockText]:
    """Return the prompt and reply of each request in a recorded workload, in order of arrival.

    The workload does not record the content of replies. If a later prompt continues a request's prompt, its next tokens
    are assumed to be the reply; otherwise the reply gets unique keys.

    Raises:
        ValueError: If neither the block size nor the number of tokens per hash is a multiple of the other.
    """
    size = load.tokens_per_id
    if block_size % size and size % block_size:
        raise ValueError(
            f"a block has {block_size} tokens and a hash covers {size} tokens; one number must be a "
            "multiple of the other"
        )
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
    # Index of the next request whose prompt contains the block, followed by the content.
    following: dict[tuple[BlockKey, _Content], int] = {}
    texts: list[BlockText] = []
    for index in reversed(range(len(prompts))):
        request, keys = load.requests[index], prompts[index]
        # A prompt with other tokens after the last complete block does not continue this prompt.
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
    """Block keys of a recorded request, with the interface of `BlockKeyChain`."""

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
    """Result of a replay: the number of prompt tokens, and how many of them needed no prefill."""

    prompt_tokens: int
    skipped_tokens: int

    @property
    def share(self) -> float:
        """Fraction of the prompt tokens that needed no prefill."""
        return self.skipped_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(
    texts: Iterable[BlockText], cache: PrefixCache, max_tokens: int, make_copies: Callable[[], object] = lambda: None
) -> ReplayedLoad:
    """Replay requests one after another through a cache, and count the prompt tokens that needed no prefill.

    All prompt tokens of a request that does not fit in the cache need prefill.

    Args:
        max_tokens: Maximum number of prompt tokens per step.
        make_copies: Function called between steps to complete the copies between tiers.
    """
    prompt_tokens = skipped_tokens = 0
    for number, text in enumerate(texts):
        prompt_tokens += text.prompt_len
        skipped_tokens += _serve(number, text, cache, max_tokens, make_copies)
    return ReplayedLoad(prompt_tokens, skipped_tokens)


def _serve(number: int, text: BlockText, cache: PrefixCache, max_tokens: int, make_copies: Callable[[], object]) -> int:
    """Replay one request and return the number of prompt tokens that needed no prefill."""
    prompt = np.broadcast_to(np.int64(_ANY_TOKEN), text.prompt_len)  # token values do not matter
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
    """Simulate the prefill of an admitted request; yield after each step."""
    while True:
        cache.publish(request, request.scheduled)
        cache.advance(request, request.scheduled)
        yield
        if not request.is_prefilling:
            return
        cache.continue_prefill(request, max_tokens)


def _decode(request: RunningRequest, cache: PrefixCache) -> Iterator[None]:
    """Simulate the decode steps of a request; yield at block boundaries and at the end.

    The reply ends early if the cache has no room for another block.
    """
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
    """Predicted savings with one combination of cache sizes.

    Args:
        cache_gb: Device memory for the cache in GiB.
        host_cache_gb: Host memory for the host tier in GiB; 0 without a host tier.
    """

    cache_gb: float
    host_cache_gb: float
    replayed: ReplayedLoad


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted savings of an unlimited cache, and of caches with given sizes."""

    unlimited: ReplayedLoad
    caches: tuple[PlannedCache, ...]


def plan(
    load: RecordedLoad, sizes: CacheSizes, budgets_gb: Sequence[float], host_budgets_gb: Sequence[float] = (0.0,)
) -> Plan:
    """Replay a workload without a memory limit, and with each combination of device and host memory sizes.

    Raises:
        ValueError: Like `block_texts`.
    """
    texts = block_texts(load, sizes.block_size)
    unlimited = replay(texts, empty_cache(unlimited_space(texts, sizes.block_size), sizes), _MAX_TOKENS)
    planned = [
        PlannedCache(budget, host_budget, _replayed(texts, sizes, budget, host_budget))
        for budget, host_budget in product(budgets_gb, host_budgets_gb)
    ]
    return Plan(unlimited, tuple(planned))


def unlimited_space(texts: Sequence[BlockText], block_size: int, max_requests: int = 1) -> SlabSpace:
    """Return records for enough memory that at most `max_requests` running requests never cause an eviction."""
    longest = max(text.length for text in texts) // block_size + 2
    num_blocks = len({key for text in texts for key in text.keys}) + max_requests * longest
    return SlabSpace(2 * num_blocks, 1, 1)


def _replayed(texts: Sequence[BlockText], sizes: CacheSizes, budget: float, host_budget: float) -> ReplayedLoad:
    if not host_budget:
        return replay(texts, empty_cache(sizes.space(budget), sizes), _MAX_TOKENS)
    # A recorded workload has no copy or compute times, so restores are assumed to be always faster than prefill.
    free_copies = CopyTimes(block=0, state=0, token=1)
    tiered = tiered_cache(sizes.space(budget), sizes.space(host_budget), sizes, CopiesAtOnce(), free_copies)
    return replay(texts, tiered.cache, _MAX_TOKENS, tiered.tier.drain)


class CopiesAtOnce:
    """Implementation of `Copies` that moves no data and reports every copy as done."""

    def start(self, orders: Sequence[CopyOrder]) -> None:
        """Do nothing."""

    def status(self, number: int) -> CopyStatus:
        return CopyStatus.DONE

    def wait(self, numbers: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, number: int) -> None:
        """Do nothing."""
