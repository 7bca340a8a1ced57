"""Properties of the prefix cache, an example each; the same against a model in test_prefix_cache_machine.py."""

import pytest

from megatron_mamba_cache.errors import CacheCapacityError, CacheIntegrityError
from megatron_mamba_cache.policy.admission import Refusal
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from tests.policy.small_cache import (
    BLOCK,
    ENOUGH,
    admit,
    cached_states,
    decode,
    drop_states,
    frozen,
    keep,
    planned,
    prefill,
    request,
    run_step,
    serve,
    small_cache,
    verify,
)

A, B, C, D = ([token] * BLOCK for token in (1, 2, 3, 4))


def outcome(cache: PrefixCache, prompt: list[int], *, budget: int = ENOUGH, **settings: object) -> object:
    return cache.plan(cache.candidate(request(99, prompt, **settings)), budget)  # type: ignore[arg-type]


# What is skipped.


def test_repeat_computes_only_what_follows_its_last_boundary() -> None:
    cache = small_cache()
    prompt = [*A, *B, *C, *D, 5, 6, 7]
    assert [serve(cache, request(index, prompt)) for index in range(3)] == [0, 16, 16]
    assert cache.counters.prefill_tokens_computed == 19 + 3 + 3


def test_repeat_of_whole_blocks_computes_the_last_one() -> None:
    cache = small_cache()
    assert [serve(cache, request(index, [*A, *B, *C])) for index in range(2)] == [0, 8]


def test_repeat_of_a_single_block_skips_nothing() -> None:
    cache = small_cache()
    assert [serve(cache, request(index, A)) for index in range(2)] == [0, 0]
    assert serve(cache, request(2, [*A, 9])) == BLOCK


def test_prompt_shorter_than_a_block_is_never_cached() -> None:
    cache = small_cache()
    assert [serve(cache, request(index, [1, 2, 3])) for index in range(2)] == [0, 0]
    assert (cache.kv.num_cached, cached_states(cache)) == (0, [])


def test_three_known_blocks_and_a_state_at_the_first_skip_one() -> None:
    cache = small_cache(stride=1)
    row = prefill(cache, request(0, [*A, *B, *C, 9]))
    for block in row.block_ids[1:]:
        cache.slots.drop(block)
    plan = planned(cache, request(1, [*A, *B, *C, 8]))
    assert (plan.match.blocks, plan.match.skip_tokens) == (tuple(row.block_ids[:3]), BLOCK)


def test_nothing_is_skipped_without_a_state_however_much_kv_is_known() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [*A, *B, 9]))
    drop_states(cache)
    plan = planned(cache, request(1, [*A, *B, 9]))
    assert (len(plan.match.blocks), plan.match.skip_tokens) == (2, 0)
    second = admit(cache, request(1, [*A, *B, 9]))
    assert second.block_ids[:2] == row.block_ids[:2] and second.num_shared_blocks == 2


def test_row_of_known_blocks_without_a_state_reserves_where_its_match_ends() -> None:
    cache = small_cache()
    prefill(cache, request(0, [*A, *B, *C, 9]))
    row = admit(cache, request(1, [*A, *D, *D, 9]))
    assert (row.computed, row.num_shared_blocks) == (0, 1)
    assert [state.position for state in row.reserved] == [BLOCK, 3 * BLOCK]


def test_third_request_of_a_branch_skips_to_the_branching_point() -> None:
    cache = small_cache()
    assert serve(cache, request(0, [*A, *B, 9])) == 0
    assert serve(cache, request(1, [*A, *C, 9])) == 0
    assert serve(cache, request(2, [*A, *D, 9])) == BLOCK


def test_blocks_of_the_reply_are_shared_with_the_next_turn() -> None:
    cache = small_cache(checkpoints="none")
    row = prefill(cache, request(0, [*A, 5, 6]), first_token=7)
    decode(cache, row, [8, *B, 9])
    held = list(row.block_ids)
    cache.release(row)
    turn = [*A, 5, 6, 7, 8, *B, 9, 9, 9, 9]
    plan = planned(cache, request(1, turn))
    assert plan.match.blocks == tuple(held[:3])
    assert plan.match.skip_tokens == BLOCK
    row = admit(cache, request(1, turn))
    assert 3 * BLOCK in [state.position for state in row.reserved]


def test_boundary_that_has_a_state_is_not_reserved_again() -> None:
    cache = small_cache(stride=1)
    serve(cache, request(0, [*A, *B, *C]))
    row = admit(cache, request(1, [*A, *B, *C]))
    assert (row.computed, row.reserved) == (2 * BLOCK, [])
    again = admit(cache, request(2, [*A, *B, *C, *D], may_skip=False))
    assert [state.position for state in again.reserved] == [4 * BLOCK]


