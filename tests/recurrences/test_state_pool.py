"""Moves of whole states within the pool."""

from dataclasses import replace

import pytest
import torch

from megatron_mamba_cache.recurrences.layout import StateLayout
from megatron_mamba_cache.recurrences.mamba2.replay_rings import RingLayout
from megatron_mamba_cache.recurrences.pool import DraftWindow, StatePool
from tests.kernels.packed_rows import same_bits

WINDOW_LEN, NUM_DRAFTS = 3, 8


def random_pool(device: str) -> StatePool:
    layout = StateLayout(2, (WINDOW_LEN + NUM_DRAFTS, 5), (2, 3, 4), torch.bfloat16, torch.float32)
    pool = StatePool.zeros(layout, 12, device)
    pool.conv.normal_()
    pool.ssm.normal_()
    return pool


WINDOWS = [
    [],
    [DraftWindow(live=4, slot=7, offset=1)],
    [DraftWindow(live=0, slot=11, offset=NUM_DRAFTS), DraftWindow(live=9, slot=2, offset=2)],
    [DraftWindow(live=5, slot=6, offset=5), DraftWindow(live=1, slot=0, offset=1), DraftWindow(8, 3, 5)],
]


@pytest.mark.parametrize("windows", WINDOWS)
def test_settling_moves_the_accepted_column_into_the_live_slot(windows: list[DraftWindow], device: str) -> None:
    pool = random_pool(device)
    conv, ssm = pool.conv.clone(), pool.ssm.clone()
    for window in windows:
        ssm[:, window.live] = pool.ssm[:, window.slot]
        kept = pool.conv[:, window.live, window.offset : window.offset + WINDOW_LEN]
        conv[:, window.live, :WINDOW_LEN] = kept
    pool.settle(windows, WINDOW_LEN)
    assert same_bits(pool.conv, conv) and same_bits(pool.ssm, ssm)


@pytest.mark.parametrize("windows", WINDOWS)
def test_settling_a_replayed_state_moves_its_window_from_beside_its_ring(
    windows: list[DraftWindow], device: str
) -> None:
    layout = StateLayout(2, (WINDOW_LEN, 5), (2, 3, 4), torch.bfloat16, torch.float32)
    of_rings = RingLayout(2, 19, 11, 2, 4, 1, 3, torch.bfloat16, 5, torch.bfloat16, NUM_DRAFTS)
    pool = StatePool.zeros(layout, 12, device)
    pool = pool.with_rings(of_rings.zeros(4, device), 4, of_rings.draft_inputs(4, device))
    assert pool.draft_inputs is not None
    for states in (pool.conv, pool.ssm, pool.draft_inputs):
        states.normal_()
    conv, ssm, draft_inputs = pool.conv.clone(), pool.ssm.clone(), pool.draft_inputs.clone()
    windows = [replace(window, ring=3 - number) for number, window in enumerate(windows)]
    for window in windows:
        whole = torch.cat([conv[:, window.live], draft_inputs[:, window.ring]], dim=1)
        conv[:, window.live] = whole[:, window.offset : window.offset + WINDOW_LEN]
    pool.settle(windows, WINDOW_LEN)
    assert same_bits(pool.conv, conv) and same_bits(pool.ssm, ssm) and same_bits(pool.draft_inputs, draft_inputs)


def test_slots_are_copied_and_cleared_over_all_layers_and_types(device: str) -> None:
    pool = random_pool(device)
    conv, ssm = pool.conv.clone(), pool.ssm.clone()
    for states in (conv, ssm):
        states[:, 3] = states[:, 1]
        states[:, 2] = 0
    slots = torch.tensor([1, 3, 2], dtype=torch.int32, device=device)
    pool.copy(slots[:1], slots[1:2])
    pool.zero(slots[2:])
    assert same_bits(pool.conv, conv) and same_bits(pool.ssm, ssm)
