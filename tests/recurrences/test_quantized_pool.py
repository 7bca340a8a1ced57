"""Quantized cached states do not overlap with KV blocks, and whole states are stored and restored."""

import pytest
import torch

from megatron_mamba_cache.policy.boundaries import BoundaryRule
from megatron_mamba_cache.policy.index_pools import FixedIndexPool
from megatron_mamba_cache.policy.slot_pool import SlotPool
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS, StoredStates
from megatron_mamba_cache.recurrences.layout import BlockLayout, SlotLayout, bytes_of, slab_tensors, state_tensors
from megatron_mamba_cache.recurrences.mamba_slot_allocator import NoReservations, StateSlotAllocator
from megatron_mamba_cache.recurrences.pool import StatePool
from megatron_mamba_cache.recurrences.quantized_states import QuantizedStates
from megatron_mamba_cache.recurrences.slab_shape import SlabShape, UnitBytes
from tests.kernels.packed_batches import same_bits
from tests.kernels.quantized_values import by_the_formula
from tests.recurrences.allocator_context import CONV_SHAPE, LIVE_SLOTS, NUM_LAYERS, SSM_SHAPE, context
from tests.recurrences.state_groups import window_and_matrix

GROUP = window_and_matrix(NUM_LAYERS, CONV_SHAPE, SSM_SHAPE, torch.bfloat16, torch.float32)
LIVE = SlotLayout.of([GROUP])
LAYOUT = CACHED_FORMS["int8"].layout([GROUP], LIVE)
BLOCKS = BlockLayout(2, (4, 2, 8), torch.bfloat16)
UNIT = UnitBytes(LAYOUT.aligned_bytes, 2 * BLOCKS.num_layers * BLOCKS.num_elements * 2, 32)


def pool_of(num_slots: int, device: str) -> StatePool:
    return StatePool([GROUP], state_tensors(LIVE, 5, device), state_tensors(LAYOUT, num_slots, device))


def parts_of(states: StoredStates) -> tuple[torch.Tensor, ...]:
    conv, quantized = states.storage(0), states.storage(1)
    assert isinstance(conv, torch.Tensor) and isinstance(quantized, QuantizedStates)
    return conv, quantized.values, quantized.scales


@pytest.mark.parametrize("slab", [SlabShape.fitting([UNIT]), SlabShape(2, 3), SlabShape(1, 1)], ids=str)
def test_kv_blocks_and_quantized_states_in_one_allocation_do_not_overlap(slab: SlabShape, device: str) -> None:
    parts, kv = slab_tensors(LAYOUT, BLOCKS, slab, UNIT, 3, device)
    pool = StatePool([GROUP], state_tensors(LIVE, 1, device), parts).cached
    num_slots = pool.parts[0].shape[1]
    assert num_slots == 3 * slab.slots_per_slab and kv.shape[2] == 3 * slab.blocks_per_slab + 1
    slots = [slot for slot in range(num_slots) if slot // slab.slots_per_slab == 1]
    for slot in slots:
        for number, part in enumerate(parts_of(pool)):
            part[:, slot] = 10 * slot + number
    for block in range(kv.shape[2]):
        if block // slab.blocks_per_slab != 1:
            kv[:, :, block] = block + 100
    for slot in slots:
        assert all((part[:, slot] == 10 * slot + number).all() for number, part in enumerate(parts_of(pool)))
    assert all((part.data_ptr() - parts[0].data_ptr()) % 256 == 0 for part in parts_of(pool))
    slot_bytes = slab.slab_bytes(UNIT) // slab.slots_per_slab
    assert all(part.stride(1) * part.element_size() == slot_bytes for part in parts_of(pool))
    assert bytes_of(parts[0], kv).numel() == 3 * slab.slab_bytes(UNIT) + UNIT.block


def allocator_over(device: str) -> StateSlotAllocator:
    """Return an allocator with quantized cached states and separate slots for live ones."""
    slots = SlotPool(4, running=FixedIndexPool(5))
    return StateSlotAllocator(context(device=device), pool_of(4, device), slots, BoundaryRule(64), NoReservations())


def test_states_are_quantized_when_stored_and_dequantized_when_restored(device: str) -> None:
    own = allocator_over(device)
    live, (conv, values_of, scales_of) = own.context, parts_of(own.state_pool.cached)
    slots = own.allocate_slots_batch([7, 8])
    own.store_from_live_batch(slots, [2, 0])
    for slot, request in zip(slots, (2, 0), strict=True):
        for layer in range(NUM_LAYERS):
            state = live.mamba_ssm_states[layer, LIVE_SLOTS[request]].cpu()
            values, scales = by_the_formula(state)
            assert same_bits(values_of[layer, slot].cpu(), values)
            assert same_bits(scales_of[layer, slot].cpu(), scales)
            assert same_bits(conv[layer, slot], live.mamba_conv_states[layer, LIVE_SLOTS[request]])
    assert own.restore_to_live(1, 7) and not own.restore_to_live(1, 9)
    product = values_of[:, slots[0]] * scales_of[:, slots[0]][..., None, :]
    assert same_bits(live.mamba_ssm_states[:, LIVE_SLOTS[1]], product)
    assert same_bits(live.mamba_conv_states[:, LIVE_SLOTS[1]], conv[:, slots[0]])


def test_state_tensors_of_one_layer_are_quantized_when_stored_in_a_slot(device: str) -> None:
    own = allocator_over(device)
    (slot,) = own.allocate_slots_batch([3])
    ssm, conv = torch.randn(SSM_SHAPE), torch.randn(CONV_SHAPE).to(torch.bfloat16)
    own.store_from_tensors(3, 1, ssm.to(device), conv.to(device))
    _, stored, of_channels = parts_of(own.state_pool.cached)
    values, scales = by_the_formula(ssm)
    assert same_bits(stored[1, slot].cpu(), values) and same_bits(of_channels[1, slot].cpu(), scales)
    assert not stored[0].any()
    with pytest.raises(ValueError, match="ssm_state must have shape"):
        own.store_from_tensors(3, 1, ssm[:1], conv)


def test_restoring_states_skips_padding_slots(device: str) -> None:
    pool = pool_of(2, device)
    _, values, scales = parts_of(pool.cached)
    scales.fill_(1)
    values.fill_(3)
    src, dst = torch.tensor([[PAD_SLOT, 1], [0, 1]], dtype=torch.int32, device=device)
    pool.cached.restore(src, dst)
    ssm = pool.tensor("ssm")
    assert not ssm[:, 0].any() and (ssm[:, 1] == 3).all()