def test_request_that_wants_prompt_log_probs_skips_nothing_but_publishes() -> None:
    cache = small_cache()
    assert serve(cache, request(0, [*A, *B, 9], may_skip=False)) == 0
    assert serve(cache, request(1, [*A, *B, 9], may_skip=False)) == 0
    assert serve(cache, request(2, [*A, *B, 9])) == 2 * BLOCK


def test_ten_identical_prompts_hold_the_blocks_of_the_first() -> None:
    cache = small_cache(num_blocks=4, num_slots=13)
    first = prefill(cache, request(0, [*A, *B, *C]))
    available = cache.kv.num_available
    rows = [first, *(prefill(cache, request(index, [*A, *B, *C])) for index in range(1, 10))]
    assert cache.kv.num_available == available
    assert [cache.kv.num_refs(block) for block in first.block_ids] == [10, 10, 10]
    cache.check_integrity(rows)


def test_branches_of_a_long_prefix_compute_each_token_once() -> None:
    cache = small_cache(num_blocks=64, num_slots=32, block_size=256)
    a, b = list(range(256)), list(range(1000, 1256))
    r1, r2, r3 = ([seed + index for index in range(288)] for seed in (2000, 3000, 4000))
    tails = [a + [7] * 44, a + b + r1, a + b + r2, a + b + r3, a + b + r1[:256] + [8] * 332]
    computed = []
    for index, prompt in enumerate(tails):
        before = cache.counters.prefill_tokens_computed
        serve(cache, request(index, prompt))
        computed.append(cache.counters.prefill_tokens_computed - before)
    assert computed == [300, 544, 544, 288, 332]
    assert (sum(computed), sum(map(len, tails))) == (2008, 3800)


def test_whole_block_prompts_compute_one_block_each() -> None:
    cache = small_cache(num_blocks=64, num_slots=32, block_size=256)
    a, b = list(range(256)), list(range(1000, 1256))
    for index, prompt in enumerate((a, a, a + b, a + b)):
        serve(cache, request(index, prompt))
    assert cache.counters.prefill_tokens_computed == 1024


# Tenants, flushes, a cache switched off.


def test_tenants_never_share() -> None:
    cache = small_cache()
    assert serve(cache, request(0, [*A, *B, 9], tenant="red")) == 0
    plan = planned(cache, request(1, [*A, *B, 9], tenant="blue"))
    assert (plan.match.blocks, plan.match.skip_tokens) == ((), 0)
    assert serve(cache, request(2, [*A, *B, 9], tenant="red")) == 2 * BLOCK


def test_disabled_cache_registers_nothing() -> None:
    cache = small_cache(enabled=False)
    assert [serve(cache, request(index, [*A, *B, 9]), [1] * 9) for index in range(2)] == [0, 0]
    assert (cache.kv.num_cached, cache.counters.states_reserved) == (0, 0)


@pytest.mark.parametrize("weights_version", [None, "1"])
def test_nothing_cached_is_found_after_a_flush(weights_version: str | None) -> None:
    cache = small_cache()
    serve(cache, request(0, [*A, *B, 9]))
    candidate = cache.candidate(request(1, [*A, *B, 9]))
    cache.flush(weights_version)
    plan = cache.plan(candidate, ENOUGH)
    assert not isinstance(plan, Refusal) and plan.match.blocks == ()
    assert (cache.kv.num_cached, cached_states(cache)) == (0, [])


def test_keys_depend_on_tenant_weights_and_epoch() -> None:
    cache = small_cache()
    roots = {cache.root_of(""), cache.root_of("red")}
    for weights_version in (None, "1", "0"):
        cache.flush(weights_version)
        roots.add(cache.root_of(""))
    assert len(roots) == 5


def test_row_admitted_before_a_flush_publishes_nothing_after_it() -> None:
    cache = small_cache()
    decoding = prefill(cache, request(0, [*A, *B, 9]))
    prefilling = admit(cache, request(1, [*C, *D, 9]))
    assert prefilling.reserved
    cache.flush()
    run_step(cache, [prefilling])
    decode(cache, decoding, [5] * 2 * BLOCK)
    cache.check_integrity([decoding, prefilling])
    for prompt in ([*A, *B, 9, 0, *([5] * BLOCK)], [*C, *D, 9]):
        assert planned(cache, request(2, prompt)).match.blocks == ()
    assert (cache.slots.num_reserved, cached_states(cache)) == (0, [])


def test_flush_frees_the_state_that_a_row_starts_from_once_the_row_has_read_it() -> None:
    cache = small_cache()
    serve(cache, request(0, [*A, *B, 9]))
    row = admit(cache, request(1, [*A, *B, 8]))
    assert row.source_slot is not None
    source = row.source_slot
    cache.flush()
    cache.check_integrity([row])
    assert cache.slots.owner_of(source) is SlotOwner.CACHED
    run_step(cache, [row])
    assert cache.slots.owner_of(source) is SlotOwner.FREE
    cache.check_integrity([row])


