"""Slot allocator for cached Mamba states without an engine, with the methods of Megatron's documented class."""

from types import SimpleNamespace

import pytest
import torch

from megatron_mamba_cache import MambaSlotAllocator
from megatron_mamba_cache.errors import CacheCapacityError
from megatron_mamba_cache.policy.boundaries import BoundaryRule
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.slot_pool import SlotPool
from megatron_mamba_cache.recurrences.mamba_slot_allocator import (
    MAX_INTERMEDIATE_OFFSETS_PER_REQUEST,
    NoReservations,
    StateSlotAllocator,
    StepReservations,
)
from megatron_mamba_cache.recurrences.pool import StatePool
from tests.recurrences.allocator_context import CONV_SHAPE, LIVE_SLOTS, NUM_LAYERS, SSM_SHAPE, context
from tests.recurrences.state_groups import window_and_matrix


def allocator(max_slots: int = 4, block_size: int = 64) -> MambaSlotAllocator:
    own = MambaSlotAllocator(
        context(block_size), max_slots, NUM_LAYERS, CONV_SHAPE, SSM_SHAPE, torch.bfloat16, torch.float32
    )
    own.context = context(block_size, device=own.state_pool.tensor("ssm").device)  # type: ignore[assignment]
    return own


def sharing_allocator(
    num_slots: int, device: str, rule: BoundaryRule, reservations: StepReservations
) -> StateSlotAllocator:
    """Return an allocator that uses a given state pool and slot pool."""
    group = window_and_matrix(NUM_LAYERS, CONV_SHAPE, SSM_SHAPE, torch.float32, torch.float32)
    pool = StatePool.zeros([group], num_slots, device)
    return StateSlotAllocator(context(device=device), pool, SlotPool(num_slots), rule, reservations)


def prompt(num_tokens: int, num_done: int = 0) -> SimpleNamespace:
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    return SimpleNamespace(prompt_tokens=tokens, finished_chunk_token_count=num_done)


def store_offsets(
    own: MambaSlotAllocator,
    request: int,
    num_tokens: int,
    *,
    done: int = 0,
    skip: int = 0,
    chunk: int | None = None,
    matched: int = 0,
) -> None:
    """Reserve the boundaries in a prefill chunk, which by default is the rest of the prompt."""
    chunk = num_tokens - done if chunk is None else chunk
    own.compute_and_store_offsets(prompt(num_tokens, done), request, skip, chunk, matched, [], 0)


def stored(own: MambaSlotAllocator) -> tuple[list[list[int]], list[int]]:
    offsets, counts = own.get_intermediate_gpu_data()
    assert offsets is not None and counts is not None
    return [row[:count] for row, count in zip(offsets.tolist(), counts.tolist(), strict=True)], counts.tolist()


# Allocation of slots.


def test_states_of_three_blocks_get_three_slots() -> None:
    own = allocator()
    slots = own.allocate_slots_batch([7, 8, 9])
    assert len(set(slots)) == 3 and all(0 <= slot < 4 for slot in slots)
    assert [own.get_slot(block) for block in (7, 8, 9)] == slots
    own.slots.check_integrity()


def test_block_listed_twice_gets_one_state_slot() -> None:
    own = allocator()
    first = own.allocate_slots_batch([7, 7, 8])
    assert first[0] == first[1] != first[2]
    assert own.allocate_slots_batch([8, 7]) == [first[2], first[0]]
    assert own.slots.count_by_owner()["cached"] == 2


def test_slot_of_a_block_without_a_state_is_minus_one() -> None:
    own = allocator()
    assert (own.get_slot(7), own.has_state(7)) == (-1, False)
    own.allocate_slots_batch([7])
    assert own.has_state(7)


def test_allocate_slots_accepts_block_ids_as_tensors() -> None:
    own = allocator()
    slots = own.allocate_slots_batch(torch.tensor([7, 8], dtype=torch.int32))  # type: ignore[arg-type]
    assert [own.get_slot(block) for block in torch.tensor([7, 8])] == slots


