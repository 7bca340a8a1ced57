"""A prefix cache of a few blocks and slots, and functions that process requests as an engine does."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from megatron_mamba_cache.metrics import CacheCounters
from megatron_mamba_cache.policy.admission import AdmissionPlan, AdmissionRules
from megatron_mamba_cache.policy.boundaries import BoundaryRule
from megatron_mamba_cache.policy.draft_states import ReplayStates, WindowStates
from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.index_pools import FixedIndexPool
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.prefix_cache import CacheIdentity, PrefixCache
from megatron_mamba_cache.policy.request_settings import LogProbSettings, RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import Candidate, RunningRequest
from megatron_mamba_cache.policy.slabs import SlabSpace
from tests.policy.split_space import SplitSpace

BLOCK = 4
ENOUGH = 10_000  # a budget that never cuts a prompt
NewCache = Callable[..., PrefixCache]


def small_cache(
    num_blocks: int = 16,
    num_slots: int = 8,
    *,
    slabs: tuple[int, int, int] | None = None,
    block_size: int = BLOCK,
    stride: int | None = None,
    align: bool = True,
    enabled: bool = True,
    checkpoints: Literal["rolling", "all", "none"] = "rolling",
    max_requests: int = 0,
    replays: bool = False,
    eviction: str = "lru",
    num_running: int | None = None,
) -> PrefixCache:
    """Return an empty cache.

    Args:
        slabs: Number of slabs that KV blocks and states share, and numbers of blocks and of states per slab; None for
            separate memory with `num_blocks` blocks and `num_slots` slots.
        max_requests: Number of requests for which drafts leave a live slot free; 0 lets drafts take any slot.
        replays: True to keep drafts in one buffer per request, for at most `max_requests` requests, instead of slots.
        num_running: Number of separate slots for live and draft states; None to use the slots of cached states.
    """
    space = SplitSpace(num_blocks, num_slots) if slabs is None else SlabSpace(*slabs)
    pools = CachePools.over(
        space,
        EVICTION_RULES[eviction](float(block_size)),
        block_size=block_size,
        running=None if num_running is None else FixedIndexPool(num_running),
    )
    keeps_checkpoints = enabled and checkpoints != "none"
    slots = WindowStates(pools.slots, max_requests, keeps_checkpoints=keeps_checkpoints)
    return PrefixCache(
        pools,
        AdmissionRules(BoundaryRule(block_size, stride), align),
        CacheIdentity("model", "0"),
        CacheCounters(),
        draft_states=ReplayStates(max_requests) if replays else slots,
        checkpoints=checkpoints,
        enabled=enabled,
    )


def new_spec(
    request_id: int, prompt: Iterable[int], *, max_len: int = 64, tenant: str = "", may_skip: bool = True
) -> RequestSpec:
    """Return a request for a prompt."""
    tokens = np.array(list(prompt), dtype=np.int64)
    return RequestSpec(request_id, tokens, max_len, SamplingSettings(), tenant, LogProbSettings(wanted=not may_skip))


def outcome(cache: PrefixCache, prompt: list[int], *, budget: int = ENOUGH, **settings: object) -> object:
    """Return a plan to admit a prompt, or the reason why it is refused."""
    return cache.plan(candidate_of(cache, new_spec(99, prompt, **settings)), budget)  # type: ignore[arg-type]


def candidate_of(cache: PrefixCache, spec: RequestSpec) -> Candidate:
    """Return a waiting request whose keys the cache has computed."""
    candidate = Candidate(spec)
    cache.branches(candidate, ())
    return candidate


def planned(cache: PrefixCache, spec: RequestSpec, budget: int = ENOUGH) -> AdmissionPlan:
    """Return a plan to admit a request; it must not be refused."""
    plan = cache.plan(candidate_of(cache, spec), budget)
    assert isinstance(plan, AdmissionPlan), plan
    return plan


def admit(cache: PrefixCache, spec: RequestSpec, budget: int = ENOUGH) -> RunningRequest:
    """Admit a request that must not be refused; its first prefill chunk is scheduled."""
    return cache.admit(candidate_of(cache, spec), planned(cache, spec, budget))


def run_step(cache: PrefixCache, requests: Sequence[RunningRequest], token: int = 0) -> None:
    """Publish and advance scheduled requests without drafts; those that sample get `token`."""
    for request in requests:
        if request.is_prefilling:
            cache.publish(request, request.scheduled)
    for request in requests:
        if request.samples_this_step:
            keep(cache, request, [token])
        else:
            cache.advance(request, request.scheduled)


def keep(cache: PrefixCache, request: RunningRequest, tokens: Sequence[int]) -> None:
    """End a step in which a request keeps `tokens`; publish the blocks that are now complete."""
    request.generated.extend(tokens)
    if request.is_prefilling:
        cache.advance(request, request.scheduled)
    else:
        cache.publish(request, len(tokens))
        cache.advance(request, len(tokens))


def prefill(cache: PrefixCache, spec: RequestSpec, first_token: int = 0) -> RunningRequest:
    """Admit a request, compute its prompt in one chunk and sample a first token."""
    request = admit(cache, spec)
    run_step(cache, [request], first_token)
    return request


def decode(cache: PrefixCache, request: RunningRequest, tokens: Iterable[int]) -> None:
    """Run a decode step for each sampled token, growing the request if needed."""
    for token in tokens:
        if request.computed == len(request.block_ids) * cache.block_size:
            cache.grow(request)
        cache.schedule_decode(request)
        run_step(cache, [request], token)


def verify(cache: PrefixCache, request: RunningRequest, drafts: Sequence[int], kept: Sequence[int]) -> None:
    """Run a decode step that feeds drafts and keeps `kept` tokens, growing the request if needed."""
    if request.computed == len(request.block_ids) * cache.block_size:
        cache.grow(request)
    cache.schedule_decode(request, drafts)
    keep(cache, request, kept)


def serve(cache: PrefixCache, spec: RequestSpec, reply: Iterable[int] = ()) -> int:
    """Run a single request from admission to release; return the number of prompt tokens that needed no prefill."""
    request = admit(cache, spec)
    skipped = request.computed
    run_step(cache, [request], 0)
    decode(cache, request, reply)
    cache.release(request)
    cache.check_integrity([])
    return skipped


def cached_states(cache: PrefixCache) -> list[BlockId]:
    """Return the blocks that end in a cached state."""
    blocks = (BlockId(block) for block in range(cache.kv.num_blocks))
    return [block for block in blocks if cache.slots.slot_of(block) is not None]


def drop_states(cache: PrefixCache) -> None:
    """Forget every cached state; KV blocks that a request holds stay."""
    for block in cached_states(cache):
        cache.slots.drop(block)


def frozen(cache: PrefixCache) -> bytes:
    """Return all state of the cache, private fields included, as comparable bytes."""
    reserved_keys = cache._reservations.keys
    return pickle.dumps((cache.pools, cache.counters, cache.epoch, reserved_keys, cache._num_admitted))