def test_rows_that_ran_before_a_flush_are_cached_again_when_prefilled_again() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [*A, *B, 9]))
    cache.flush()
    cache.release(row)
    assert [serve(cache, request(index, [*A, *B, 9])) for index in (0, 1)] == [0, 2 * BLOCK]


# Identical content in one step.


def test_rows_of_equal_prompts_in_one_step_leave_one_block_for_each_key() -> None:
    cache = small_cache()
    rows = [admit(cache, request(index, [*A, *B, 9], may_skip=False)) for index in range(2)]
    own = [list(row.block_ids) for row in rows]
    assert not set(own[0]) & set(own[1])
    run_step(cache, rows)
    assert rows[1].block_ids == [*own[0][:2], own[1][2]]
    assert [cache.kv.num_refs(block) for block in own[0]] == [2, 2, 1]
    assert [cache.kv.num_refs(block) for block in own[1]] == [0, 0, 1]
    assert cached_states(cache) == [own[0][1]]
    cache.check_integrity(rows)
    for row in rows:
        cache.release(row)
    assert (cache.kv.num_cached, cache.kv.num_free) == (2, 14)


def test_rows_of_equal_replies_leave_one_block_for_each_key() -> None:
    cache = small_cache()
    rows = [prefill(cache, request(index, [*A, 9]), first_token=5) for index in range(2)]
    for token in (6, 7, 8, 8, 8, 8):
        for row in rows:
            if row.computed == len(row.block_ids) * BLOCK:
                cache.grow(row)
            cache.schedule_decode(row)
        run_step(cache, rows, token)
    assert rows[0].block_ids[:2] == rows[1].block_ids[:2]
    assert rows[0].block_ids[2] != rows[1].block_ids[2]
    cache.check_integrity(rows)


def test_row_after_an_adoption_extends_the_adopted_chain() -> None:
    cache = small_cache()
    rows = [admit(cache, request(index, [*A, *B, 9], may_skip=False)) for index in range(2)]
    run_step(cache, rows)
    cache.release(rows[0])
    decode(cache, rows[1], [5] * BLOCK)
    third = rows[1].block_ids[2]
    assert cache.kv.parent_of(third) == rows[1].block_ids[1]
    assert cache.kv.depth(third) == 3
    cache.check_integrity(rows[1:])


def test_second_state_for_a_key_is_released() -> None:
    cache = small_cache(stride=1)
    rows = [admit(cache, request(0, [*A, *B, 9]), budget=6), admit(cache, request(1, [*A, 8], may_skip=False))]
    assert [len(row.reserved) for row in rows] == [1, 0]
    run_step(cache, rows)
    assert len(cached_states(cache)) == 1 and cache.slots.num_reserved == 0


# Waiting for a prefix.


def test_request_waits_for_a_prefix_that_this_step_computes() -> None:
    cache = small_cache()
    row = admit(cache, request(0, [*A, *B, 9]))
    assert outcome(cache, [*A, *B, 8]) is Refusal.WAITS_FOR_PREFIX
    run_step(cache, [row])
    assert planned(cache, request(1, [*A, *B, 8])).match.skip_tokens == 2 * BLOCK


@pytest.mark.parametrize("prompt", [[*B, *A, 9], [*A, *C, 9], [*A, *B]])
def test_request_that_cannot_use_the_reserved_boundary_does_not_wait(prompt: list[int]) -> None:
    cache = small_cache()
    admit(cache, request(0, [*A, *B, 9]))
    assert not isinstance(outcome(cache, prompt), Refusal)


@pytest.mark.parametrize("settings", [{"tenant": "blue"}, {"may_skip": False}])
def test_request_that_may_not_use_the_reserved_boundary_does_not_wait(settings: dict[str, object]) -> None:
    cache = small_cache()
    admit(cache, request(0, [*A, *B, 9]))
    assert not isinstance(outcome(cache, [*A, *B, 9], **settings), Refusal)


def test_request_does_not_wait_for_a_boundary_that_found_no_slot() -> None:
    cache = small_cache(num_slots=2)
    other = prefill(cache, request(0, [5]))
    row = admit(cache, request(1, [*A, *B, 9]))
    cache.release(other)
    assert row.reserved == [] and cache.counters.states_skipped_no_room == 1
    assert not isinstance(outcome(cache, [*A, *B, 9]), Refusal)


@pytest.mark.parametrize("leave", ["abort", "release", "flush"])
def test_request_does_not_wait_for_an_owner_that_will_not_publish(leave: str) -> None:
    cache = small_cache()
    row = admit(cache, request(0, [*A, *B, 9]))
    if leave == "flush":
        cache.flush()
    else:
        getattr(cache, leave)(row)
    assert not isinstance(outcome(cache, [*A, *B, 9]), Refusal)


def test_request_does_not_wait_for_a_boundary_past_its_own_prompt() -> None:
    cache = small_cache()
    serve(cache, request(0, [*A, *B, 9]))
    admit(cache, request(1, [*A, *B, *C, 9]))
    plan = planned(cache, request(2, [*A, *B, 9]))
    assert plan.match.skip_tokens == 2 * BLOCK