def test_least_recently_used_states_are_evicted() -> None:
    own = allocator(max_slots=4)
    own.allocate_slots_batch([0, 1, 2, 3])
    for block in (1, 3, 2, 0):
        own.slots.touch_path([BlockId(block)])
    own.allocate_slots_batch([4, 5])
    assert [block for block in range(6) if own.has_state(block)] == [0, 2, 4, 5]


def test_blocks_allocated_in_one_call_never_evict_each_other() -> None:
    own = allocator(max_slots=3)
    own.allocate_slots_batch([0, 1, 2])
    slots = own.allocate_slots_batch([0, 3, 4])
    assert len(set(slots)) == 3 and [own.has_state(block) for block in range(5)] == [True, False, False, True, True]


@pytest.mark.parametrize("blocks", [[1, 2, 3, 4], [0, 1, 2, 3]])
def test_allocating_too_many_slots_changes_nothing(blocks: list[int]) -> None:
    own = allocator(max_slots=3)
    slots = own.allocate_slots_batch([0, 9])
    own.register_block_hashes_batch([0, 9], [5, 6])
    with pytest.raises(CacheCapacityError, match=r"\d new state slots are needed, but \d of 3 are available"):
        own.allocate_slots_batch(blocks)
    assert [own.get_slot(0), own.get_slot(9)] == slots
    assert not any(own.has_state(block) for block in (1, 2, 3, 4))
    assert (own.hash_of(0), own.hash_of(9)) == (5, 6)
    own.slots.check_integrity()


def test_allocating_too_many_slots_keeps_the_eviction_order() -> None:
    own = allocator(max_slots=3)
    own.allocate_slots_batch([0, 1, 2])
    with pytest.raises(CacheCapacityError):
        own.allocate_slots_batch([0, 3, 4, 5])
    own.allocate_slots_batch([6])
    assert [own.has_state(block) for block in range(3)] == [False, True, True]


def test_allocator_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="max_slots must be at least 1, found 0"):
        allocator(max_slots=0)


# Removal of states.


def test_invalidating_a_block_frees_its_slot_and_hash() -> None:
    own = allocator()
    own.allocate_slots_batch([7])
    own.register_block_hashes_batch([7], [99])
    own.invalidate_block(7)
    own.invalidate_block(7)
    assert (own.get_slot(7), own.hash_of(7)) == (-1, None)
    assert own.slots.count_by_owner()["free"] == 4


def test_deregistered_blocks_free_their_slots_and_hashes() -> None:
    own = allocator()
    own.allocate_slots_batch([7, 8])
    own.register_block_hashes_batch([7, 8], [70, 80])
    own.on_kv_blocks_deregistered([7, 55], [70, 55])
    assert (own.has_state(7), own.hash_of(7)) == (False, None)
    assert (own.has_state(8), own.hash_of(8)) == (True, 80)
    assert own.slots.count_by_owner()["free"] == 3


def test_only_positive_hashes_of_blocks_with_a_state_are_registered() -> None:
    own = allocator()
    own.allocate_slots_batch([1, 2, 3])
    own.register_block_hashes_batch([1, 2, 3, 4], [0, -1, 2**255, 5])
    assert [own.hash_of(block) for block in (1, 2, 3, 4)] == [None, None, 2**255, None]


def test_evicted_block_has_no_hash_even_when_allocated_again() -> None:
    own = allocator(max_slots=1)
    own.allocate_slots_batch([1])
    own.register_block_hashes_batch([1], [77])
    own.allocate_slots_batch([2])
    assert own.hash_of(1) is None
    own.allocate_slots_batch([1])
    assert own.hash_of(1) is None


