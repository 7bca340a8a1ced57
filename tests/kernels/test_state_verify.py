"""Properties of the reference state update over a base token and drafts a row."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.reference import ssd_scan_ref, state_verify_ref
from megatron_mamba_cache.kernels.varlen_rows import PAD_SLOT
from tests.kernels.packed_rows import (
    RowSpec,
    VerifySpec,
    assert_untouched,
    one_token_rows,
    pack_rows,
    pack_verify,
    poisoned_pool,
    random_verify_specs,
    row_slices,
    same_bits,
)
from tests.kernels.ssm_steps import SSMShape, random_steps

SHAPE = SSMShape(heads=4, head_dim=5, d_state=7, groups=2)
NUM_SLOTS = 8


def make_pool(num_slots: int, dtype: torch.dtype, device: str, filled: set[int]) -> Tensor:
    return poisoned_pool((num_slots, *SHAPE.state), dtype, device, sorted(filled))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slots", [[6], [5, PAD_SLOT, 0], [PAD_SLOT, 3, 7, 1]])
def test_one_token_is_one_step_of_the_recurrence(groups: int, slots: list[int], device: str) -> None:
    torch.manual_seed(groups)
    step = random_steps(len(slots), device, replace(SHAPE, groups=groups))
    written = set(slots) - {PAD_SLOT}
    pool = poisoned_pool((NUM_SLOTS, *SHAPE.state), torch.float32, device, filled=sorted(written))
    before = pool.clone()
    y = state_verify_ref(step.tokens, step.weights, pool, one_token_rows(slots, device))

    for row, slot in enumerate(slots):
        if slot == PAD_SLOT:
            assert (y[row] == 0).all()
            continue
        (output,), (_, state) = step[[row]].recurrence(before[slot])
        torch.testing.assert_close(pool[slot].double(), state, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y[row].double(), output, rtol=1e-5, atol=1e-5)
    assert_untouched(before, pool, written)


def test_padded_rows_of_nan_touch_nothing(device: str) -> None:
    step = random_steps(3, device, SHAPE)
    step.poison(slice(None))
    pool = poisoned_pool((NUM_SLOTS, *SHAPE.state), torch.float32, device, filled=(0, 1))
    before = pool.clone()
    y = state_verify_ref(step.tokens, step.weights, pool, one_token_rows([PAD_SLOT] * 3, device))
    assert same_bits(before, pool) and (y == 0).all()


def test_pool_of_bf16_holds_the_rounded_state(device: str) -> None:
    torch.manual_seed(3)
    step = random_steps(1, device, SHAPE)
    rows = one_token_rows([2], device)
    rounded = poisoned_pool((NUM_SLOTS, *SHAPE.state), torch.bfloat16, device, filled=(2,))
    exact = rounded.float()
    y_rounded = state_verify_ref(step.tokens, step.weights, rounded, rows)
    y_exact = state_verify_ref(step.tokens, step.weights, exact, rows)
    assert same_bits(rounded[2], exact[2].bfloat16())
    assert same_bits(y_rounded, y_exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_rows_are_bit_equal_to_as_many_steps_of_one_token(seed: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(seed)
    specs = random_verify_specs(seed, num_slots := 60)
    step = random_steps(sum(spec.length for spec in specs), device, replace(SHAPE, groups=1 + seed % 2))
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            step.poison(tokens)
    pool = make_pool(num_slots, dtype, device, {spec.source for spec in specs if spec.columns})
    before = pool.clone()
    y = state_verify_ref(step.tokens, step.weights, pool, pack_verify(specs, device, num_spare=seed % 3))

    written: set[int] = set()
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            assert (y[tokens] == 0).all()
            continue
        alone = before[spec.source : spec.source + 1].clone()
        for j, token in enumerate(range(tokens.start, tokens.stop)):
            y_alone = state_verify_ref(step[[token]].tokens, step[[token]].weights, alone, one_token_rows([0], device))
            assert same_bits(y[token], y_alone[0])
            assert same_bits(pool[spec.columns[j]], alone[0])
        written.update(spec.columns[: spec.length])
    assert_untouched(before, pool, written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_rejected_drafts_leave_no_trace_in_later_steps(seed: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    length = 40
    text = random_steps(length, device, SHAPE)
    columns = tuple(draw.sample(range(12), 9))
    pool = make_pool(12, dtype, device, {columns[0]})
    plain = pool[columns[0]][None].clone()
    position, accepted = 0, 1
    while position < length:
        num_drafts = min(draw.randint(0, 8), length - position - 1)
        kept = draw.randint(1, 1 + num_drafts)
        tokens = text[position : position + 1 + num_drafts]
        tokens.poison(slice(kept, None))  # wrong drafts, and nothing of them may be read again
        spec = VerifySpec(1 + num_drafts, columns, accepted)
        y = state_verify_ref(tokens.tokens, tokens.weights, pool, pack_verify([spec], device))
        for j in range(kept):
            token = text[[position + j]]
            y_plain = state_verify_ref(token.tokens, token.weights, plain, one_token_rows([0], device))
            assert same_bits(y[j], y_plain[0])
        position, accepted = position + kept, kept
        assert same_bits(pool[columns[accepted - 1]], plain[0])


@pytest.mark.parametrize("num_drafts", range(9))
def test_states_and_outputs_are_those_of_the_prefill_scan(num_drafts: int, device: str) -> None:
    torch.manual_seed(num_drafts)
    length = 1 + num_drafts
    step = random_steps(2 * length, device, SHAPE)
    specs = [VerifySpec(length, tuple(range(9)), accepted=3), VerifySpec(length, tuple(range(10, 19)))]
    pool = make_pool(20, torch.float32, device, {2, 10})
    scanned = pool.clone()
    y = state_verify_ref(step.tokens, step.weights, pool, pack_verify(specs, device))
    prefill = [RowSpec(length, initial=spec.source, final=19 - row) for row, spec in enumerate(specs)]
    chunk = 4
    expected = ssd_scan_ref(step.tokens, step.weights, scanned, pack_rows(prefill, chunk, device), chunk)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    for spec, row in zip(specs, prefill, strict=True):
        torch.testing.assert_close(pool[spec.columns[num_drafts]], scanned[row.final], rtol=2e-5, atol=2e-5)


def test_neighbours_nan_stays_with_them_and_tokens_past_the_last_row_are_nobody_s(device: str) -> None:
    torch.manual_seed(4)
    specs = [VerifySpec(3, (0, 1, 2)), VerifySpec(2, (3, 4)), VerifySpec(1, (5,))]
    step = random_steps(8, device, SHAPE)
    step.poison(slice(3))
    step.poison(slice(5, None))
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0, 3, 5})
    before = pool.clone()
    y = state_verify_ref(step.tokens, step.weights, pool, pack_verify(specs, device))
    assert y[3:5].isfinite().all() and pool[3:5].isfinite().all()
    assert y[:3].isnan().all() and (y[6:] == 0).all()
    assert_untouched(before, pool, set(range(6)))


def test_outputs_are_rounded_to_the_input_dtype(device: str) -> None:
    torch.manual_seed(5)
    step = random_steps(3, device, SHAPE)
    step = step.cast(torch.bfloat16)
    widened = step.cast(torch.float32)
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0})
    wide_pool, rows = pool.clone(), pack_verify([VerifySpec(3, (0, 1, 2))], device)
    y = state_verify_ref(step.tokens, step.weights, pool, rows)
    exact = state_verify_ref(widened.tokens, widened.weights, wide_pool, rows)
    assert same_bits(y, exact.bfloat16()) and same_bits(pool, wide_pool)