# Chunks and partial blocks.


def test_partial_block_is_never_registered() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [*A, 5, 6]), first_token=7)
    assert cache.kv.key_of(row.block_ids[1]) is None
    decode(cache, row, [8])
    assert (row.computed, cache.kv.key_of(row.block_ids[1])) == (7, None)
    decode(cache, row, [9])
    assert (row.computed, cache.kv.key_of(row.block_ids[1])) != (8, None)


def test_key_never_covers_a_token_that_is_sampled_but_not_computed() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [*A, 5, 6, 7]), first_token=8)
    assert row.length == 2 * BLOCK
    cache.release(row)
    assert len(planned(cache, request(1, [*A, 5, 6, 7, 8, 9])).match.blocks) == 1


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("budget", range(1, 15))
def test_chunks_of_any_size_leave_the_same_keys_as_one_chunk(budget: int, align: bool) -> None:
    prompt = [*A, *B, *C, 9]
    whole = small_cache()
    keys = [whole.kv.key_of(block) for block in prefill(whole, request(0, prompt)).block_ids]
    cache = small_cache(align=align)
    row = admit(cache, request(0, prompt), budget)
    run_step(cache, [row])
    while row.is_prefilling:
        full_blocks = row.block_ids[: row.computed // BLOCK]
        assert [cache.kv.key_of(block) for block in full_blocks] == keys[: len(full_blocks)]
        assert all(cache.kv.key_of(block) is None for block in row.block_ids[len(full_blocks) :])
        cache.schedule_chunk(row, min(row.computed + budget, len(prompt)))
        run_step(cache, [row])
        cache.check_integrity([row])
    assert [cache.kv.key_of(block) for block in row.block_ids] == keys


def test_chunk_that_ends_inside_a_block_publishes_the_boundary_before_it_only() -> None:
    cache = small_cache(align=False)
    row = admit(cache, request(0, [*A, *B, 9]), budget=6)
    run_step(cache, [row])
    assert cached_states(cache) == []
    assert len(planned(cache, request(1, [*A, *B, 9])).match.blocks) == 1


def test_shared_blocks_stay_as_they_are_while_a_row_recomputes_them() -> None:
    cache = small_cache()
    first = prefill(cache, request(0, [*A, *B, *C, 9]))
    drop_states(cache)
    row = admit(cache, request(1, [*A, *B, *C, 8]), budget=6)
    run_step(cache, [row])
    assert (row.computed, row.num_shared_blocks, row.num_published_blocks) == (BLOCK, 3, 3)
    assert row.block_ids[:3] == first.block_ids[:3]
    cache.check_integrity([first, row])


# Decode: checkpoints and drafts.


def reply_of(num_blocks: int) -> list[int]:
    """Return a reply of so many blocks and two tokens."""
    return [20 + index for index in range(num_blocks * BLOCK + 2)]


def positions_with_a_state(cache: PrefixCache, row: RunningRequest) -> list[int]:
    return [(index + 1) * BLOCK for index, block in enumerate(row.block_ids) if cache.slots.slot_of(block) is not None]


def turn_after(row: RunningRequest) -> list[int]:
    """Return the prompt of a next turn: all that was said, and a question."""
    return [*map(int, row.tokens(0, row.length)), 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("checkpoints", "positions"), [("rolling", [BLOCK, 4 * BLOCK]), ("all", [4, 8, 12, 16]), ("none", [BLOCK])]
)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_decoding_leaves_the_checkpoints_that_are_wished(
    checkpoints: str, positions: list[int], num_drafts: int
) -> None:
    cache = small_cache(checkpoints=checkpoints, max_requests=1)  # type: ignore[arg-type]
    row = prefill(cache, request(0, A), first_token=5)
    while row.computed < 4 * BLOCK:
        drafts = [6] * num_drafts
        verify(cache, row, drafts, [*drafts, 6])
        cache.check_integrity([row])
    assert positions_with_a_state(cache, row) == positions
    cache.release(row)
    turn = [*A, 5, *([6] * 3 * BLOCK), 7, 7]
    assert planned(cache, request(1, turn)).match.skip_tokens == positions[-1]


def test_next_turn_starts_behind_the_last_whole_block_of_the_reply() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    decode(cache, row, [5, 6, 7, 8, 9, 10])
    cache.release(row)
    assert serve(cache, request(1, turn_after(row))) == 2 * BLOCK
    assert cache.counters.decode_states_published == 2


def test_checkpoint_is_not_retired_before_the_next_one_is_published() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    decode(cache, row, [5, 6, 7, 8])
    cache.grow(row)
    cache.schedule_decode(row, [9])
    assert (row.computed, [state.position for state in row.reserved]) == (7, [8])
    assert positions_with_a_state(cache, row) == [BLOCK]
    keep(cache, row, [9])
    assert positions_with_a_state(cache, row) == [2 * BLOCK]


def test_checkpoint_that_another_request_starts_from_is_not_retired() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    decode(cache, row, [5])
    other = prefill(cache, request(1, [1, 2, 3, 4, 9]))
    assert other.num_shared_blocks == 1 and cache.counters.states_restored == 1
    decode(cache, row, [6, 7, 8, 9, 10])
    assert positions_with_a_state(cache, row) == [BLOCK, 2 * BLOCK]
    cache.check_integrity([row, other])


def test_checkpoint_that_ends_another_request_s_prompt_is_not_retired() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    decode(cache, row, [5])
    other = prefill(cache, request(1, [1, 2, 3, 4]))
    assert cache.counters.states_restored == 0
    decode(cache, row, [6, 7, 8, 9, 10])
    assert positions_with_a_state(cache, row) == [BLOCK, 2 * BLOCK]
    cache.check_integrity([row, other])


def test_state_of_the_prompt_is_no_checkpoint_and_is_not_retired() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [*A, *B, 3]), first_token=4)
    decode(cache, row, reply_of(3))
    assert positions_with_a_state(cache, row) == [2 * BLOCK, 5 * BLOCK]


