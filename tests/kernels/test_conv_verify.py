"""Properties of the reference convolution over a base token and drafts a row."""

import random

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.reference import causal_conv_ref, conv_verify_ref
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

CONV_DIM = 37
MOST_DRAFTS = 8


def make_weights(d_conv: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(CONV_DIM, d_conv, device=device), torch.randn(CONV_DIM, device=device)


def make_pool(num_slots: int, window: int, dtype: torch.dtype, device: str) -> Tensor:
    return poisoned_pool((num_slots, window, CONV_DIM), dtype, device)


def fill_windows(pool: Tensor, specs: list[VerifySpec], d_conv: int) -> None:
    """Give each row the d_conv - 1 inputs that it starts from, as many places on as its last step accepted drafts."""
    for spec in specs:
        if spec.columns:
            window = torch.randn(d_conv - 1, CONV_DIM).to(pool)
            pool[spec.columns[0], spec.accepted - 1 :][: d_conv - 1] = window


def window_of(pool: Tensor, spec: VerifySpec, d_conv: int) -> Tensor:
    """Return the [1, d_conv - 1, conv_dim] window that the row starts from, as a pool of one slot."""
    return pool[spec.columns[0], spec.accepted - 1 :][None, : d_conv - 1].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_conv", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_rows_are_bit_equal_to_as_many_steps_of_one_token(
    seed: int, d_conv: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(seed)
    specs = random_verify_specs(seed, num_slots := 60)
    weight, bias = make_weights(d_conv, device)
    x = torch.randn(sum(spec.length for spec in specs), CONV_DIM, device=device)
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            x[tokens] = float("nan")
    num_spare = seed % 3
    # What is read starts at most 8 places on, what is written needs one place a draft.
    pool = make_pool(num_slots, d_conv - 1 + MOST_DRAFTS + num_spare, dtype, device)
    fill_windows(pool, specs, d_conv)
    before = pool.clone()
    rows = pack_verify(specs, device, num_spare=num_spare)
    y = conv_verify_ref(x, weight, bias, pool, rows)

    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            assert (y[tokens] == 0).all()
            continue
        alone = window_of(before, spec, d_conv)
        for j, token in enumerate(range(tokens.start, tokens.stop)):
            y_alone = conv_verify_ref(x[token][None], weight, bias, alone, one_token_rows([0], device))
            assert same_bits(y[token], y_alone[0])
            assert same_bits(pool[spec.columns[0], j : j + d_conv - 1], alone[0])
    assert_untouched(before, pool, {spec.columns[0] for spec in specs if spec.columns})
    used = d_conv - 2 + rows.max_len
    assert same_bits(before[:, used:], pool[:, used:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_rejected_drafts_leave_no_trace_in_later_steps(seed: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    d_conv, length = 4, 40
    weight, bias = make_weights(d_conv, device)
    text = torch.randn(length, CONV_DIM, device=device)
    columns = tuple(draw.sample(range(12), 9))
    pool = make_pool(12, d_conv - 1 + MOST_DRAFTS, dtype, device)
    fill_windows(pool, [VerifySpec(1, columns)], d_conv)
    plain = window_of(pool, VerifySpec(1, columns), d_conv)
    position, accepted = 0, 1
    while position < length:
        num_drafts = min(draw.randint(0, MOST_DRAFTS), length - position - 1)
        kept = draw.randint(1, 1 + num_drafts)
        x = text[position : position + 1 + num_drafts].clone()
        x[kept:] = float("nan")  # wrong drafts, and nothing of them may be read again
        spec = VerifySpec(1 + num_drafts, columns, accepted)
        y = conv_verify_ref(x, weight, bias, pool, pack_verify([spec], device))
        for j in range(kept):
            token = text[position + j][None]
            assert same_bits(y[j], conv_verify_ref(token, weight, bias, plain, one_token_rows([0], device))[0])
        position, accepted = position + kept, kept
        assert same_bits(window_of(pool, VerifySpec(1, columns, accepted), d_conv), plain)


@pytest.mark.parametrize("d_conv", [1, 2, 4])
@pytest.mark.parametrize("num_drafts", range(MOST_DRAFTS + 1))
def test_outputs_and_windows_are_those_of_the_packed_convolution(num_drafts: int, d_conv: int, device: str) -> None:
    torch.manual_seed(num_drafts)
    weight, bias = make_weights(d_conv, device)
    length = 1 + num_drafts
    x = torch.randn(2 * length, CONV_DIM, device=device)
    specs = [VerifySpec(length, tuple(range(9)), accepted=3), VerifySpec(length, tuple(range(10, 19)))]
    pool = make_pool(20, d_conv - 1 + MOST_DRAFTS, torch.float32, device)
    fill_windows(pool, specs, d_conv)
    packed = torch.cat([window_of(pool, spec, d_conv) for spec in specs])
    y = conv_verify_ref(x, weight, bias, pool, pack_verify(specs, device))
    prefill = pack_rows([RowSpec(length, initial=row, final=row) for row in range(2)], 4, device)
    assert same_bits(y, causal_conv_ref(x, weight, bias, packed, prefill))
    for spec, window in zip(specs, packed, strict=True):
        assert same_bits(pool[spec.columns[0], num_drafts : num_drafts + d_conv - 1], window)


def test_neighbours_nan_stays_with_them_and_tokens_past_the_last_row_are_nobody_s(device: str) -> None:
    torch.manual_seed(2)
    weight, bias = make_weights(4, device)
    specs = [VerifySpec(3, (0, 1, 2)), VerifySpec(2, (3, 4)), VerifySpec(1, (5,))]
    x = torch.full((8, CONV_DIM), float("nan"), device=device)
    x[3:5] = torch.randn(2, CONV_DIM, device=device)
    pool = make_pool(8, 5, torch.float32, device)
    fill_windows(pool, specs, 4)
    before = pool.clone()
    y = conv_verify_ref(x, weight, bias, pool, pack_verify(specs, device))
    assert y[3:5].isfinite().all() and pool[3, :4].isfinite().all()
    assert y[:3].isnan().all() and (y[6:] == 0).all()
    assert_untouched(before, pool, {0, 3, 5})


@pytest.mark.parametrize("with_bias", [True, False])
def test_outputs_are_rounded_to_the_input_dtype(with_bias: bool, device: str) -> None:
    torch.manual_seed(3)
    weight, bias = make_weights(4, device)
    x = torch.randn(3, CONV_DIM, device=device).bfloat16()
    spec = VerifySpec(3, (0, 1, 2))
    pool = make_pool(3, 5, torch.float32, device)
    fill_windows(pool, [spec], 4)
    wide_pool, rows = pool.clone(), pack_verify([spec], device)
    y = conv_verify_ref(x, weight, bias if with_bias else None, pool, rows)
    exact = conv_verify_ref(x.float(), weight, bias if with_bias else torch.zeros_like(bias), wide_pool, rows)
    assert same_bits(y, exact.bfloat16()) and same_bits(pool, wide_pool)
