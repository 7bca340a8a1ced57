"""Properties of the reference convolution over packed rows."""

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.reference import causal_conv_ref, conv_verify_ref
from megatron_mamba_cache.kernels.varlen_rows import PAD_SLOT
from tests.kernels.packed_rows import (
    RowSpec,
    assert_untouched,
    one_token_rows,
    pack_rows,
    poisoned_pool,
    row_slices,
    same_bits,
    written_slots,
)

CHUNK = 8
CONV_DIM = 37
SPECS = [
    RowSpec(2, final=0),
    RowSpec(1, start=3, initial=1, final=1),
    RowSpec(0, start=5, initial=6, final=2),
    RowSpec(0),
    RowSpec(19, start=6, initial=6, final=3, boundaries={8: 4, 24: 5}),
    RowSpec(3, start=0, boundaries={}),
    RowSpec(16, start=16, initial=6, final=7, boundaries={24: 8}),
]
NUM_SLOTS = 10


def sequential_conv(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs in fp64, and the window before each token and after the last."""
    windows, outputs = [window.double()], []
    for token in x.double():
        history = torch.cat([windows[-1], token[None]])
        total = (history * weight.double().t()).sum(0) + (0 if bias is None else bias.double())
        outputs.append(total * torch.sigmoid(total))
        windows.append(history[1:])
    return torch.stack(outputs) if outputs else x.double(), windows


def make_weights(d_conv: int, device: str, *, with_bias: bool = True) -> tuple[Tensor, Tensor | None]:
    return torch.randn(CONV_DIM, d_conv, device=device), torch.randn(CONV_DIM, device=device) if with_bias else None


@pytest.mark.parametrize("d_conv", [2, 4])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("spare_window", [0, 3])
def test_conv_matches_the_sequential_recurrence(d_conv: int, with_bias: bool, spare_window: int, device: str) -> None:
    torch.manual_seed(d_conv)
    weight, bias = make_weights(d_conv, device, with_bias=with_bias)
    x = torch.randn(sum(spec.length for spec in SPECS), CONV_DIM, device=device)
    pool = poisoned_pool((NUM_SLOTS, d_conv - 1 + spare_window, CONV_DIM), torch.float32, device, filled=(1, 6))
    before = pool.clone()
    y = causal_conv_ref(x, weight, bias, pool, pack_rows(SPECS, CHUNK, device))

    for spec, tokens in zip(SPECS, row_slices(SPECS), strict=True):
        window = before[spec.initial, : d_conv - 1] if spec.initial != PAD_SLOT else torch.zeros_like(before[0])
        expected, windows = sequential_conv(x[tokens], weight, bias, window[: d_conv - 1])
        torch.testing.assert_close(y[tokens].double(), expected, rtol=1e-5, atol=1e-5)
        stored = {spec.start + spec.length: spec.final} | spec.boundaries
        for position, slot in stored.items():
            if slot != PAD_SLOT:
                assert torch.equal(pool[slot, : d_conv - 1].double(), windows[position - spec.start])
    assert_untouched(before, pool, written_slots(SPECS))
    assert same_bits(before[:, d_conv - 1 :], pool[:, d_conv - 1 :])


def test_conv_resumed_at_every_position_is_bit_equal(device: str) -> None:
    torch.manual_seed(0)
    length, other = 27, RowSpec(5, final=3)
    weight, bias = make_weights(4, device)
    x, x_other = torch.randn(length, CONV_DIM, device=device), torch.randn(5, CONV_DIM, device=device)
    whole = poisoned_pool((6, 3, CONV_DIM), torch.float32, device)
    expected = causal_conv_ref(x, weight, bias, whole, pack_rows([RowSpec(length, final=0)], CHUNK, device))
    for cut in range(length):
        pool = poisoned_pool((6, 3, CONV_DIM), torch.float32, device)
        head = pack_rows([RowSpec(cut, final=1)], CHUNK, device)
        y_head = causal_conv_ref(x[:cut], weight, bias, pool, head)
        resumed = RowSpec(length - cut, start=cut, initial=1, final=0)
        tail = pack_rows([other, resumed], CHUNK, device)
        y_tail = causal_conv_ref(torch.cat([x_other, x[cut:]]), weight, bias, pool, tail)[5:]
        assert same_bits(torch.cat([y_head, y_tail]), expected)
        assert same_bits(pool[0], whole[0])


def test_bits_do_not_depend_on_the_size_of_the_batch(device: str) -> None:
    torch.manual_seed(1)
    weight, bias = make_weights(4, device)
    x = torch.randn(2001, CONV_DIM, device=device)
    pool = poisoned_pool((2, 3, CONV_DIM), torch.float32, device)
    y = causal_conv_ref(x, weight, bias, pool, pack_rows([RowSpec(1000), RowSpec(1001)], CHUNK, device))
    alone = causal_conv_ref(x[1000:], weight, bias, pool, pack_rows([RowSpec(1001)], CHUNK, device))
    assert same_bits(y[1000:], alone)


def test_neighbours_nan_stays_with_them_and_padding_gives_zeros(device: str) -> None:
    torch.manual_seed(2)
    weight, bias = make_weights(4, device)
    specs = [RowSpec(5, final=0), RowSpec(2, final=1), RowSpec(4, final=2)]
    x = torch.full((14, CONV_DIM), float("nan"), device=device)
    x[5:7] = torch.randn(2, CONV_DIM, device=device)
    pool = poisoned_pool((4, 3, CONV_DIM), torch.float32, device)
    y = causal_conv_ref(x, weight, bias, pool, pack_rows(specs, CHUNK, device, num_padding=2))
    assert y[5:7].isfinite().all() and pool[1].isfinite().all()
    assert y[:5].isnan().all() and (y[11:] == 0).all()


def test_padding_chunk_stores_nothing(device: str) -> None:
    weight, bias = make_weights(4, device)
    rows = pack_rows([RowSpec(CHUNK + 1, final=0)], CHUNK, device, num_padding=1)
    rows.chunk_slots[-1] = 2
    pool = poisoned_pool((4, 3, CONV_DIM), torch.float32, device)
    before = pool.clone()
    causal_conv_ref(torch.randn(CHUNK + 1, CONV_DIM, device=device), weight, bias, pool, rows)
    assert_untouched(before, pool, {0})


@pytest.mark.parametrize("num_rows", [0, 3])
def test_step_of_padding_touches_nothing(num_rows: int, device: str) -> None:
    weight, bias = make_weights(4, device)
    pool = poisoned_pool((4, 3, CONV_DIM), torch.float32, device)
    before = pool.clone()
    for num_tokens in (0, 3):
        x = torch.full((num_tokens, CONV_DIM), float("nan"), device=device)
        y = causal_conv_ref(x, weight, bias, pool, pack_rows([], CHUNK, device, num_padding=num_rows))
        assert y.shape == x.shape and (y == 0).all()
    assert same_bits(before, pool)


def test_pool_of_bf16_holds_rounded_inputs_and_outputs_keep_the_input_dtype(device: str) -> None:
    torch.manual_seed(3)
    weight, bias = make_weights(4, device)
    x = torch.randn(6, CONV_DIM, device=device)
    pool = poisoned_pool((1, 3, CONV_DIM), torch.bfloat16, device)
    rows = pack_rows([RowSpec(6, final=0)], CHUNK, device)
    assert causal_conv_ref(x, weight, bias, pool, rows).dtype == torch.float32
    assert same_bits(pool[0], x[3:].bfloat16())
    y = causal_conv_ref(x.bfloat16(), weight, bias, pool, rows)
    exact = causal_conv_ref(x.bfloat16().float(), weight, bias, pool, rows)
    assert same_bits(y, exact.bfloat16())


@pytest.mark.parametrize("d_conv", [1, 2, 4])
def test_steps_of_one_token_are_bit_equal_to_the_packed_row(d_conv: int, device: str) -> None:
    torch.manual_seed(4)
    weight, bias = make_weights(d_conv, device)
    x = torch.randn(2, 9, CONV_DIM, device=device)
    pool = torch.zeros(5, d_conv + 1, CONV_DIM, device=device)
    packed = pool.clone()
    specs = [RowSpec(9, final=3), RowSpec(9, final=1)]
    expected = causal_conv_ref(x.flatten(0, 1), weight, bias, packed, pack_rows(specs, CHUNK, device))
    rows = one_token_rows([3, PAD_SLOT, 1], device)
    garbage = torch.full((CONV_DIM,), float("nan"), device=device)
    for t in range(9):
        y = conv_verify_ref(torch.stack([x[0, t], garbage, x[1, t]]), weight, bias, pool, rows)
        assert same_bits(y[0], expected[t]) and same_bits(y[2], expected[9 + t])
        assert (y[1] == 0).all()
    assert same_bits(pool, packed)
