"""Properties of the reference for the SSD scan over packed requests."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref
from tests.kernels.packed_batches import (
    RowSpec,
    assert_untouched,
    pack_rows,
    poisoned_pool,
    row_slices,
    same_bits,
    scan_specs,
    written_slots,
)
from tests.kernels.ssm_steps import SSMShape, random_steps

CHUNK = 8
SHAPE = SSMShape(heads=4, head_dim=5, d_state=7, groups=2)
SPECS = scan_specs(CHUNK)
NUM_SLOTS = 13


def make_pool(dtype: torch.dtype, device: str, filled: tuple[int, ...] = ()) -> Tensor:
    return poisoned_pool((NUM_SLOTS, *SHAPE.state), dtype, device, filled)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("seed", [0, 1])
def test_ssd_scan_reference_matches_the_sequential_recurrence(
    groups: int, dtype: torch.dtype, tolerance: float, seed: int, device: str
) -> None:
    torch.manual_seed(seed)
    specs = SPECS if seed == 0 else SPECS[::-1]
    steps = random_steps(sum(spec.length for spec in specs), device, replace(SHAPE, groups=groups), dtype=dtype)
    pool = make_pool(dtype, device, filled=(1, 11))
    before = pool.clone()
    y = ssd_scan_ref(steps.tokens, steps.weights, pool, pack_rows(specs, CHUNK, device), CHUNK)

    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        initial = before[spec.initial] if spec.initial != PAD_SLOT else torch.zeros_like(before[0])
        expected, states = steps[tokens].recurrence(initial)
        torch.testing.assert_close(y[tokens].double(), expected.double(), rtol=tolerance, atol=tolerance)
        for position, slot in [(spec.start + spec.length, spec.final), *spec.boundaries.items()]:
            if slot != PAD_SLOT:
                state = states[position - spec.start]
                torch.testing.assert_close(pool[slot].double(), state, rtol=tolerance, atol=tolerance)
    assert_untouched(before, pool, written_slots(specs))


def neighbours(packing: str) -> tuple[list[int], list[int]]:
    """Return the lengths of the requests before and after the tested request."""
    return {"alone": ([], []), "behind others": ([3, CHUNK], []), "amid others": ([1], [2 * CHUNK + 5, 0, 1])}[packing]


@pytest.mark.parametrize("packing", ["alone", "behind others", "amid others"])
@pytest.mark.parametrize("tail", [0, 1, CHUNK - 1])
def test_ssd_scan_reference_resumed_at_any_block_end_is_bit_equal(packing: str, tail: int, device: str) -> None:
    torch.manual_seed(tail)
    length = 4 * CHUNK + tail
    steps = random_steps(length, device, SHAPE)
    slots = {position: position // CHUNK for position in range(CHUNK, length, CHUNK)}
    whole = make_pool(torch.float32, device)
    rows = pack_rows([RowSpec(length, final=0, boundaries=slots)], CHUNK, device)
    expected = ssd_scan_ref(steps.tokens, steps.weights, whole, rows, CHUNK)

    before, after = ([RowSpec(n) for n in lengths] for lengths in neighbours(packing))
    for cut, cut_slot in slots.items():
        pool = make_pool(torch.float32, device)
        pool[cut_slot] = whole[cut_slot]
        later = {position: slot for position, slot in slots.items() if position > cut}
        specs = [*before, RowSpec(length - cut, cut, cut_slot, 0, later), *after]
        others = [[random_steps(spec.length, device, SHAPE) for spec in side] for side in (before, after)]
        packed = steps[cut:].joined_with(*others)
        y = ssd_scan_ref(packed.tokens, packed.weights, pool, pack_rows(specs, CHUNK, device), CHUNK)
        assert same_bits(y[row_slices(specs)[len(before)]], expected[cut:])
        assert all(same_bits(pool[slot], whole[slot]) for slot in [0, *later.values()])


@pytest.mark.parametrize(
    "shape", [SSMShape(2, 5, 7, 1), SSMShape(1, 5, 7, 1), SSMShape(1, 1, 16, 1), SSMShape(3, 5, 1, 1)], ids=str
)
@pytest.mark.parametrize("num_before", [1, 64, 20 * 64])
def test_ssd_scan_reference_is_bit_equal_at_any_offset_in_the_batch(
    shape: SSMShape, num_before: int, device: str
) -> None:
    """For these sizes, matrices that follow others in memory are not aligned."""
    chunk, spec, slots = 64, RowSpec(128 + 9, 0, 3, 2), (4, *shape.state)
    for seed in range(8):
        torch.manual_seed(seed)
        steps = random_steps(spec.length, device, shape)
        packed = steps.joined_with([random_steps(num_before, device, shape)], [])
        alone, after = (poisoned_pool(slots, torch.float32, device, (1, 3)) for _ in range(2))
        after.copy_(alone)
        expected = ssd_scan_ref(steps.tokens, steps.weights, alone, pack_rows([spec], chunk, device), chunk)
        rows = pack_rows([RowSpec(num_before, 0, 1, 0), spec], chunk, device)
        y = ssd_scan_ref(packed.tokens, packed.weights, after, rows, chunk)
        assert same_bits(y[num_before:], expected) and same_bits(after[2], alone[2]), seed


def test_ssd_scan_chunks_of_a_resumed_prompt_end_at_multiples_of_the_chunk_size(device: str) -> None:
    torch.manual_seed(0)
    steps = random_steps(3 * CHUNK, device, SHAPE)
    pool = make_pool(torch.float32, device)
    head = pack_rows([RowSpec(3, final=0)], CHUNK, device)
    ssd_scan_ref(steps[:3].tokens, steps[:3].weights, pool, head, CHUNK)
    tail = pack_rows([RowSpec(3 * CHUNK - 3, 3, 0, 0, {CHUNK: 1})], CHUNK, device)
    y = ssd_scan_ref(steps[3:].tokens, steps[3:].weights, pool, tail, CHUNK)
    resumed = pack_rows([RowSpec(2 * CHUNK, CHUNK, 1, 2)], CHUNK, device)
    y_resumed = ssd_scan_ref(steps[CHUNK:].tokens, steps[CHUNK:].weights, pool, resumed, CHUNK)
    assert same_bits(y[CHUNK - 3 :], y_resumed)
    assert same_bits(pool[0], pool[2])


def test_ssd_scan_reference_nan_stays_in_its_request_and_padding_becomes_zero(device: str) -> None:
    torch.manual_seed(1)
    clean, poison = random_steps(5, device, SHAPE), random_steps(3, device, SHAPE)
    poison.poison(slice(None))
    packed = clean.joined_with([], [poison, clean, poison])
    specs = [RowSpec(5, final=0), RowSpec(3, final=1), RowSpec(5, final=2)]
    pool = make_pool(torch.float32, device)
    rows = pack_rows(specs, CHUNK, device, num_padding=2)
    y = ssd_scan_ref(packed.tokens, packed.weights, pool, rows, CHUNK)
    assert y[:5].isfinite().all() and y[5:8].isnan().all() and (y[13:] == 0).all()
    assert same_bits(y[8:13], y[:5]) and same_bits(pool[2], pool[0]) and pool[0].isfinite().all()


def test_ssd_scan_reference_stores_no_state_for_a_padding_chunk(device: str) -> None:
    torch.manual_seed(4)
    steps = random_steps(CHUNK + 1, device, SHAPE)
    padded = pack_rows([RowSpec(CHUNK + 1, final=0)], CHUNK, device, num_padding=1)
    padded.chunk_slots[-1] = 5
    pool, plain = make_pool(torch.float32, device), make_pool(torch.float32, device)
    ssd_scan_ref(steps.tokens, steps.weights, pool, padded, CHUNK)
    rows = pack_rows([RowSpec(CHUNK + 1, final=0)], CHUNK, device)
    ssd_scan_ref(steps.tokens, steps.weights, plain, rows, CHUNK)
    assert same_bits(pool, plain)


def test_ssd_scan_reference_of_padding_only_changes_no_state(device: str) -> None:
    pool = make_pool(torch.float32, device)
    before = pool.clone()
    for num_tokens, num_padding in [(0, 0), (0, 2), (3, 2)]:
        steps = random_steps(num_tokens, device, SHAPE)
        rows = pack_rows([], CHUNK, device, num_padding=num_padding)
        y = ssd_scan_ref(steps.tokens, steps.weights, pool, rows, CHUNK)
        assert y.shape == steps.tokens.x.shape and (y == 0).all()
    assert same_bits(before, pool)


def test_ssd_scan_reference_casts_only_stored_states_and_carries_fp32_states(device: str) -> None:
    torch.manual_seed(2)
    steps = random_steps(3 * CHUNK + 1, device, SHAPE)
    spec = RowSpec(3 * CHUNK + 1, final=0, boundaries={CHUNK: 1, 2 * CHUNK: 2})
    exact, stored = make_pool(torch.float32, device), make_pool(torch.bfloat16, device)
    rows = pack_rows([spec], CHUNK, device)
    y_exact = ssd_scan_ref(steps.tokens, steps.weights, exact, rows, CHUNK)
    y_stored = ssd_scan_ref(steps.tokens, steps.weights, stored, rows, CHUNK)
    assert same_bits(y_exact, y_stored)
    assert same_bits(stored[:3], exact[:3].bfloat16())


def test_ssd_scan_reference_outputs_have_the_input_dtype(device: str) -> None:
    torch.manual_seed(3)
    steps = random_steps(CHUNK + 3, device, SHAPE)
    steps = steps.cast(torch.bfloat16)
    widened = steps.cast(torch.float32)
    rows = pack_rows([RowSpec(CHUNK + 3)], CHUNK, device)
    y = ssd_scan_ref(steps.tokens, steps.weights, make_pool(torch.float32, device), rows, CHUNK)
    exact = ssd_scan_ref(widened.tokens, widened.weights, make_pool(torch.float32, device), rows, CHUNK)
    assert same_bits(y, exact.bfloat16())
