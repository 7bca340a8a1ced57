"""Properties of the convolution over base tokens and drafts, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.recurrences.batches import DecodeBatch
from megatron_mamba_cache.recurrences.conv import verify as conv_verify_module
from megatron_mamba_cache.recurrences.conv.conv import causal_conv
from megatron_mamba_cache.recurrences.conv.reference import causal_conv_ref, conv_verify_ref
from megatron_mamba_cache.recurrences.conv.verify import ConvVerifyTiling, conv_verify
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import (
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
from tests.kernels.split_windows import conv_with_rings, cut_window

CONV_DIM = 37
MOST_DRAFTS = 8

Op = Callable[[Tensor, Tensor, Tensor | None, Tensor, DecodeBatch], Tensor]


@pytest.fixture(params=[conv_verify, conv_verify_ref])
def either(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[..., Tensor]]:
    """Return the op or its reference; check that the kernel was launched or not."""
    of_kernel = request.param is conv_verify
    with launches_expected(conv_verify_module, "_conv_verify_kernel", of_kernel=of_kernel, device=device):
        yield request.param


@pytest.fixture(params=["in slots", "next to rings"])
def op(request: pytest.FixtureRequest, either: Callable[..., Tensor]) -> Op:
    """Return the op or its reference, with draft inputs stored in slots or in separate buffers."""
    return either if request.param == "in slots" else conv_with_rings(either)


def make_weights(d_conv: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(CONV_DIM, d_conv, device=device), torch.randn(CONV_DIM, device=device)


def make_pool(num_slots: int, window: int, dtype: torch.dtype, device: str) -> Tensor:
    return poisoned_pool((num_slots, window, CONV_DIM), dtype, device)


def fill_windows(pool: Tensor, specs: list[VerifySpec], d_conv: int) -> None:
    """Write the d_conv - 1 initial inputs of each request, shifted by the number of drafts accepted last."""
    for spec in specs:
        if spec.columns:
            window = torch.randn(d_conv - 1, CONV_DIM).to(pool)
            pool[spec.columns[0], spec.accepted - 1 :][: d_conv - 1] = window


def window_of(pool: Tensor, spec: VerifySpec, d_conv: int) -> Tensor:
    """Return the initial window of a request as a pool of one slot, [1, d_conv - 1, conv_dim]."""
    return pool[spec.columns[0], spec.accepted - 1 :][None, : d_conv - 1].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_conv", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 12))
def test_conv_verify_equals_single_token_steps_bit_for_bit(
    seed: int, d_conv: int, dtype: torch.dtype, op: Op, device: str
) -> None:
    torch.manual_seed(seed)
    specs = random_verify_specs(seed, num_slots := 60)
    weight, bias = make_weights(d_conv, device)
    x = torch.randn(sum(spec.length for spec in specs), CONV_DIM, device=device)
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            x[tokens] = float("nan")
    num_spare = seed % 3
    # Windows are read with a shift of at most 8; writes add one input per draft.
    pool = make_pool(num_slots, d_conv - 1 + MOST_DRAFTS + num_spare, dtype, device)
    fill_windows(pool, specs, d_conv)
    before = pool.clone()
    rows = pack_verify(specs, device, num_spare=num_spare)
    y = op(x, weight, bias, pool, rows)

    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            assert (y[tokens] == 0).all()
            continue
        alone = window_of(before, spec, d_conv)
        for j, token in enumerate(range(tokens.start, tokens.stop)):
            y_alone = op(x[token][None], weight, bias, alone, one_token_rows([0], device))
            assert same_bits(y[token], y_alone[0])
            assert same_bits(pool[spec.columns[0], j : j + d_conv - 1], alone[0])
    assert_untouched(before, pool, {spec.columns[0] for spec in specs if spec.columns})
    for spec in specs:
        if spec.columns:
            used = d_conv - 2 + spec.length
            assert same_bits(before[spec.columns[0], used:], pool[spec.columns[0], used:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 8))
def test_conv_verify_is_unaffected_by_drafts_rejected_in_earlier_steps(
    seed: int, dtype: torch.dtype, op: Op, device: str
) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    d_conv, length = 4, 15 if INTERPRETED else 40
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
        x[kept:] = float("nan")  # rejected drafts, whose inputs must not be read later
        spec = VerifySpec(1 + num_drafts, columns, accepted)
        y = op(x, weight, bias, pool, pack_verify([spec], device))
        for j in range(kept):
            token = text[position + j][None]
            assert same_bits(y[j], op(token, weight, bias, plain, one_token_rows([0], device))[0])
        position, accepted = position + kept, kept
        assert same_bits(window_of(pool, VerifySpec(1, columns, accepted), d_conv), plain)


@pytest.mark.parametrize("d_conv", [1, 2, 4])
@pytest.mark.parametrize("num_drafts", range(0, MOST_DRAFTS + 1, 4 if INTERPRETED else 1))
def test_conv_verify_matches_the_packed_convolution(
    num_drafts: int, d_conv: int, op: Op, either: Callable[..., Tensor], device: str
) -> None:
    torch.manual_seed(num_drafts)
    weight, bias = make_weights(d_conv, device)
    length = 1 + num_drafts
    x = torch.randn(2 * length, CONV_DIM, device=device)
    specs = [VerifySpec(length, tuple(range(9)), accepted=3), VerifySpec(length, tuple(range(10, 19)))]
    pool = make_pool(20, d_conv - 1 + MOST_DRAFTS, torch.float32, device)
    fill_windows(pool, specs, d_conv)
    packed = torch.cat([window_of(pool, spec, d_conv) for spec in specs])
    y = op(x, weight, bias, pool, pack_verify(specs, device))
    whole = causal_conv if either is conv_verify else causal_conv_ref
    prefill = pack_rows([RowSpec(length, initial=row, final=row) for row in range(2)], 4, device)
    assert same_bits(y, whole(x, weight, bias, packed, prefill))
    for spec, window in zip(specs, packed, strict=True):
        assert same_bits(pool[spec.columns[0], num_drafts : num_drafts + d_conv - 1], window)


def test_conv_verify_nan_stays_in_its_request_and_extra_tokens_become_zero(op: Op, device: str) -> None:
    torch.manual_seed(2)
    weight, bias = make_weights(4, device)
    specs = [VerifySpec(3, (0, 1, 2)), VerifySpec(2, (3, 4)), VerifySpec(1, (5,))]
    x = torch.full((8, CONV_DIM), float("nan"), device=device)
    x[3:5] = torch.randn(2, CONV_DIM, device=device)
    pool = make_pool(8, 5, torch.float32, device)
    fill_windows(pool, specs, 4)
    before = pool.clone()
    y = op(x, weight, bias, pool, pack_verify(specs, device))
    assert y[3:5].isfinite().all() and pool[3, :4].isfinite().all()
    assert y[:3].isnan().all() and (y[6:] == 0).all()
    assert_untouched(before, pool, {0, 3, 5})


@pytest.mark.parametrize("with_bias", [True, False])
def test_conv_verify_outputs_have_the_input_dtype(with_bias: bool, op: Op, device: str) -> None:
    torch.manual_seed(3)
    weight, bias = make_weights(4, device)
    x = torch.randn(3, CONV_DIM, device=device).bfloat16()
    spec = VerifySpec(3, (0, 1, 2))
    pool = make_pool(3, 5, torch.float32, device)
    fill_windows(pool, [spec], 4)
    wide_pool, rows = pool.clone(), pack_verify([spec], device)
    y = op(x, weight, bias if with_bias else None, pool, rows)
    exact = op(x.float(), weight, bias if with_bias else torch.zeros_like(bias), wide_pool, rows)
    assert same_bits(y, exact.bfloat16()) and same_bits(pool, wide_pool)


@pytest.mark.parametrize("draft_inputs", ["in slots", "next to rings"])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("conv_dim", "d_conv", "channels"), [(63, 3, 16), (500, 4, 512), (64, 4, 64), (1, 2, 128), (20, 6, 16)]
)
def test_conv_verify_kernel_matches_its_reference(
    conv_dim: int,
    d_conv: int,
    channels: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    draft_inputs: str,
    device: str,
) -> None:
    torch.manual_seed(conv_dim)
    specs = [VerifySpec(3, (3, 1, 6, 5), accepted=4), VerifySpec(2), VerifySpec(1, (4, 8, 9), accepted=2)]
    weight, bias = torch.randn(conv_dim, d_conv, device=device), torch.randn(conv_dim, device=device)
    x = torch.randn(8, conv_dim, device=device).to(dtype)
    pool = poisoned_pool((10, d_conv + 5, conv_dim), pool_dtype, device, filled=(3, 4))
    expected_pool, rows = pool.clone(), pack_verify(specs, device, num_spare=1)
    run = conv_verify if draft_inputs == "in slots" else conv_with_rings(conv_verify)
    y = run(x, weight, bias, pool, rows, ConvVerifyTiling(channels, 2))
    expected = conv_verify_ref(x, weight, bias, expected_pool, rows)
    torch.testing.assert_close(y, expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    assert same_bits(pool, expected_pool)


def test_conv_verify_keeps_the_window_of_a_request_without_tokens(op: Op, device: str) -> None:
    weight, bias = make_weights(4, device)
    pool = torch.randn(4, 6, CONV_DIM, device=device)
    before = pool.clone()
    specs = [VerifySpec(0, (1,), accepted=2), VerifySpec(1, (3,))]
    op(torch.randn(1, CONV_DIM, device=device), weight, bias, pool, pack_verify(specs, device, num_spare=1))
    assert_untouched(before, pool, {3})


def test_conv_verify_accepts_views_as_inputs_and_state_pool(op: Op, device: str) -> None:
    torch.manual_seed(6)
    weight, bias = make_weights(4, device)
    wide = torch.randn(3, CONV_DIM + 9, device=device)
    layers = torch.randn(4, 2, 6, CONV_DIM + 1, device=device)
    before, plain = layers.clone(), layers[:, 1, 1:, 1:].contiguous()
    rows = pack_verify([VerifySpec(3, (2, 0, 1), accepted=2)], device)
    y = op(wide[:, 3 : 3 + CONV_DIM], weight, bias, layers[:, 1, 1:, 1:], rows)
    assert same_bits(y, op(wide[:, 3 : 3 + CONV_DIM].contiguous(), weight, bias, plain, rows))
    assert same_bits(layers[:, 1, 1:, 1:], plain)
    layers[:, 1, 1:, 1:] = before[:, 1, 1:, 1:]
    assert same_bits(layers, before)


def test_conv_verify_refuses_a_window_too_short_for_the_drafts() -> None:
    weight, bias = make_weights(4, "cpu")
    rows = pack_verify([VerifySpec(3, (2, 0, 1))], "cpu")
    with pytest.raises(ValueError, match="channels, and windows at least 5 inputs"):
        conv_verify(torch.randn(3, CONV_DIM), weight, bias, torch.randn(3, 4, CONV_DIM), rows)


@pytest.mark.parametrize(
    ("num_drafts", "dtype", "message"), [(1, torch.float32, "at least 2 drafts"), (2, torch.bfloat16, "torch.float32")]
)
def test_conv_verify_refuses_mismatched_draft_inputs(num_drafts: int, dtype: torch.dtype, message: str) -> None:
    weight, bias = make_weights(4, "cpu")
    rows = pack_verify([VerifySpec(3, (2, 0, 1))], "cpu")
    pool, drafts = cut_window(torch.randn(3, 3 + num_drafts, CONV_DIM), rows.columns[:, 0], 3)
    drafts = replace(drafts, inputs=drafts.inputs.to(dtype))
    with pytest.raises(ValueError, match=message):
        conv_verify(torch.randn(3, CONV_DIM), weight, bias, pool, rows, drafts=drafts)


def test_conv_verify_uses_the_reference_for_float64(device: str) -> None:
    weight, bias = make_weights(4, device)
    x, pool = (torch.randn(*shape, CONV_DIM, dtype=torch.float64, device=device) for shape in ((2,), (2, 5)))
    expected_pool, rows = pool.clone(), pack_verify([VerifySpec(2, (1, 0))], device)
    y = conv_verify(x, weight, bias, pool, rows)
    assert same_bits(y, conv_verify_ref(x, weight, bias, expected_pool, rows)) and same_bits(pool, expected_pool)
