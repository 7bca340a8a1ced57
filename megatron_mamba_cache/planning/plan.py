"""What caches of several sizes would have skipped of a recorded load, by a replay without a model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ..config import CacheConfig
from ..errors import CacheCapacityError
from ..policy.admission import Refusal
from ..policy.block_growth import grow_rows
from ..policy.boundaries import prefill_chunk_end
from ..policy.prefix_cache import PrefixCache
from ..policy.request_settings import RequestSpec, SamplingSettings
from ..policy.requests import Candidate, RunningRequest
from ..policy.running_requests import RunningRequests
from ..policy.slabs import SlabSpace
from ..policy.tiers.copies import CopyOrder, CopyStatus
from ..policy.tiers.times import CopyTimes
from .block_texts import BlockText, RecordedKeys, block_texts
from .caches import CacheSizes, empty_cache, tiered_cache
from .recorded_load import RecordedLoad

_ANY_TOKEN = 0


@dataclass(frozen=True, slots=True)
class ReplayedLoad:
    """What a cache saved: prompt tokens, and how many of them it skipped."""

    prompt_tokens: int
    skipped_tokens: int

    @property
    def share(self) -> float:
        """Share of the prompt tokens that were skipped."""
        return self.skipped_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(
    texts: Iterable[BlockText], cache: PrefixCache, max_tokens: int, make_copies: Callable[[], object] = lambda: None
) -> ReplayedLoad:
    """Serve requests one after another; one that does not fit counts as computed.

    Args:
        max_tokens: Tokens of a step, which prompts are prefilled in.
        make_copies: Called between steps, to make the copies between tiers that were ordered.
    """
    prompt_tokens = skipped_tokens = 0
    for number, text in enumerate(texts):
        prompt_tokens += text.prompt_len
        skipped_tokens += _serve(number, text, cache, max_tokens, make_copies)
    return ReplayedLoad(prompt_tokens, skipped_tokens)


def _serve(number: int, text: BlockText, cache: PrefixCache, max_tokens: int, make_copies: Callable[[], object]) -> int:
    """Serve one request; return how many of its prompt tokens the cache skipped."""
    prompt = np.broadcast_to(np.int64(_ANY_TOKEN), text.prompt_len)  # takes no memory
    spec = RequestSpec(number, prompt, text.length, SamplingSettings())
    candidate = Candidate(spec, chain=RecordedKeys(text, cache.block_size), epoch=cache.epoch)
    requests = RunningRequests(cache, max_requests=1, max_tokens=max_tokens)
    cache.look_ahead([candidate])
    make_copies()
    row = requests.admit(candidate, max_tokens)
    if isinstance(row, Refusal):
        cache.tiers.forget(number)
        return 0
    skipped = row.computed
    for steps in (_prefill(row, cache, max_tokens), _decode(row, cache)):
        for _ in steps:
            make_copies()
    requests.drop([row])
    make_copies()
    return skipped


def _prefill(row: RunningRequest, cache: PrefixCache, max_tokens: int) -> Iterator[None]:
    """Compute the prompt, and yield after each step."""
    while True:
        cache.publish(row, row.scheduled)
        cache.advance(row, row.scheduled)
        yield
        if not row.is_prefilling:
            return
        chunk_end = prefill_chunk_end(
            start=row.computed,
            prompt_len=row.spec.prompt_len,
            budget=max_tokens,
            block_size=cache.block_size,
            align=cache.rules.align_prefill_chunks,
        )
        cache.schedule_chunk(row, chunk_end)


def _decode(row: RunningRequest, cache: PrefixCache) -> Iterator[None]:
    """Generate the reply, as far as there is room; yield after each step that reaches a block boundary, or the end.

    The others change nothing but counts.
    """
    if row.length < row.spec.max_len:
        row.append([_ANY_TOKEN])
    while row.length < row.spec.max_len:
        until_boundary = cache.block_size - row.computed % cache.block_size
        quiet = min(until_boundary, row.spec.max_len - row.length) - 1
        try:
            grow_rows([row], cache, paused_capacity=0)
        except CacheCapacityError:
            return
        row.append([_ANY_TOKEN] * (quiet + 1))
        row.advance(quiet)
        cache.schedule_decode(row)
        cache.publish(row, row.scheduled)
        cache.advance(row, row.scheduled)
        yield


_MAX_TOKENS = CacheConfig().max_tokens


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """What a cache of one size would have skipped.

    Args:
        cache_gb: Its budget, GiB.
        host_cache_gb: That of the host's memory below it, GiB; 0: there is none.
    """

    cache_gb: float
    host_cache_gb: float
    replayed: ReplayedLoad


@dataclass(frozen=True, slots=True)
class Plan:
    """A recorded load, replayed through an unlimited cache and caches of several sizes."""

    unlimited: ReplayedLoad
    caches: tuple[PlannedCache, ...]


def plan(
    load: RecordedLoad, sizes: CacheSizes, budgets_gb: Sequence[float], host_budgets_gb: Sequence[float] = (0.0,)
) -> Plan:
    """Replay a load in each size of the device's memory, with each of the host's below it.

    Raises:
        ValueError: If the blocks do not fit the load's hashes.
    """
    texts = block_texts(load, sizes.block_size)
    unlimited = replay(texts, empty_cache(unlimited_space(texts, sizes.block_size), sizes), _MAX_TOKENS)
    planned = [
        PlannedCache(budget, host_budget, _replayed(texts, sizes, budget, host_budget))
        for budget, host_budget in product(budgets_gb, host_budgets_gb)
    ]
    return Plan(unlimited, tuple(planned))


def unlimited_space(texts: Sequence[BlockText], block_size: int, max_requests: int = 1) -> SlabSpace:
    """Return a space in which nothing is ever evicted.

    Args:
        max_requests: The most requests that run at once.
    """
    longest = max(text.length for text in texts) // block_size + 2
    num_blocks = len({key for text in texts for key in text.keys}) + max_requests * longest
    return SlabSpace(2 * num_blocks, 1, 1)


def _replayed(texts: Sequence[BlockText], sizes: CacheSizes, budget: float, host_budget: float) -> ReplayedLoad:
    if not host_budget:
        return replay(texts, empty_cache(sizes.space(budget), sizes), _MAX_TOKENS)
    # What is on the host always comes back: the load says nothing of what copying and computing would take.
    free_copies = CopyTimes(block=0, state=0, token=1)
    tiered = tiered_cache(sizes.space(budget), sizes.space(host_budget), sizes, CopiesAtOnce(), free_copies)
    return replay(texts, tiered.cache, _MAX_TOKENS, tiered.tier.drain)


class CopiesAtOnce:
    """`Copies` that take no time, as a load replayed one request at a time needs."""

    def start(self, orders: Sequence[CopyOrder]) -> None:
        """Do nothing."""

    def status(self, number: int) -> CopyStatus:
        return CopyStatus.DONE

    def wait(self, numbers: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, number: int) -> None:
        """Do nothing."""
