"""Decode checkpoints, drafts, and the priority of live states over cached states."""

import pytest

from megatron_mamba_cache.policy.admission import Refusal
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.requests import RunningRequest
from tests.policy.small_cache import (
    BLOCK,
    admit,
    cached_states,
    decode,
    keep,
    new_spec,
    outcome,
    planned,
    prefill,
    run_step,
    serve,
    small_cache,
    verify,
)

A, B, C, D = ([token] * BLOCK for token in (1, 2, 3, 4))


# Decode: checkpoints and drafts.


def reply_of(num_blocks: int) -> list[int]:
    """Return the tokens of a reply: `num_blocks` blocks and two tokens."""
    return [20 + index for index in range(num_blocks * BLOCK + 2)]


def positions_with_a_state(cache: PrefixCache, request: RunningRequest) -> list[int]:
    return [
        (index + 1) * BLOCK for index, block in enumerate(request.block_ids) if cache.slots.slot_of(block) is not None
    ]


def turn_after(request: RunningRequest) -> list[int]:
    """Return the prompt of the next turn: the whole conversation and a new question."""
    return [*map(int, request.tokens(0, request.length)), 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("checkpoints", "positions"), [("rolling", [BLOCK, 4 * BLOCK]), ("all", [4, 8, 12, 16]), ("none", [BLOCK])]
)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_decoding_keeps_the_configured_number_of_checkpoints(
    checkpoints: str, positions: list[int], num_drafts: int
) -> None:
    cache = small_cache(checkpoints=checkpoints, max_requests=1)  # type: ignore[arg-type]
    request = prefill(cache, new_spec(0, A), first_token=5)
    while request.computed < 4 * BLOCK:
        drafts = [6] * num_drafts
        verify(cache, request, drafts, [*drafts, 6])
        cache.check_integrity([request])
    assert positions_with_a_state(cache, request) == positions
    cache.release(request)
    turn = [*A, 5, *([6] * 3 * BLOCK), 7, 7]
    assert planned(cache, new_spec(1, turn)).match.skip_tokens == positions[-1]


def test_next_conversation_turn_resumes_after_the_replys_last_full_block() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    decode(cache, request, [5, 6, 7, 8, 9, 10])
    cache.release(request)
    assert serve(cache, new_spec(1, turn_after(request))) == 2 * BLOCK
    assert cache.counters.decode_states_published == 2


def test_checkpoint_is_dropped_only_after_the_next_one_is_cached() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    decode(cache, request, [5, 6, 7, 8])
    cache.grow(request)
    cache.schedule_decode(request, [9])
    assert (request.computed, [state.position for state in request.reserved]) == (7, [8])
    assert positions_with_a_state(cache, request) == [BLOCK]
    keep(cache, request, [9])
    assert positions_with_a_state(cache, request) == [2 * BLOCK]


def test_checkpoint_in_use_by_another_request_is_not_dropped() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    decode(cache, request, [5])
    other = prefill(cache, new_spec(1, [1, 2, 3, 4, 9]))
    assert other.num_shared_blocks == 1 and cache.counters.states_restored == 1
    decode(cache, request, [6, 7, 8, 9, 10])
    assert positions_with_a_state(cache, request) == [BLOCK, 2 * BLOCK]
    cache.check_integrity([request, other])


def test_checkpoint_at_another_requests_prompt_end_is_not_dropped() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    decode(cache, request, [5])
    other = prefill(cache, new_spec(1, [1, 2, 3, 4]))
    assert cache.counters.states_restored == 0
    decode(cache, request, [6, 7, 8, 9, 10])
    assert positions_with_a_state(cache, request) == [BLOCK, 2 * BLOCK]
    cache.check_integrity([request, other])


def test_state_at_the_prompt_end_is_not_dropped_as_a_checkpoint() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [*A, *B, 3]), first_token=4)
    decode(cache, request, reply_of(3))
    assert positions_with_a_state(cache, request) == [2 * BLOCK, 5 * BLOCK]