def test_reset_drops_states_hashes_and_reserved_slots() -> None:
    own = allocator()
    own.allocate_slots_batch([7])
    own.register_block_hashes_batch([7], [99])
    store_offsets(own, 0, 65)
    own.reset()
    assert (own.has_state(7), own.hash_of(7), own.get_intermediate_gpu_data()) == (False, None, (None, None))
    own.commit_intermediate_states()
    assert own.slots.count_by_owner() == {"free": 4, "live": 0, "reserved": 0, "cached": 0, "draft": 0}


# Copies of states.


def test_state_stored_from_tensors_is_restored_bit_for_bit() -> None:
    own = allocator()
    own.allocate_slots_batch([6, 7])
    pool, live = own.state_pool, own.context
    generator = torch.Generator().manual_seed(1)
    ssm = torch.randn((NUM_LAYERS, *SSM_SHAPE), generator=generator).to(pool.tensor("ssm"))
    conv = torch.randn((NUM_LAYERS, *CONV_SHAPE), generator=generator).to(pool.tensor("conv"))
    for layer in range(NUM_LAYERS):
        own.store_from_tensors(7, layer, ssm[layer], conv[layer])
    before = live.mamba_ssm_states.clone(), live.mamba_conv_states.clone()
    assert own.restore_to_live(1, 7)
    assert torch.equal(live.mamba_ssm_states[:, LIVE_SLOTS[1]], ssm)
    assert torch.equal(live.mamba_conv_states[:, LIVE_SLOTS[1]], conv)
    others = [slot for slot in range(5) if slot != LIVE_SLOTS[1]]
    assert torch.equal(live.mamba_ssm_states[:, others], before[0][:, others])
    assert torch.equal(live.mamba_conv_states[:, others], before[1][:, others])
    assert not pool.tensor("ssm")[:, own.get_slot(6)].any()


def test_live_states_are_restored_bit_for_bit() -> None:
    own = allocator()
    slots = own.allocate_slots_batch([7, 8])
    live = own.context
    original = live.mamba_ssm_states.clone(), live.mamba_conv_states.clone()
    own.store_from_live_batch(slots, [2, 0])
    live.mamba_ssm_states.fill_(torch.nan)
    live.mamba_conv_states.fill_(torch.nan)
    assert own.restore_to_live(2, 7) and own.restore_to_live(0, 8)
    for request in (2, 0):
        slot = LIVE_SLOTS[request]
        assert torch.equal(live.mamba_ssm_states[:, slot], original[0][:, slot])
        assert torch.equal(live.mamba_conv_states[:, slot], original[1][:, slot])
    assert live.mamba_ssm_states[:, LIVE_SLOTS[1]].isnan().all()


def test_one_state_may_be_restored_to_several_requests() -> None:
    own = allocator()
    own.store_from_live_batch(own.allocate_slots_batch([7]), [2])
    expected = own.context.mamba_ssm_states[:, LIVE_SLOTS[2]].clone()
    for request in range(3):
        assert own.restore_to_live(request, 7)
        assert torch.equal(own.context.mamba_ssm_states[:, LIVE_SLOTS[request]], expected)


def test_restoring_without_a_state_returns_false_and_changes_nothing() -> None:
    own = allocator()
    before = own.context.mamba_ssm_states.clone(), own.context.mamba_conv_states.clone()
    assert own.restore_to_live(0, 7) is False
    assert torch.equal(own.context.mamba_ssm_states, before[0])
    assert torch.equal(own.context.mamba_conv_states, before[1])


def test_storing_a_state_for_a_block_without_a_slot_raises() -> None:
    own = allocator()
    ssm, conv = own.state_pool.tensor("ssm")[0, 0], own.state_pool.tensor("conv")[0, 0]
    with pytest.raises(ValueError, match="block 7 has no state slot"):
        own.store_from_tensors(7, 0, ssm, conv)


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS])
def test_storing_a_state_for_a_layer_out_of_range_raises(layer: int) -> None:
    own = allocator()
    own.allocate_slots_batch([7])
    ssm, conv = own.state_pool.tensor("ssm")[0, 0], own.state_pool.tensor("conv")[0, 0]
    with pytest.raises(ValueError, match=f"layer_idx must be between 0 and 1, found {layer}"):
        own.store_from_tensors(7, layer, ssm, conv)


