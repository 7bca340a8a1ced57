"""Moves of whole states within the pool."""

import pytest
import torch

from megatron_mamba_cache.state.layout import StateLayout
from megatron_mamba_cache.state.state_pool import DraftWindow, StatePool
from tests.kernels.packed_rows import same_bits

WINDOW_LEN, NUM_DRAFTS = 3, 8


def random_pool(device: str) -> StatePool:
    layout = StateLayout(2, (WINDOW_LEN + NUM_DRAFTS, 5), (2, 3, 4), torch.bfloat16, torch.float32)
    pool = StatePool.zeros(layout, 12, device)
    pool.conv.normal_()
    pool.ssm.normal_()
    return pool


@pytest.mark.parametrize(
    "windows",
    [
        [],
        [DraftWindow(live=4, slot=7, offset=1)],
        [DraftWindow(live=0, slot=11, offset=NUM_DRAFTS), DraftWindow(live=9, slot=2, offset=2)],
        [DraftWindow(live=5, slot=6, offset=5), DraftWindow(live=1, slot=0, offset=1), DraftWindow(8, 3, 5)],
    ],
)
def test_settling_moves_the_accepted_column_into_the_live_slot(windows: list[DraftWindow], device: str) -> None:
    pool = random_pool(device)
    conv, ssm = pool.conv.clone(), pool.ssm.clone()
    for window in windows:
        ssm[:, window.live] = pool.ssm[:, window.slot]
        kept = pool.conv[:, window.live, window.offset : window.offset + WINDOW_LEN]
        conv[:, window.live, :WINDOW_LEN] = kept
    pool.settle(windows, WINDOW_LEN)
    assert same_bits(pool.conv, conv) and same_bits(pool.ssm, ssm)


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
