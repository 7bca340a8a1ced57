"""Prefix matches and admission plans for prompts."""

from collections.abc import Container

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.admission import (
    AdmissionPlan,
    AdmissionRules,
    PrefixMatch,
    PromptView,
    Refusal,
    match_prefix,
    plan_admission,
)
from megatron_mamba_cache.policy.boundaries import BoundaryRule
from megatron_mamba_cache.policy.eviction_rules import LeastRecentlyUsed
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.index_pools import CacheSpace
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.slabs import SlabSpace
from tests.policy.split_space import SplitSpace

BLOCK = 4


class Pools:
    """A block pool and a slot pool for one cached chain of blocks with keys 1, 2, 3, ..."""

    def __init__(self, num_blocks: int = 10, num_slots: int = 6, space: CacheSpace | None = None) -> None:
        self.pools = CachePools.over(space or SplitSpace(num_blocks, num_slots), LeastRecentlyUsed(), block_size=BLOCK)
        self.kv, self.slots = self.pools.kv, self.pools.slots

    def hold(self, num_blocks: int, states_at: Container[int] = ()) -> list[BlockId]:
        """Register a held chain; cache a state after each block in `states_at` while slots are free."""
        blocks = self.kv.allocate(num_blocks)
        for index, block in enumerate(blocks):
            self.kv.register(block, BlockKey(index + 1), blocks[index - 1] if index else None)
            if index in states_at and self.slots.num_available:
                self.slots.publish(self.slots.reserve()[0], block)
        return blocks

    def cache(self, num_blocks: int, states_at: Container[int] = ()) -> list[BlockId]:
        """Cache a chain like `hold`, and release it; blocks after the last state are then freed."""
        blocks = self.hold(num_blocks, states_at)
        self.kv.release(blocks)
        return blocks

    def plan(
        self,
        prompt_len: int,
        *,
        budget: int = 1000,
        reserved: Container[BlockKey] = (),
        may_skip: bool = True,
        align: bool = True,
    ) -> AdmissionPlan | Refusal:
        return plan_admission(
            prompt(prompt_len, may_skip=may_skip),
            self.pools,
            budget=budget,
            reserved_keys=reserved,
            rules=AdmissionRules(BoundaryRule(BLOCK), align),
        )


