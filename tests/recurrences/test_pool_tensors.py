"""States and KV blocks are views of one allocation; they do not overlap, and each is contiguous."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.layout import BlockLayout, SlotLayout, route_table, slab_tensors
from megatron_mamba_cache.recurrences.pool import StatePool
from megatron_mamba_cache.recurrences.slab_shape import SlabShape, UnitBytes
from megatron_mamba_cache.recurrences.slot_copies import copy_slots
from tests.recurrences.state_groups import window_and_matrix

GROUP = window_and_matrix(3, (5, 24), (2, 8, 16), torch.bfloat16, torch.float32)
STATES = SlotLayout.of([GROUP])
BLOCKS = BlockLayout(2, (4, 2, 8), torch.bfloat16)
BLOCK_BYTES = 2 * BLOCKS.num_layers * BLOCKS.num_elements * 2
UNIT = UnitBytes(STATES.aligned_bytes, BLOCK_BYTES, 32)
NUM_SLABS = 3

SHAPES = [SlabShape.fitting([UNIT]), SlabShape(2, 3), SlabShape(1, 1)]


def tensors(slab: SlabShape, device: str) -> tuple[StatePool, Tensor]:
    parts, kv = slab_tensors(STATES, BLOCKS, slab, UNIT, NUM_SLABS, device)
    return StatePool([GROUP], parts), kv


@pytest.mark.parametrize("slab", SHAPES, ids=str)
def test_kv_blocks_and_states_in_one_allocation_do_not_overlap(slab: SlabShape, device: str) -> None:
    pool, kv = tensors(slab, device)
    num_slots, num_blocks = NUM_SLABS * slab.slots_per_slab, NUM_SLABS * slab.blocks_per_slab + 1
    assert pool.tensors[0].shape[1] == num_slots and kv.shape == (2, 2, num_blocks, 4, 2, 8)
    # Slab 1 holds states, the other slabs hold KV blocks, and the dummy block follows the last slab.
    slots = [slot for slot in range(num_slots) if slot // slab.slots_per_slab == 1]
    blocks = [block for block in range(num_blocks) if block // slab.blocks_per_slab != 1]
    for slot in slots:
        pool.tensor("conv")[:, slot] = slot + 1
        pool.tensor("ssm")[:, slot] = -(slot + 1)
    for block in blocks:
        kv[:, :, block] = block + 100
    for slot in slots:
        assert (pool.tensor("conv")[:, slot] == slot + 1).all() and (pool.tensor("ssm")[:, slot] == -(slot + 1)).all()
    for block in blocks:
        assert (kv[:, :, block] == block + 100).all()


@pytest.mark.parametrize("slab", SHAPES, ids=str)
def test_routed_experts_overlap_neither_keys_and_values_nor_states(slab: SlabShape, device: str) -> None:
    unit = replace(UNIT, block=UNIT.block + 4 * 3 * 2 * 2)
    parts, kv = slab_tensors(STATES, BLOCKS, slab, unit, NUM_SLABS, device)
    pool, table, num_blocks = StatePool([GROUP], parts), route_table(kv, 3, 2), NUM_SLABS * slab.blocks_per_slab + 1
    assert table.shape == (num_blocks, 4, 3, 2) and table.dtype == torch.int16
    blocks = [block for block in range(num_blocks) if block // slab.blocks_per_slab != 1]
    for block in blocks:
        kv[:, :, block], table[block] = block + 100, block + 1
    for slot in range(slab.slots_per_slab, 2 * slab.slots_per_slab):
        pool.tensor("conv")[:, slot], pool.tensor("ssm")[:, slot] = -1, -1
    for block in blocks:
        assert (kv[:, :, block] == block + 100).all() and (table[block] == block + 1).all()
    kv[:, :, blocks] = 0
    assert all((table[block] == block + 1).all() for block in blocks)
    assert pool.tensor("conv")[:, slab.slots_per_slab].eq(-1).all()


@pytest.mark.parametrize("slab", SHAPES, ids=str)
def test_layers_of_one_state_or_kv_block_are_contiguous(slab: SlabShape, device: str) -> None:
    pool, kv = tensors(slab, device)
    slot_bytes, block_bytes = (
        slab.slab_bytes(UNIT) // slab.slots_per_slab,
        slab.slab_bytes(UNIT) // slab.blocks_per_slab,
    )
    first = pool.tensor("conv").data_ptr()
    assert kv.data_ptr() == first
    last_state = pool.tensor("ssm")[-1, 0].data_ptr() + pool.tensor("ssm")[-1, 0].numel() * 4 - first
    last_value = kv[1, -1, 0].data_ptr() + kv[1, -1, 0].numel() * 2 - first
    assert last_state <= STATES.aligned_bytes <= slot_bytes and last_value == BLOCK_BYTES <= block_bytes
    conv, ssm = pool.tensors
    assert ssm.stride(1) * 4 == conv.stride(1) * 2 == slot_bytes and kv.stride(2) * 2 == block_bytes
    assert all((tensor.data_ptr() - first) % 256 == 0 for tensor in (conv[1, 1], ssm[2, 1], kv[0, 0, 1]))


def test_slot_copies_change_only_states_and_no_kv_blocks(device: str) -> None:
    pool, kv = tensors(SHAPES[0], device)
    kv[:, :, 0] = 7  # all blocks in slab 0
    pool.tensor("conv")[:, 1].normal_()
    pool.tensor("ssm")[:, 1].normal_()
    one, two = (torch.tensor([slot], dtype=torch.int32, device=device) for slot in (1, 2))
    copy_slots(pool.tensors, pool.tensors, one, two)
    assert all(torch.equal(states[:, 1], states[:, 2]) for states in pool.tensors)
    assert pool.tensor("ssm")[:, 2].any() and (kv[:, :, 0] == 7).all()


def test_pool_of_a_stage_without_mamba_or_attention_layers_has_empty_views(device: str) -> None:
    no_states = SlotLayout.of([window_and_matrix(0, (5, 24), (2, 8, 16), torch.bfloat16, torch.float32)])
    unit = UnitBytes(0, UNIT.block, UNIT.token_row)
    parts, kv = slab_tensors(no_states, BLOCKS, SHAPES[0], unit, NUM_SLABS, device)
    assert [part.shape[0] for part in parts] == [0, 0] and kv.shape[1] == 2
    no_blocks = BlockLayout(0, (4, 2, 8), torch.bfloat16)
    parts, kv = slab_tensors(STATES, no_blocks, SHAPES[0], UnitBytes(UNIT.state, 0, 0), NUM_SLABS, device)
    assert kv.shape[1] == 0 and [part.shape[0] for part in parts] == [3, 3]


@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_state_stride_is_a_multiple_of_the_head_dimension(head_dim: int) -> None:
    """When the pool is viewed as a matrix with head_dim columns, each state starts at the beginning of a row."""
    states = SlotLayout.of([window_and_matrix(2, (3, 8), (2, 16, head_dim), torch.bfloat16, torch.float32)])
    unit = UnitBytes(states.aligned_bytes, BLOCK_BYTES, 32, 4 * head_dim)
    (_, ssm), _ = slab_tensors(states, BLOCKS, SHAPES[0], unit, NUM_SLABS, "cpu")
    assert ssm.stride(1) % head_dim == 0
