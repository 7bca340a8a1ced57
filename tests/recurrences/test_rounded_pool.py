"""Cached states that are rounded: views that do not touch each other, and whole states in and out."""

import pytest
import torch

from megatron_mamba_cache.policy.boundaries import BoundaryRule
from megatron_mamba_cache.policy.places import FixedPlaces
from megatron_mamba_cache.policy.slot_pool import SlotPool
from megatron_mamba_cache.recurrences.layout import RoundedLayout
from megatron_mamba_cache.recurrences.mamba_slot_allocator import NoReservations, StateSlotAllocator
from megatron_mamba_cache.recurrences.pool_tensors import BlockLayout, bytes_of, slab_tensors, state_tensors
from megatron_mamba_cache.recurrences.prefill_rows import PAD_SLOT
from megatron_mamba_cache.recurrences.rounded_pool import RoundedPool
from megatron_mamba_cache.recurrences.slab_shape import SlabShape, UnitBytes
from tests.kernels.packed_rows import same_bits
from tests.kernels.rounded_places import by_the_formula
from tests.recurrences.test_mamba_slot_allocator import CONV_SHAPE, LIVE_SLOTS, NUM_LAYERS, SSM_SHAPE, context

LAYOUT = RoundedLayout(NUM_LAYERS, CONV_SHAPE, SSM_SHAPE, torch.bfloat16)
BLOCKS = BlockLayout(2, (4, 2, 8), torch.bfloat16)
UNIT = UnitBytes(LAYOUT.aligned_bytes, 2 * BLOCKS.num_layers * BLOCKS.num_elements * 2, 32)


def pool_of(num_slots: int, device: str) -> RoundedPool:
    return RoundedPool(LAYOUT, *state_tensors(LAYOUT, num_slots, device))


def parts_of(pool: RoundedPool) -> list[torch.Tensor]:
    return [pool.conv, pool.ssm.values, pool.ssm.scales]


@pytest.mark.parametrize("slab", [SlabShape.fitting([UNIT]), SlabShape(2, 3), SlabShape(1, 1)], ids=str)
def test_slabs_used_either_way_do_not_touch_each_other(slab: SlabShape, device: str) -> None:
    parts, kv = slab_tensors(LAYOUT, BLOCKS, slab, UNIT, 3, device)
    pool = RoundedPool(LAYOUT, *parts)
    assert pool.num_slots == 3 * slab.slots_per_slab and kv.shape[2] == 3 * slab.blocks_per_slab + 1
    slots = [slot for slot in range(pool.num_slots) if slot // slab.slots_per_slab == 1]
    for slot in slots:
        for number, part in enumerate(parts_of(pool)):
            part[:, slot] = 10 * slot + number
    for block in range(kv.shape[2]):
        if block // slab.blocks_per_slab != 1:
            kv[:, :, block] = block + 100
    for slot in slots:
        assert all((part[:, slot] == 10 * slot + number).all() for number, part in enumerate(parts_of(pool)))
    assert all((part.data_ptr() - pool.conv.data_ptr()) % 256 == 0 for part in parts_of(pool))
    slot_bytes = slab.slab_bytes(UNIT) // slab.slots_per_slab
    assert all(part.stride(1) * part.element_size() == slot_bytes for part in parts_of(pool))
    assert bytes_of(pool.conv, kv).numel() == 3 * slab.slab_bytes(UNIT) + UNIT.block


def allocator_over(device: str) -> StateSlotAllocator:
    """Return an allocator whose cached states are rounded, and whose live ones have slots of their own."""
    slots = SlotPool(4, running=FixedPlaces(5))
    return StateSlotAllocator(context(device=device), pool_of(4, device), slots, BoundaryRule(64), NoReservations())


def test_states_are_stored_rounded_and_restored_as_their_product(device: str) -> None:
    own = allocator_over(device)
    live, pool = own.context, own.state_pool
    assert isinstance(pool, RoundedPool)
    slots = own.allocate_slots_batch([7, 8])
    own.store_from_live_batch(slots, [2, 0])
    for slot, request in zip(slots, (2, 0), strict=True):
        for layer in range(NUM_LAYERS):
            state = live.mamba_ssm_states[layer, LIVE_SLOTS[request]].cpu()
            values, scales = by_the_formula(state)
            assert same_bits(pool.ssm.values[layer, slot].cpu(), values)
            assert same_bits(pool.ssm.scales[layer, slot].cpu(), scales)
            assert same_bits(pool.conv[layer, slot], live.mamba_conv_states[layer, LIVE_SLOTS[request]])
    assert own.restore_to_live(1, 7) and not own.restore_to_live(1, 9)
    product = pool.ssm.values[:, slots[0]] * pool.ssm.scales[:, slots[0]][..., None, :]
    assert same_bits(live.mamba_ssm_states[:, LIVE_SLOTS[1]], product)
    assert same_bits(live.mamba_conv_states[:, LIVE_SLOTS[1]], pool.conv[:, slots[0]])


def test_one_layer_is_stored_from_tensors(device: str) -> None:
    own = allocator_over(device)
    (slot,) = own.allocate_slots_batch([3])
    ssm, conv = torch.randn(SSM_SHAPE), torch.randn(CONV_SHAPE).to(torch.bfloat16)
    own.store_from_tensors(3, 1, ssm.to(device), conv.to(device))
    assert isinstance(own.state_pool, RoundedPool)
    states = own.state_pool.ssm_layer(1)
    values, scales = by_the_formula(ssm)
    assert same_bits(states.values[slot].cpu(), values) and same_bits(states.scales[slot].cpu(), scales)
    assert not own.state_pool.ssm.values[0].any()
    with pytest.raises(ValueError, match="ssm_state has shape"):
        own.store_from_tensors(3, 1, ssm[:1], conv)


def test_padding_restores_nothing(device: str) -> None:
    pool = pool_of(2, device)
    pool.ssm.scales.fill_(1)
    pool.ssm.values.fill_(3)
    conv = torch.zeros(NUM_LAYERS, 2, *CONV_SHAPE, dtype=torch.bfloat16, device=device)
    ssm = torch.zeros(NUM_LAYERS, 2, *SSM_SHAPE, device=device)
    src, dst = torch.tensor([[PAD_SLOT, 1], [0, 1]], dtype=torch.int32, device=device)
    pool.restore(conv, ssm, src, dst)
    assert not ssm[:, 0].any() and (ssm[:, 1] == 3).all()