def test_checkpoint_left_by_a_finished_request_is_not_dropped() -> None:
    cache = small_cache()
    first = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    decode(cache, first, [5, 6])
    cache.release(first)
    request = prefill(cache, new_spec(1, [1, 2, 3]), first_token=4)
    decode(cache, request, [5, 6, 7, 8, 9])
    assert positions_with_a_state(cache, request) == [BLOCK, 2 * BLOCK]
    assert cache.counters.decode_states_published == 2


def test_checkpoint_reached_by_two_requests_is_not_dropped() -> None:
    cache = small_cache()
    requests = [prefill(cache, new_spec(index, [1, 2, 3]), first_token=4) for index in range(2)]
    for request in requests:
        decode(cache, request, [5])
    decode(cache, requests[0], [6, 7, 8, 9])
    assert positions_with_a_state(cache, requests[0]) == [BLOCK, 2 * BLOCK]
    assert positions_with_a_state(cache, requests[1]) == [BLOCK]
    cache.check_integrity(requests)


def test_old_checkpoint_stays_when_no_slot_is_free_for_a_new_checkpoint() -> None:
    cache = small_cache(num_slots=3)
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    decode(cache, request, [5])
    (block,) = cached_states(cache)
    cache.slots.pin(block)
    cache.slots.take_live()
    decode(cache, request, [6, 7, 8, 9])
    assert cached_states(cache) == [block]
    assert (cache.counters.states_skipped_no_room, cache.counters.decode_states_published) == (1, 1)


def test_checkpoint_slot_is_reserved_only_in_steps_that_can_reach_it() -> None:
    cache = small_cache(block_size=8)
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    reserved = []
    for drafts in ([], [5] * 3, [5] * 4, [5] * 5):
        cache.schedule_decode(request, drafts)
        reserved.append([state.position for state in request.reserved])
        cache.abort(request)
    assert reserved == [[], [], [8], [8]]


@pytest.mark.parametrize("num_kept", range(1, 5))
def test_rejected_draft_tokens_are_never_matched_in_the_cache(num_kept: int) -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1]), first_token=2)
    verify(cache, request, [3, 4, 5], [3, 4, 5, 6][:num_kept])
    assert request.computed == 1 + num_kept
    match = planned(cache, new_spec(1, [1, 2, 3, 4, 5, 6])).match
    is_reached = request.computed >= BLOCK
    assert match.skip_tokens == (BLOCK if is_reached else 0)
    assert match.blocks == tuple(request.block_ids[: int(is_reached)])
    assert cache.slots.num_reserved == 0 and len(cached_states(cache)) == int(is_reached)
    cache.check_integrity([request])


def test_request_gets_a_new_block_when_its_drafts_need_one() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    cache.schedule_decode(request)
    assert len(request.block_ids) == 1
    cache.abort(request)
    cache.schedule_decode(request, [5])
    assert (len(request.block_ids), request.drafts) == (2, (5,))
    cache.check_integrity([request])


def test_drafts_are_dropped_when_no_block_is_free_for_them() -> None:
    cache = small_cache(num_blocks=1)
    request = prefill(cache, new_spec(0, [1, 2]), first_token=3)
    cache.schedule_decode(request, [4, 5, 6])
    assert (request.drafts, request.scheduled, len(request.cursor.draft_slots)) == ((4,), 2, 1)
    cache.check_integrity([request])


def test_aborted_drafts_leave_the_request_unchanged() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2]), first_token=3)
    verify(cache, request, [4, 5], [4, 9])
    column = request.cursor.state_slot
    assert (request.cursor.accepted, column) == (2, request.cursor.draft_slots[0])
    cache.schedule_decode(request, [5, 6, 7])
    cache.abort(request)
    assert (request.drafts, request.scheduled, request.cursor.accepted, request.cursor.state_slot) == ((), 0, 2, column)
    cache.check_integrity([request])
    verify(cache, request, [], [8])
    assert (request.cursor.accepted, request.cursor.draft_slots) == (1, [])