@pytest.mark.parametrize(
    ("ssm_shape", "conv_shape", "message"),
    [
        ((5,), CONV_SHAPE, r"ssm_state must have shape \(2, 4, 5\), found \(5,\)"),
        ((1, *SSM_SHAPE), CONV_SHAPE, r"ssm_state must have shape \(2, 4, 5\), found \(1, 2, 4, 5\)"),
        (SSM_SHAPE, (1, 6), r"conv_state must have shape \(3, 6\), found \(1, 6\)"),
    ],
)
def test_storing_a_state_of_another_shape_raises_and_changes_nothing(
    ssm_shape: tuple[int, ...], conv_shape: tuple[int, ...], message: str
) -> None:
    own = allocator()
    own.allocate_slots_batch([7])
    with pytest.raises(ValueError, match=message):
        own.store_from_tensors(7, 0, torch.ones(ssm_shape), torch.ones(conv_shape))
    assert not own.state_pool.tensor("ssm").any() and not own.state_pool.tensor("conv").any()


def test_slots_and_request_indices_may_be_tensors_or_lists() -> None:
    own = allocator()
    slots = torch.tensor(own.allocate_slots_batch([7, 8]), dtype=torch.int32)
    own.store_from_live_batch(slots, torch.tensor([2, 0]))  # type: ignore[arg-type]
    for block, request in ((7, 2), (8, 0)):
        expected = own.context.mamba_ssm_states[:, LIVE_SLOTS[request]]
        assert torch.equal(own.state_pool.tensor("ssm")[:, own.get_slot(block)], expected)


def test_storing_unequal_numbers_of_slots_and_requests_raises() -> None:
    own = allocator()
    with pytest.raises(ValueError, match="found 2 slots and 1 requests"):
        own.store_from_live_batch(own.allocate_slots_batch([7, 8]), [2])
    assert not own.state_pool.tensor("ssm").any()


# Boundaries in the current step.


def test_prompt_one_token_longer_than_a_block_stores_the_state_after_the_block() -> None:
    own = allocator()
    store_offsets(own, 0, 65)
    assert stored(own) == ([[64]], [1])


def test_offsets_of_stored_states_are_relative_to_the_chunk_start() -> None:
    own = allocator(block_size=256)
    store_offsets(own, 1, 832, done=512)
    assert stored(own) == ([[256]], [1])
    own.commit_intermediate_states()
    assert [block for block in range(100, 110) if own.has_state(block)] == [102]


def test_offsets_of_stored_states_are_relative_to_the_first_token_that_needs_prefill() -> None:
    own = allocator()
    store_offsets(own, 0, 300, skip=128, matched=3)
    assert stored(own) == ([[64, 128]], [2])
    own.commit_intermediate_states()
    assert [block for block in range(8) if own.has_state(block)] == [2, 3]


def test_prompt_of_whole_blocks_also_stores_the_state_one_block_earlier() -> None:
    own = allocator()
    store_offsets(own, 0, 256)
    assert stored(own) == ([[192, 256]], [2])


def test_chunk_that_completes_no_block_reserves_no_slot() -> None:
    own = allocator()
    store_offsets(own, 0, 300, chunk=50)
    assert own.get_intermediate_gpu_data() == (None, None)
    assert own.slots.num_reserved == 0


def test_no_slot_is_reserved_for_a_block_that_has_a_state() -> None:
    own = allocator()
    own.allocate_slots_batch([4])
    store_offsets(own, 0, 321)
    assert own.get_intermediate_gpu_data() == (None, None)