def test_checkpoint_that_another_request_left_is_not_retired() -> None:
    cache = small_cache()
    first = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    decode(cache, first, [5, 6])
    cache.release(first)
    row = prefill(cache, request(1, [1, 2, 3]), first_token=4)
    decode(cache, row, [5, 6, 7, 8, 9])
    assert positions_with_a_state(cache, row) == [BLOCK, 2 * BLOCK]
    assert cache.counters.decode_states_published == 2


def test_checkpoint_that_two_requests_came_to_is_not_retired() -> None:
    cache = small_cache()
    rows = [prefill(cache, request(index, [1, 2, 3]), first_token=4) for index in range(2)]
    for row in rows:
        decode(cache, row, [5])
    decode(cache, rows[0], [6, 7, 8, 9])
    assert positions_with_a_state(cache, rows[0]) == [BLOCK, 2 * BLOCK]
    assert positions_with_a_state(cache, rows[1]) == [BLOCK]
    cache.check_integrity(rows)


def test_without_a_slot_the_old_checkpoint_stays_and_the_skip_is_counted() -> None:
    cache = small_cache(num_slots=3)
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    decode(cache, row, [5])
    (block,) = cached_states(cache)
    cache.slots.pin(block)
    cache.slots.take_live()
    decode(cache, row, [6, 7, 8, 9])
    assert cached_states(cache) == [block]
    assert (cache.counters.states_skipped_no_room, cache.counters.decode_states_published) == (1, 1)


def test_boundary_is_reserved_in_the_steps_that_can_reach_it_only() -> None:
    cache = small_cache(block_size=8)
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    reserved = []
    for drafts in ([], [5] * 3, [5] * 4, [5] * 5):
        cache.schedule_decode(row, drafts)
        reserved.append([state.position for state in row.reserved])
        cache.abort(row)
    assert reserved == [[], [], [8], [8]]


@pytest.mark.parametrize("num_kept", range(1, 5))
def test_nothing_past_the_kept_tokens_is_ever_findable(num_kept: int) -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1]), first_token=2)
    verify(cache, row, [3, 4, 5], [3, 4, 5, 6][:num_kept])
    assert row.computed == 1 + num_kept
    match = planned(cache, request(1, [1, 2, 3, 4, 5, 6])).match
    is_reached = row.computed >= BLOCK
    assert match.skip_tokens == (BLOCK if is_reached else 0)
    assert match.blocks == tuple(row.block_ids[: int(is_reached)])
    assert cache.slots.num_reserved == 0 and len(cached_states(cache)) == int(is_reached)
    cache.check_integrity([row])


def test_drafts_grow_the_row_by_the_block_that_they_need() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    cache.schedule_decode(row)
    assert len(row.block_ids) == 1
    cache.abort(row)
    cache.schedule_decode(row, [5])
    assert (len(row.block_ids), row.drafts) == (2, (5,))
    cache.check_integrity([row])


def test_drafts_that_find_no_block_are_left_out() -> None:
    cache = small_cache(num_blocks=1)
    row = prefill(cache, request(0, [1, 2]), first_token=3)
    cache.schedule_decode(row, [4, 5, 6])
    assert (row.drafts, row.scheduled, len(row.draft_slots)) == ((4,), 2, 1)
    cache.check_integrity([row])


def test_aborted_drafts_leave_the_row_where_it_was() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2]), first_token=3)
    verify(cache, row, [4, 5], [4, 9])
    column = row.state_slot
    assert (row.accepted, column) == (2, row.draft_slots[0])
    cache.schedule_decode(row, [5, 6, 7])
    cache.abort(row)
    assert (row.drafts, row.scheduled, row.accepted, row.state_slot) == ((), 0, 2, column)
    cache.check_integrity([row])
    verify(cache, row, [], [8])
    assert (row.accepted, row.draft_slots) == (1, [])