def prompt(prompt_len: int, *, may_skip: bool = True) -> PromptView:
    """Return a prompt with the block keys 1, 2, 3, ..."""
    return PromptView([BlockKey(index + 1) for index in range(prompt_len // BLOCK)], prompt_len, may_skip)


def match(pools: Pools, prompt_len: int, *, may_skip: bool = True) -> PrefixMatch:
    return match_prefix(prompt(prompt_len, may_skip=may_skip), pools.kv, pools.slots, BLOCK)


def test_unknown_prompt_matches_no_cached_block() -> None:
    assert match(Pools(), 20) == PrefixMatch((), 0)


def test_prompt_resumes_from_the_last_cached_state_of_its_prefix() -> None:
    pools = Pools()
    blocks = pools.hold(3, states_at=(0, 1))
    assert match(pools, 20) == PrefixMatch(tuple(blocks), 8)


def test_cached_blocks_without_a_state_are_shared_but_recomputed() -> None:
    pools = Pools()
    blocks = pools.hold(3)
    assert match(pools, 20) == PrefixMatch(tuple(blocks), 0)


def test_state_at_the_prompt_end_is_not_reused_because_one_token_must_be_computed() -> None:
    pools = Pools()
    blocks = pools.cache(3, states_at=(0, 2))
    assert match(pools, 12) == PrefixMatch(tuple(blocks), 4)
    assert match(pools, 13) == PrefixMatch(tuple(blocks), 12)


def test_prompt_that_must_be_recomputed_still_shares_cached_blocks() -> None:
    pools = Pools()
    blocks = pools.cache(3, states_at=(0, 1, 2))
    assert match(pools, 20, may_skip=False) == PrefixMatch(tuple(blocks), 0)


@given(st.integers(0, 6), st.sets(st.integers(0, 5)), st.integers(1, 30), st.booleans())
def test_match_ends_at_the_last_state_within_cached_blocks_and_the_prompt(
    num_cached: int, states: set[int], prompt_len: int, may_skip: bool
) -> None:
    pools = Pools()
    pools.hold(num_cached, states_at={index for index in states if index < num_cached})
    found = match(pools, prompt_len, may_skip=may_skip)
    usable = [
        end
        for end in range(BLOCK, prompt_len, BLOCK)
        if may_skip and end // BLOCK <= num_cached and end // BLOCK - 1 in states
    ]
    assert found.skip_tokens == max(usable, default=0)
    assert len(found.blocks) == min(num_cached, prompt_len // BLOCK)


def test_admission_plan_allocates_missing_blocks_up_to_the_prompt_end() -> None:
    pools = Pools()
    blocks = pools.cache(2, states_at=(1,))
    assert pools.plan(18) == AdmissionPlan(PrefixMatch(tuple(blocks), 8), 3, 18)


def test_token_budget_does_not_count_cached_tokens() -> None:
    pools = Pools()
    pools.cache(3, states_at=(2,))
    plan = pools.plan(17, budget=5)
    assert isinstance(plan, AdmissionPlan) and plan.chunk_end == 17


@pytest.mark.parametrize(("align", "chunk_end"), [(True, 8), (False, 10)])
def test_first_prefill_chunk_ends_at_the_last_full_block_within_budget(align: bool, chunk_end: int) -> None:
    plan = Pools().plan(30, budget=10, align=align)
    assert isinstance(plan, AdmissionPlan) and plan.chunk_end == chunk_end


def test_admission_plan_allocates_the_whole_prompt_for_any_token_budget() -> None:
    plan = Pools().plan(30, budget=1)
    assert isinstance(plan, AdmissionPlan) and (plan.num_new_blocks, plan.chunk_end) == (8, 1)


def test_request_is_not_admitted_when_the_token_budget_is_0() -> None:
    assert Pools().plan(5, budget=0) is Refusal.NO_TOKENS


@pytest.mark.parametrize(("budget", "end"), [(BLOCK - 1, None), (BLOCK + 1, BLOCK), (3 * BLOCK, 2 * BLOCK + 1)])
def test_chunk_that_rounds_a_state_within_a_block_waits_for_a_step_without_other_prompts(
    budget: int, end: int | None
) -> None:
    rules = AdmissionRules(BoundaryRule(BLOCK), align_prefill_chunks=True, rounds_at_boundaries=True)
    sizes = {"start": 0, "prompt_len": 2 * BLOCK + 1, "budget": budget}
    assert rules.chunk_end(**sizes, follows_prompts=True) == (end or 0)
    assert rules.chunk_end(**sizes) == (end or budget)


def test_matched_blocks_do_not_count_as_free_for_new_blocks() -> None:
    pools = Pools(num_blocks=4)
    pools.cache(2, states_at=(1,))
    assert isinstance(pools.plan(16), AdmissionPlan)
    assert pools.plan(17) is Refusal.NO_BLOCKS


def test_request_is_not_admitted_when_other_requests_hold_too_many_blocks() -> None:
    pools = Pools(num_blocks=4)
    pools.kv.allocate(3)
    assert isinstance(pools.plan(4), AdmissionPlan)
    assert pools.plan(5) is Refusal.NO_BLOCKS


def test_request_is_not_admitted_when_no_state_slot_is_free() -> None:
    pools = Pools(num_slots=1)
    pools.slots.take_live()
    assert pools.plan(4) is Refusal.NO_SLOT


def test_request_is_not_admitted_when_all_state_slots_are_reserved() -> None:
    pools = Pools(num_slots=2)
    pools.slots.reserve(2)
    assert pools.plan(4) is Refusal.NO_SLOT


def test_request_waits_for_a_reserved_slot_rather_than_evict_its_state() -> None:
    pools = Pools(num_slots=2)
    pools.cache(1, states_at=(0,))
    pools.slots.reserve()
    assert pools.plan(6) is Refusal.NO_SLOT


def test_matched_state_is_not_reused_if_the_request_needs_its_slot() -> None:
    pools = Pools(num_slots=2)
    blocks = pools.cache(1, states_at=(0,))
    pools.slots.take_live()
    assert pools.plan(6) == AdmissionPlan(PrefixMatch(tuple(blocks), 0), 1, 6)


def test_state_already_pinned_by_another_request_needs_no_extra_slot() -> None:
    pools = Pools(num_slots=2)
    blocks = pools.cache(1, states_at=(0,))
    pools.kv.acquire(blocks)
    pools.slots.pin(blocks[0])
    assert pools.plan(6) == AdmissionPlan(PrefixMatch(tuple(blocks), 4), 1, 6)


def shared_memory(num_slabs: int) -> Pools:
    """Return pools that share slabs of two blocks or one state."""
    return Pools(space=SlabSpace(num_slabs, blocks_per_slab=2, slots_per_slab=1))


def test_planned_blocks_and_state_slot_do_not_share_a_memory_slab() -> None:
    assert isinstance(shared_memory(3).plan(16), AdmissionPlan)
    assert shared_memory(3).plan(17) is Refusal.NO_BLOCKS
    assert shared_memory(0).plan(1) is Refusal.NO_SLOT


def test_matched_state_is_not_reused_if_the_live_slot_needs_its_slab() -> None:
    pools = shared_memory(2)
    blocks = pools.cache(1, states_at=(0,))
    assert pools.plan(6) == AdmissionPlan(PrefixMatch(tuple(blocks), 0), 1, 6)


def test_matched_state_is_not_reused_if_the_kv_blocks_need_its_slab() -> None:
    pools = shared_memory(4)
    blocks = pools.cache(2, states_at=(1,))
    assert pools.plan(17) == AdmissionPlan(PrefixMatch(tuple(blocks), 0), 3, 17)


def test_matched_state_is_kept_if_another_request_will_free_memory() -> None:
    pools = shared_memory(5)
    pools.cache(2, states_at=(1,))
    slot = pools.slots.take_live()
    assert pools.plan(17) is Refusal.NO_BLOCKS
    pools.slots.release_live(slot)
    assert isinstance(pools.plan(17), AdmissionPlan)


@pytest.mark.parametrize(
    ("reserved_key", "prompt_len", "waits"),
    [(1, 9, False), (2, 9, True), (2, 8, False), (3, 13, True), (3, 12, False), (77, 13, False)],
)
def test_request_waits_only_for_a_pending_state_it_can_resume_from(
    reserved_key: int, prompt_len: int, waits: bool
) -> None:
    pools = Pools()
    pools.cache(1, states_at=(0,))
    plan = pools.plan(prompt_len, reserved={BlockKey(reserved_key)})
    assert (plan is Refusal.WAITS_FOR_PREFIX) == waits


def test_request_that_must_recompute_its_prompt_never_waits() -> None:
    assert isinstance(Pools().plan(9, reserved={BlockKey(1), BlockKey(2)}, may_skip=False), AdmissionPlan)


@given(
    slabs=st.none() | st.builds(SlabSpace, st.integers(1, 8), st.integers(1, 4), st.integers(1, 3)),
    num_cached=st.integers(0, 4),
    states=st.sets(st.integers(0, 3)),
    num_held=st.integers(0, 4),
    num_live=st.integers(0, 5),
    prompt_len=st.integers(1, 30),
    budget=st.integers(0, 30),
    align=st.booleans(),
)
def test_every_admission_plan_can_be_applied(
    slabs: SlabSpace | None,
    num_cached: int,
    states: set[int],
    num_held: int,
    num_live: int,
    prompt_len: int,
    budget: int,
    align: bool,
) -> None:
    pools = Pools(num_blocks=8, space=slabs)
    pools.cache(min(num_cached, pools.kv.num_available), states)
    pools.kv.allocate(min(num_held, pools.kv.num_available))
    for _ in range(min(num_live, pools.slots.num_available)):
        pools.slots.take_live()
    plan = pools.plan(prompt_len, budget=budget, align=align)
    if isinstance(plan, Refusal):
        return
    skip = plan.match.skip_tokens
    pools.kv.acquire(plan.match.blocks)
    if skip:
        pools.slots.pin(plan.match.blocks[skip // BLOCK - 1])
    held = [*plan.match.blocks, *pools.kv.allocate(plan.num_new_blocks)]
    pools.slots.take_live()
    for part in (pools.pools.space, pools.kv, pools.slots):
        part.check_integrity()
    assert len(set(held)) == len(held) == -(-prompt_len // BLOCK)
    assert skip < plan.chunk_end <= min(skip + budget, prompt_len)
