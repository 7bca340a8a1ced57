"""Properties of the columns that requests' draft windows take from the common pool of slots."""

import numpy as np
import pytest

from megatron_mamba_cache.policy.block_hashing import BlockKeyChain
from megatron_mamba_cache.policy.draft_states import WindowStates
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest, StateCursor
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from megatron_mamba_cache.policy.slot_pool import SlotPool


def live_row(slots: SlotPool) -> RunningRequest:
    """Return a decoding row with a live slot and no draft window."""
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


def test_row_gets_a_column_for_each_draft() -> None:
    slots = SlotPool(9)
    row = live_row(slots)
    assert WindowStates(slots, 1, keeps_checkpoints=False).widen(row.cursor, 3) == 3
    assert len({row.cursor.live_slot, *row.cursor.draft_slots}) == 4
    assert all(slots.owner_of(slot) is SlotOwner.DRAFT for slot in row.cursor.draft_slots)


@pytest.mark.parametrize("max_requests", range(1, 7))
@pytest.mark.parametrize("num_cached", [0, 2])
def test_drafts_leave_a_slot_to_each_request_that_may_still_come(max_requests: int, num_cached: int) -> None:
    slots = SlotPool(7)
    cache_states(slots, num_cached)
    windows, rows = WindowStates(slots, max_requests, keeps_checkpoints=False), [live_row(slots)]
    given = windows.widen(rows[0].cursor, 8)
    assert given == len(rows[0].cursor.draft_slots) == 7 - max_requests
    for _ in range(max_requests - 1):
        rows.append(live_row(slots))
        assert windows.widen(rows[-1].cursor, 8) == 0
    slots.check_integrity()


def test_drafts_evict_cached_states_but_not_those_that_are_about_to_be_read() -> None:
    slots = SlotPool(4)
    cache_states(slots, 3)
    slots.pin(BlockId(0))
    row = live_row(slots)
    assert WindowStates(slots, 1, keeps_checkpoints=False).widen(row.cursor, 8) == 2
    assert slots.cached_blocks() == [0]


def test_window_is_widened_by_what_it_lacks_and_never_narrowed() -> None:
    slots = SlotPool(9)
    windows, row = WindowStates(slots, 1, keeps_checkpoints=False), live_row(slots)
    windows.widen(row.cursor, 2)
    first = list(row.cursor.draft_slots)
    assert windows.widen(row.cursor, 5) == 5
    assert row.cursor.draft_slots[:2] == first and num_drafts(slots) == 5
    assert windows.widen(row.cursor, 1) == 1
    assert num_drafts(slots) == 5


def test_row_keeps_the_columns_it_has_where_there_is_no_room_for_more() -> None:
    slots = SlotPool(4)
    windows, row = WindowStates(slots, 1, keeps_checkpoints=False), live_row(slots)
    windows.widen(row.cursor, 2)
    other = slots.take_live()
    assert windows.widen(row.cursor, 8) == 2
    slots.release_live(other)
    assert windows.widen(row.cursor, 8) == 3


def test_more_requests_than_were_announced_get_no_slots_that_are_not_there() -> None:
    slots = SlotPool(4)
    rows = [live_row(slots) for _ in range(3)]
    windows = WindowStates(slots, 1, keeps_checkpoints=False)
    assert windows.widen(rows[0].cursor, 3) == 1
    assert windows.widen(rows[1].cursor, 3) == 0
    slots.check_integrity()


@pytest.mark.parametrize("accepted", range(1, 6))
def test_columns_up_to_the_accepted_one_survive_and_the_others_are_free(accepted: int) -> None:
    slots = SlotPool(9)
    windows, row = WindowStates(slots, 1, keeps_checkpoints=False), live_row(slots)
    windows.widen(row.cursor, 4)
    columns = [row.cursor.live_slot, *row.cursor.draft_slots]
    row.cursor.accepted = accepted
    windows.trim(row.cursor)
    assert row.cursor.state_slot == columns[accepted - 1]
    assert [row.cursor.live_slot, *row.cursor.draft_slots] == columns[:accepted]
    assert all(slots.owner_of(slot) is SlotOwner.FREE for slot in columns[accepted:])
    assert windows.widen(row.cursor, 4) == 4
    assert [row.cursor.live_slot, *row.cursor.draft_slots][:accepted] == columns[:accepted]
    slots.check_integrity()


def test_window_stays_whole_while_nothing_is_trimmed() -> None:
    slots = SlotPool(9)
    windows, row = WindowStates(slots, 1, keeps_checkpoints=False), live_row(slots)
    windows.widen(row.cursor, 4)
    row.cursor.accepted = 5
    windows.trim(row.cursor)
    windows.trim(row.cursor)
    assert len(row.cursor.draft_slots) == 4


def test_release_returns_every_column_but_the_live_slot() -> None:
    slots = SlotPool(9)
    windows, row = WindowStates(slots, 1, keeps_checkpoints=False), live_row(slots)
    windows.widen(row.cursor, 4)
    row.cursor.accepted = 5
    windows.close(row.cursor, row.computed)
    assert (row.cursor.draft_slots, row.cursor.accepted, row.cursor.state_slot) == ([], 1, row.cursor.live_slot)
    assert slots.count_by_owner() == {"free": 8, "live": 1, "reserved": 0, "cached": 0, "draft": 0}
    windows.close(row.cursor, row.computed)
    assert slots.owner_of(row.cursor.live_slot) is SlotOwner.LIVE