def test_row_that_restarts_takes_no_column_along() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2]), first_token=3)
    verify(cache, row, [4, 5], [4, 5, 6])
    cache.release(row)
    cache.check_integrity([])
    assert cache.slots.count_by_owner()["draft"] == 0 and not row.draft_slots


def test_release_that_fails_at_a_column_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2]), first_token=3)
    verify(cache, row, [4, 5], [4, 5, 6])

    def fail(*_: object) -> None:
        raise RuntimeError("release_draft")

    with monkeypatch.context() as patch:
        patch.setattr(cache.slots, "release_draft", fail)
        with pytest.raises(RuntimeError, match="release_draft"):
            cache.release(row)
    cache.check_integrity([row])
    cache.release(row)
    cache.check_integrity([])
    assert cache.slots.num_available == cache.slots.num_slots


def test_drafts_are_counted_by_place() -> None:
    cache = small_cache(block_size=16)
    row = prefill(cache, request(0, [1, 2]), first_token=3)
    verify(cache, row, [4, 5, 6], [4, 5, 9])
    verify(cache, row, [1], [7])
    verify(cache, row, [], [8])
    counters = cache.counters
    assert (counters.decode_rows, counters.draft_tokens, counters.accepted_tokens) == (3, 4, 2)
    assert (counters.drafts_at, counters.accepted_at) == ([2, 1, 1], [1, 1, 0])
    assert counters.decode_tokens_computed == 4 + 2 + 1


def test_flush_in_mid_decode_publishes_no_checkpoint() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1, 2, 3]), first_token=4)
    cache.schedule_decode(row)
    assert row.reserved
    cache.flush()
    keep(cache, row, [5])
    decode(cache, row, reply_of(2))
    assert cached_states(cache) == [] and cache.slots.num_reserved == 0
    assert cache.counters.states_reserved == 1


# Slots: live ones first.


def test_live_request_takes_the_only_other_slot_from_the_state_it_would_start_from() -> None:
    cache = small_cache(num_slots=2)
    serve(cache, request(0, [*A, *B, 9]))
    other = prefill(cache, request(1, [5]))
    assert cache.slots.count_by_owner() | {"draft": 0} == {"free": 0, "live": 1, "reserved": 0, "cached": 1, "draft": 0}
    row = admit(cache, request(2, [*A, *B, 9]))
    assert (row.computed, row.source_slot, row.num_shared_blocks) == (0, None, 2)
    assert cached_states(cache) == []
    cache.check_integrity([other, row])


def test_request_waits_for_a_slot_only_while_one_is_reserved() -> None:
    cache = small_cache(num_slots=2)
    first = admit(cache, request(0, [*A, *B, 9]))
    assert outcome(cache, [5]) is Refusal.NO_SLOT
    run_step(cache, [first])
    row = admit(cache, request(1, [5]))
    assert cached_states(cache) == []
    cache.check_integrity([first, row])


@pytest.mark.parametrize("max_requests", [1, 2, 3])
def test_one_slot_more_than_requests_is_enough_for_any_of_them(max_requests: int) -> None:
    cache = small_cache(num_slots=max_requests + 1, num_blocks=32)
    for turn in range(3):
        rows = []
        for index in range(max_requests):
            row = admit(cache, request(10 * turn + index, [index, *A, *B, 9]))
            run_step(cache, [row])
            rows.append(row)
        cache.check_integrity(rows)
        for row in rows:
            cache.release(row)
    assert cache.slots.count_by_owner()["live"] == 0


def test_cache_goes_on_when_no_slot_is_left_for_a_boundary() -> None:
    cache = small_cache(num_slots=1)
    row = prefill(cache, request(0, [*A, *B, 9]))
    assert cache.counters.states_skipped_no_room == 1
    assert cache.kv.key_of(row.block_ids[1]) is not None


# Plans.


@pytest.mark.parametrize("prompt", [[*A, *B, 9], [*A, *B, *C, 9], [*D, 9], A * 20])
@pytest.mark.parametrize("budget", [0, 3, ENOUGH])
def test_planning_changes_nothing(prompt: list[int], budget: int) -> None:
    cache = small_cache(num_blocks=9, num_slots=4)
    serve(cache, request(0, [*A, *B, 9]))
    admit(cache, request(1, [*A, *B, *C, 5]))
    candidate = cache.candidate(request(2, prompt))
    before = frozen(cache)
    cache.plan(candidate, budget)
    assert frozen(cache) == before


def test_plan_after_a_flush_refreshes_stale_keys_and_nothing_else() -> None:
    cache = small_cache()
    candidate = cache.candidate(request(0, [*A, *B, 9]))
    cache.flush()
    before = frozen(cache)
    cache.plan(candidate, ENOUGH)
    assert frozen(cache) == before
    assert candidate.epoch == cache.epoch
    assert candidate.chain.keys == cache.candidate(candidate.spec).chain.keys


