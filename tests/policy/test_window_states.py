"""Slots that requests' draft windows take from the shared pool."""

import numpy as np
import pytest

from megatron_mamba_cache.policy.block_hashing import BlockKeyChain
from megatron_mamba_cache.policy.draft_states import WindowStates
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest, StateCursor
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from megatron_mamba_cache.policy.slot_pool import SlotPool


def live_request(slots: SlotPool) -> RunningRequest:
    """Return a decoding request with a live slot and no draft window."""
    return RunningRequest(
        spec=RequestSpec(0, np.array([1]), 100, SamplingSettings()),
        chain=BlockKeyChain(bytes(32), 4),
        epoch=0,
        age=0,
        cursor=StateCursor(slots.take_live()),
        block_ids=[],
        num_shared_blocks=0,
        computed=1,
    )


def cache_states(slots: SlotPool, num_states: int) -> None:
    for block, slot in enumerate(slots.reserve(num_states)):
        slots.publish(slot, BlockId(block))


def num_drafts(slots: SlotPool) -> int:
    return slots.count_by_owner()["draft"]


def test_request_gets_one_state_slot_for_each_draft() -> None:
    slots = SlotPool(9)
    request = live_request(slots)
    assert WindowStates(slots, 1, keeps_checkpoints=False).widen(request.cursor, 3) == 3
    assert len({request.cursor.live_slot, *request.cursor.draft_slots}) == 4
    assert all(slots.owner_of(slot) is SlotOwner.DRAFT for slot in request.cursor.draft_slots)


@pytest.mark.parametrize("max_requests", range(1, 7))
@pytest.mark.parametrize("num_cached", [0, 2])
def test_drafts_leave_one_slot_free_for_each_request_not_yet_admitted(max_requests: int, num_cached: int) -> None:
    slots = SlotPool(7)
    cache_states(slots, num_cached)
    windows, requests = WindowStates(slots, max_requests, keeps_checkpoints=False), [live_request(slots)]
    given = windows.widen(requests[0].cursor, 8)
    assert given == len(requests[0].cursor.draft_slots) == 7 - max_requests
    for _ in range(max_requests - 1):
        requests.append(live_request(slots))
        assert windows.widen(requests[-1].cursor, 8) == 0
    slots.check_integrity()


def test_draft_slots_evict_cached_states_but_not_pinned_ones() -> None:
    slots = SlotPool(4)
    cache_states(slots, 3)
    slots.pin(BlockId(0))
    request = live_request(slots)
    assert WindowStates(slots, 1, keeps_checkpoints=False).widen(request.cursor, 8) == 2
    assert slots.cached_blocks() == [0]


def test_draft_slots_are_only_added_when_more_are_needed() -> None:
    slots = SlotPool(9)
    windows, request = WindowStates(slots, 1, keeps_checkpoints=False), live_request(slots)
    windows.widen(request.cursor, 2)
    first = list(request.cursor.draft_slots)
    assert windows.widen(request.cursor, 5) == 5
    assert request.cursor.draft_slots[:2] == first and num_drafts(slots) == 5
    assert windows.widen(request.cursor, 1) == 1
    assert num_drafts(slots) == 5


def test_request_keeps_its_draft_slots_when_no_more_are_free() -> None:
    slots = SlotPool(4)
    windows, request = WindowStates(slots, 1, keeps_checkpoints=False), live_request(slots)
    windows.widen(request.cursor, 2)
    other = slots.take_live()
    assert windows.widen(request.cursor, 8) == 2
    slots.release_live(other)
    assert windows.widen(request.cursor, 8) == 3


def test_requests_beyond_max_requests_get_no_draft_slots() -> None:
    slots = SlotPool(4)
    requests = [live_request(slots) for _ in range(3)]
    windows = WindowStates(slots, 1, keeps_checkpoints=False)
    assert windows.widen(requests[0].cursor, 3) == 1
    assert windows.widen(requests[1].cursor, 3) == 0
    slots.check_integrity()


@pytest.mark.parametrize("accepted", range(1, 6))
def test_slots_after_the_last_accepted_draft_are_freed(accepted: int) -> None:
    slots = SlotPool(9)
    windows, request = WindowStates(slots, 1, keeps_checkpoints=False), live_request(slots)
    windows.widen(request.cursor, 4)
    columns = [request.cursor.live_slot, *request.cursor.draft_slots]
    request.cursor.accepted = accepted
    windows.trim(request.cursor)
    assert request.cursor.state_slot == columns[accepted - 1]
    assert [request.cursor.live_slot, *request.cursor.draft_slots] == columns[:accepted]
    assert all(slots.owner_of(slot) is SlotOwner.FREE for slot in columns[accepted:])
    assert windows.widen(request.cursor, 4) == 4
    assert [request.cursor.live_slot, *request.cursor.draft_slots][:accepted] == columns[:accepted]
    slots.check_integrity()


def test_all_draft_slots_are_kept_when_every_draft_was_accepted() -> None:
    slots = SlotPool(9)
    windows, request = WindowStates(slots, 1, keeps_checkpoints=False), live_request(slots)
    windows.widen(request.cursor, 4)
    request.cursor.accepted = 5
    windows.trim(request.cursor)
    windows.trim(request.cursor)
    assert len(request.cursor.draft_slots) == 4


def test_closing_a_request_frees_every_draft_slot_but_not_its_live_slot() -> None:
    slots = SlotPool(9)
    windows, request = WindowStates(slots, 1, keeps_checkpoints=False), live_request(slots)
    windows.widen(request.cursor, 4)
    request.cursor.accepted = 5
    windows.close(request.cursor, request.computed)
    assert (request.cursor.draft_slots, request.cursor.accepted, request.cursor.state_slot) == (
        [],
        1,
        request.cursor.live_slot,
    )
    assert slots.count_by_owner() == {"free": 8, "live": 1, "reserved": 0, "cached": 0, "draft": 0}
    windows.close(request.cursor, request.computed)
    assert slots.owner_of(request.cursor.live_slot) is SlotOwner.LIVE