def test_released_request_keeps_no_draft_slot() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2]), first_token=3)
    verify(cache, request, [4, 5], [4, 5, 6])
    cache.release(request)
    cache.check_integrity([])
    assert cache.slots.count_by_owner()["draft"] == 0 and not request.cursor.draft_slots


def test_release_that_fails_at_a_draft_slot_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2]), first_token=3)
    verify(cache, request, [4, 5], [4, 5, 6])

    def fail(*_: object) -> None:
        raise RuntimeError("release_draft")

    with monkeypatch.context() as patch:
        patch.setattr(cache.slots, "release_draft", fail)
        with pytest.raises(RuntimeError, match="release_draft"):
            cache.release(request)
    cache.check_integrity([request])
    cache.release(request)
    cache.check_integrity([])
    assert cache.slots.num_available == cache.slots.num_slots


def test_drafted_and_accepted_tokens_are_counted_by_draft_position() -> None:
    cache = small_cache(block_size=16)
    request = prefill(cache, new_spec(0, [1, 2]), first_token=3)
    verify(cache, request, [4, 5, 6], [4, 5, 9])
    verify(cache, request, [1], [7])
    verify(cache, request, [], [8])
    counters = cache.counters
    assert (counters.decode_rows, counters.draft_tokens, counters.accepted_tokens) == (3, 4, 2)
    assert (counters.drafts_at, counters.accepted_at) == ([2, 1, 1], [1, 1, 0])
    assert counters.decode_tokens_computed == 4 + 2 + 1


def test_flush_during_decode_caches_no_checkpoint() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1, 2, 3]), first_token=4)
    cache.schedule_decode(request)
    assert request.reserved
    cache.flush()
    keep(cache, request, [5])
    decode(cache, request, reply_of(2))
    assert cached_states(cache) == [] and cache.slots.num_reserved == 0
    assert cache.counters.states_reserved == 1


# Slots: live ones first.


def test_request_takes_the_slot_of_the_state_it_would_resume_from() -> None:
    cache = small_cache(num_slots=2)
    serve(cache, new_spec(0, [*A, *B, 9]))
    other = prefill(cache, new_spec(1, [5]))
    assert cache.slots.count_by_owner() | {"draft": 0} == {"free": 0, "live": 1, "reserved": 0, "cached": 1, "draft": 0}
    request = admit(cache, new_spec(2, [*A, *B, 9]))
    assert (request.computed, request.source_slot, request.num_shared_blocks) == (0, None, 2)
    assert cached_states(cache) == []
    cache.check_integrity([other, request])


def test_request_waits_for_a_reserved_slot_and_then_evicts_the_state() -> None:
    cache = small_cache(num_slots=2)
    first = admit(cache, new_spec(0, [*A, *B, 9]))
    assert outcome(cache, [5]) is Refusal.NO_SLOT
    run_step(cache, [first])
    request = admit(cache, new_spec(1, [5]))
    assert cached_states(cache) == []
    cache.check_integrity([first, request])


@pytest.mark.parametrize("max_requests", [1, 2, 3])
def test_max_requests_can_run_with_one_extra_state_slot(max_requests: int) -> None:
    cache = small_cache(num_slots=max_requests + 1, num_blocks=32)
    for turn in range(3):
        requests = []
        for index in range(max_requests):
            request = admit(cache, new_spec(10 * turn + index, [index, *A, *B, 9]))
            run_step(cache, [request])
            requests.append(request)
        cache.check_integrity(requests)
        for request in requests:
            cache.release(request)
    assert cache.slots.count_by_owner()["live"] == 0


def test_prompt_is_cached_without_its_state_when_no_slot_is_free() -> None:
    cache = small_cache(num_slots=1)
    request = prefill(cache, new_spec(0, [*A, *B, 9]))
    assert cache.counters.states_skipped_no_room == 1
    assert cache.kv.key_of(request.block_ids[1]) is not None