def remove_the_state(cache: PrefixCache) -> None:
    drop_states(cache)


def remove_the_blocks(cache: PrefixCache) -> None:
    cache.kv.release(cache.kv.allocate(cache.kv.num_available))


def remove_the_free_blocks(cache: PrefixCache) -> None:
    cache.kv.allocate(cache.kv.num_free)


def remove_every_key(cache: PrefixCache) -> None:
    cache.flush()


def remove_the_free_slots(cache: PrefixCache) -> None:
    for _ in range(cache.slots.count_by_owner()["free"]):
        cache.slots.take_live()


@pytest.mark.parametrize(
    "remove",
    [remove_the_state, remove_the_blocks, remove_the_free_blocks, remove_every_key, remove_the_free_slots],
    ids=lambda remove: remove.__name__,
)
def test_plan_that_no_longer_holds_is_refused_and_nothing_changes(remove: object) -> None:
    cache = small_cache()
    serve(cache, request(0, [*A, *B, 9]))
    candidate = cache.candidate(request(1, [*A, *B, 8]))
    plan = cache.plan(candidate, ENOUGH)
    assert not isinstance(plan, Refusal) and plan.match.skip_tokens == 2 * BLOCK
    remove(cache)  # type: ignore[operator]
    before = frozen(cache)
    with pytest.raises(CacheIntegrityError):
        cache.admit(candidate, plan)
    assert frozen(cache) == before


def test_plan_whose_blocks_hold_another_prefix_by_now_is_refused() -> None:
    cache = small_cache(num_blocks=4)
    serve(cache, request(0, [*A, *B, 9]))
    drop_states(cache)
    candidate = cache.candidate(request(1, [*A, *B, 8]))
    plan = cache.plan(candidate, ENOUGH)
    assert not isinstance(plan, Refusal) and len(plan.match.blocks) == 2
    serve(cache, request(2, [*C, *C, *C, *C]))
    assert all(cache.kv.key_of(block) for block in plan.match.blocks)
    before = frozen(cache)
    with pytest.raises(CacheIntegrityError, match="no longer cached"):
        cache.admit(candidate, plan)
    assert frozen(cache) == before


def test_growing_without_a_block_changes_nothing() -> None:
    cache = small_cache(num_blocks=2)
    row = prefill(cache, request(0, [*A, *B]))
    before = frozen(cache)
    with pytest.raises(CacheCapacityError, match="buffer-size-gb"):
        cache.grow(row)
    assert frozen(cache) == before and len(row.block_ids) == 2


# Abort, release, eviction.