def test_offsets_on_the_gpu_have_one_padded_row_per_prefill_request() -> None:
    own = allocator(max_slots=8)
    store_offsets(own, 2, 300, matched=2)
    store_offsets(own, 0, 20)
    store_offsets(own, 1, 65)
    offsets, counts = own.get_intermediate_gpu_data()
    assert offsets is not None and counts is not None
    assert offsets.tolist() == [[0, 0, 0], [64, 0, 0], [128, 256, 0]]
    assert counts.tolist() == [0, 1, 2]
    assert (offsets.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert offsets.shape == (3, MAX_INTERMEDIATE_OFFSETS_PER_REQUEST) and MAX_INTERMEDIATE_OFFSETS_PER_REQUEST == 3
    assert offsets.device == counts.device == own.state_pool.tensor("ssm").device


def test_empty_batch_has_no_offsets_on_the_gpu() -> None:
    assert allocator().get_intermediate_gpu_data() == (None, None)


def test_offset_rows_have_room_for_every_block_when_the_boundary_stride_is_1(device: str) -> None:
    own = sharing_allocator(9, device, BoundaryRule(64, stride=1), NoReservations())
    store_offsets(own, 0, 300)
    offsets, counts = own.get_intermediate_gpu_data()
    assert offsets is not None and counts is not None
    assert offsets.tolist() == [[64, 128, 192, 256, 0, 0, 0, 0]] and counts.tolist() == [4]


def test_reserved_state_becomes_available_only_after_the_commit() -> None:
    own = allocator()
    store_offsets(own, 0, 65)
    assert not own.has_state(0) and own.slots.num_reserved == 1
    own.commit_intermediate_states()
    assert own.has_state(0) and own.slots.num_reserved == 0
    assert own.get_intermediate_gpu_data() == (None, None)


def test_commit_stores_one_state_when_only_one_slot_exists() -> None:
    own = allocator(max_slots=1)
    store_offsets(own, 0, 256)
    assert stored(own) == ([[192]], [1])
    own.commit_intermediate_states()
    assert [block for block in range(4) if own.has_state(block)] == [2]
    store_offsets(own, 1, 65)
    own.commit_intermediate_states()
    assert own.has_state(100) and not own.has_state(2)
    own.slots.check_integrity()


def test_requests_that_share_a_block_cache_one_state() -> None:
    own = allocator()
    own.context.request_to_kv_block_ids[1][0] = 0  # type: ignore[index]
    store_offsets(own, 0, 65)
    store_offsets(own, 1, 65)
    own.commit_intermediate_states()
    assert own.slots.count_by_owner() == {"free": 3, "live": 0, "reserved": 0, "cached": 1, "draft": 0}


def test_storing_offsets_again_releases_the_earlier_reservations() -> None:
    own = allocator()
    store_offsets(own, 0, 256)
    store_offsets(own, 0, 65)
    assert stored(own) == ([[64]], [1])
    assert own.slots.num_reserved == 1


def test_block_deregistered_before_the_commit_releases_its_slot() -> None:
    own = allocator()
    store_offsets(own, 0, 256)
    own.on_kv_blocks_deregistered([3], [5])
    own.commit_intermediate_states()
    assert [block for block in range(4) if own.has_state(block)] == [2]
    assert own.slots.count_by_owner() == {"free": 3, "live": 0, "reserved": 0, "cached": 1, "draft": 0}


class Reservations:
    """Boundaries reserved by a custom scheduler."""

    def __init__(self, offsets: list[list[int]]) -> None:
        self._offsets = offsets
        self.num_commits = 0

    def boundary_offsets(self) -> list[list[int]]:
        return self._offsets

    def publish_prompts(self) -> None:
        self.num_commits += 1


def test_reservations_made_by_the_scheduler_are_reported_and_committed(device: str) -> None:
    reservations = Reservations([[64], [], [64, 128]])
    own = sharing_allocator(2, device, BoundaryRule(64), reservations)
    assert stored(own) == ([[64], [], [64, 128]], [1, 0, 2])
    own.commit_intermediate_states()
    assert reservations.num_commits == 1
