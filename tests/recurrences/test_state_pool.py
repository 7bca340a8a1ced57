"""Copies of whole states within the pool."""

import pytest
import torch

from megatron_mamba_cache.recurrences.interface import LiveState, StateGroup
from megatron_mamba_cache.recurrences.layout import SlotLayout, state_tensors
from megatron_mamba_cache.recurrences.mamba2.replay.drafts import ReplayStorage, RingLayout
from megatron_mamba_cache.recurrences.pool import StatePool
from megatron_mamba_cache.recurrences.slot_copies import copy_slots
from tests.kernels.packed_batches import same_bits
from tests.recurrences.state_groups import window_and_matrix

WINDOW_LEN, NUM_DRAFTS = 3, 8
GROUP: StateGroup = window_and_matrix(2, (WINDOW_LEN, 5), (2, 3, 4), torch.bfloat16, torch.float32)


def random_pool(device: str) -> StatePool:
    pool = StatePool([GROUP], state_tensors(SlotLayout.of([GROUP], NUM_DRAFTS), 12, device))
    for states in pool.tensors:
        states.normal_()
    return pool


WINDOWS = [
    [],
    [LiveState(slot=4, accepted_slot=7, accepted=2)],
    [LiveState(slot=0, accepted_slot=11, accepted=1 + NUM_DRAFTS), LiveState(slot=9, accepted_slot=2, accepted=3)],
    [LiveState(5, 6, accepted=6), LiveState(1, 0, accepted=2), LiveState(8, 3, accepted=6), LiveState(10, 10, 1)],
]


@pytest.mark.parametrize("states", WINDOWS)
def test_state_of_the_last_accepted_draft_moves_to_the_live_slot(states: list[LiveState], device: str) -> None:
    pool = random_pool(device)
    conv, ssm = (tensor.clone() for tensor in pool.tensors)
    for state in states:
        ssm[:, state.slot] = pool.tensor("ssm")[:, state.accepted_slot]
        first = state.accepted - 1
        conv[:, state.slot, :WINDOW_LEN] = pool.tensor("conv")[:, state.slot, first : first + WINDOW_LEN]
    pool.drafts.resolve(states)
    assert same_bits(pool.tensor("conv"), conv) and same_bits(pool.tensor("ssm"), ssm)


@pytest.mark.parametrize("states", WINDOWS)
def test_conv_window_of_accepted_drafts_moves_from_the_draft_buffer(states: list[LiveState], device: str) -> None:
    of_rings = RingLayout(2, 19, 11, 2, 4, 1, 3, torch.bfloat16, 5, torch.bfloat16, NUM_DRAFTS)
    pool, draft_inputs = StatePool.zeros([GROUP], 12, device), of_rings.draft_inputs(4, device)
    assert draft_inputs is not None
    pool.keep_drafts_in(ReplayStorage(pool.live, of_rings.zeros(4, device), 4, draft_inputs))
    for tensor in (*pool.tensors, draft_inputs):
        tensor.normal_()
    conv, ssm, before = pool.tensor("conv").clone(), pool.tensor("ssm").clone(), draft_inputs.clone()
    states = [state._replace(buffer=3 - number) for number, state in enumerate(states)]
    for state in states:
        whole = torch.cat([conv[:, state.slot], draft_inputs[:, state.buffer]], dim=1)
        conv[:, state.slot] = whole[:, state.accepted - 1 : state.accepted - 1 + WINDOW_LEN]
    pool.drafts.resolve(states)
    assert same_bits(pool.tensor("conv"), conv) and same_bits(pool.tensor("ssm"), ssm)
    assert same_bits(draft_inputs, before)


def test_slot_copy_covers_all_layers_and_state_types(device: str) -> None:
    pool = random_pool(device)
    conv, ssm = (tensor.clone() for tensor in pool.tensors)
    for states in (conv, ssm):
        states[:, 3] = states[:, 1]
    slots = torch.tensor([1, 3], dtype=torch.int32, device=device)
    copy_slots(pool.tensors, pool.tensors, slots[:1], slots[1:])
    assert same_bits(pool.tensor("conv"), conv) and same_bits(pool.tensor("ssm"), ssm)


def test_error_names_the_missing_state_tensor() -> None:
    with pytest.raises(ValueError, match=r"no tensor 'keys', only \['conv', 'ssm'\]"):
        random_pool("cpu").tensor("keys")