@pytest.mark.parametrize(
    ("part", "method"),
    [("slots", "unpin"), ("slots", "cancel"), ("slots", "touch"), ("slots", "release_live"), ("kv", "release")],
)
def test_release_that_fails_half_way_can_be_repeated(part: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small_cache()
    serve(cache, request(0, [*A, *B, 9]))
    row = admit(cache, request(1, [*A, *B, *C, 9]))
    assert row.reserved and row.source_block is not None
    held = (list(row.block_ids), row.live_slot)

    def fail(*_: object) -> None:
        raise RuntimeError(method)

    with monkeypatch.context() as patch:
        patch.setattr(getattr(cache, part), method, fail)
        with pytest.raises(RuntimeError, match=method):
            cache.release(row)
    cache.check_integrity([row])
    assert (row.block_ids, row.live_slot) == held
    assert cache.slots.owner_of(row.live_slot) is SlotOwner.LIVE
    cache.release(row)
    cache.check_integrity([])
    assert (cache.kv.num_referenced, cache.slots.num_available) == (0, cache.slots.num_slots)


def test_abort_returns_reservations_and_pins_and_publishes_nothing() -> None:
    cache = small_cache(stride=1)
    serve(cache, request(0, [*A, 9]))
    row = admit(cache, request(1, [*A, *B, *C, 9]))
    assert len(row.reserved) == 2 and cache.slots.is_pinned(row.block_ids[0])
    cache.abort(row)
    assert (row.reserved, row.scheduled, row.source_block) == ([], 0, None)
    assert cache.slots.num_reserved == 0 and not cache.slots.is_pinned(row.block_ids[0])
    assert [cache.kv.key_of(block) is None for block in row.block_ids] == [False, True, True, True]
    cache.check_integrity([row])


def test_release_in_the_middle_of_a_step_returns_everything() -> None:
    cache = small_cache(stride=1)
    serve(cache, request(0, [*A, 9]))
    row = admit(cache, request(1, [*A, *B, *C, 9]))
    cache.release(row)
    cache.check_integrity([])
    assert cache.slots.count_by_owner() == {"free": 7, "live": 0, "reserved": 0, "cached": 1, "draft": 0}
    assert cache.kv.num_cached == 1


def test_what_a_finished_request_published_stays_until_evicted() -> None:
    cache = small_cache(num_blocks=4)
    serve(cache, request(0, [*A, *B, 9]))
    serve(cache, request(1, [*C, 9]))
    assert planned(cache, request(2, [*A, *B, 9])).match.skip_tokens == 2 * BLOCK
    serve(cache, request(3, [*D, *D, *D, 9]))
    assert planned(cache, request(4, [*A, *B, 9])).match.blocks == ()


def test_state_leaves_with_its_block() -> None:
    cache = small_cache(num_blocks=3)
    serve(cache, request(0, [*A, *B, 9]))
    (block,) = cached_states(cache)
    taken = cache.kv.allocate(2)
    assert block in taken and cached_states(cache) == []
    assert cache.slots.count_by_owner()["free"] == 8


def test_matched_prefix_is_not_evicted_for_the_request_that_matched_it() -> None:
    cache = small_cache(num_blocks=4)
    serve(cache, request(0, [*A, *B, 9]))
    serve(cache, request(1, [*D, 9]))
    row = admit(cache, request(2, [*A, *B, *C, 9]))
    assert row.computed == 2 * BLOCK
    assert [cache.kv.find(key) for key in row.chain.keys[:2]] == row.block_ids[:2]
    assert outcome(cache, [*D, 9]) is Refusal.NO_BLOCKS
    cache.check_integrity([row])


def test_states_of_a_request_that_just_ended_outlive_older_ones() -> None:
    cache = small_cache(num_slots=4)
    first = prefill(cache, request(0, [*A, 9]))
    cache.release(prefill(cache, request(1, [*B, 9])))
    cache.release(first)
    cache.slots.reserve(3)
    assert cached_states(cache) == [cache.kv.find(first.chain.keys[0])]


def test_source_state_is_pinned_until_the_step_is_published() -> None:
    cache = small_cache(num_slots=3)
    serve(cache, request(0, [*A, *B, 9]))
    row = admit(cache, request(1, [*A, *B, 8]))
    source = row.source_block
    assert source is not None and cache.slots.is_pinned(source)
    with pytest.raises(CacheCapacityError):
        cache.slots.reserve(2)
    run_step(cache, [row])
    assert not cache.slots.is_pinned(source) and row.source_slot is None


def test_age_counts_admissions_and_survives_a_readmission() -> None:
    cache = small_cache()
    rows = [prefill(cache, request(index, [index])) for index in range(3)]
    assert [row.age for row in rows] == [0, 1, 2]
    cache.release(rows[0])
    again = cache.candidate(request(0, [0, 0]))
    plan = planned(cache, again.spec)
    assert cache.admit(again, plan, age=rows[0].age).age == 0


def test_counters_say_what_was_matched_and_what_was_skipped() -> None:
    cache = small_cache()
    serve(cache, request(0, [*A, *B, 9]))
    serve(cache, request(1, [*A, *B, 9]), [1, 2])
    serve(cache, request(2, [*A, *C, 9]))
    counters = cache.counters
    assert (counters.requests_admitted, counters.prompt_tokens_matched, counters.prompt_tokens_skipped) == (3, 12, 8)
    assert (counters.prefill_tokens_computed, counters.decode_tokens_computed) == (9 + 1 + 9, 2)
    assert (counters.states_reserved, counters.states_published, counters.states_restored) == (3, 3, 1)


# Integrity checks.


def lose_a_row(rows: list[object]) -> None:
    rows.pop()


def lose_a_block(rows: list[object]) -> None:
    rows[0].block_ids.pop()  # type: ignore[attr-defined]


def hold_a_strange_block(rows: list[object]) -> None:
    rows[0].block_ids.append(BlockId(15))  # type: ignore[attr-defined]


def lose_a_column(rows: list[object]) -> None:
    rows[0].draft_slots.pop()  # type: ignore[attr-defined]


def claim_a_strange_column(rows: list[object]) -> None:
    rows[0].draft_slots[0] = rows[0].live_slot  # type: ignore[attr-defined]


def swap_live_slot_and_column(rows: list[object]) -> None:
    row = rows[0]
    row.draft_slots[0], row.live_slot = row.live_slot, row.draft_slots[0]  # type: ignore[attr-defined]


def lose_a_reservation(rows: list[object]) -> None:
    rows[1].reserved.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_row,
        lose_a_block,
        hold_a_strange_block,
        lose_a_reservation,
        lose_a_column,
        claim_a_strange_column,
        swap_live_slot_and_column,
    ],
)
def test_check_integrity_finds_rows_that_disagree_with_the_pools(corrupt: object) -> None:
    cache = small_cache()
    rows = [prefill(cache, request(0, [*A, 9])), admit(cache, request(1, [*B, 9]))]
    cache.schedule_decode(rows[0], [8])
    cache.check_integrity(rows)
    corrupt(rows)  # type: ignore[operator]
    with pytest.raises(CacheIntegrityError):
        cache.check_integrity(rows)
