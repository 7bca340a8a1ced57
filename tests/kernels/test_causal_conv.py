"""Properties of the convolution over packed requests, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, PrefillBatch
from megatron_mamba_cache.recurrences.conv import conv as causal_conv_module
from megatron_mamba_cache.recurrences.conv.conv import ConvTiling, causal_conv
from megatron_mamba_cache.recurrences.conv.reference import causal_conv_ref, conv_verify_ref
from megatron_mamba_cache.recurrences.conv.verify import conv_verify
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import (
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

Op = Callable[[Tensor, Tensor, Tensor | None, Tensor, PrefillBatch], Tensor]


@pytest.fixture(params=[causal_conv, causal_conv_ref])
def op(request: pytest.FixtureRequest, device: str) -> Iterator[Op]:
    """Return the op or its reference; check that the kernel was launched or not."""
    of_kernel = request.param is causal_conv
    with launches_expected(causal_conv_module, "_causal_conv_kernel", of_kernel=of_kernel, device=device):
        yield request.param


def sequential_conv(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the fp64 outputs, and the windows before each token and after the last one."""
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
def test_causal_conv_matches_a_sequential_loop(
    d_conv: int, with_bias: bool, spare_window: int, op: Op, device: str
) -> None:
    torch.manual_seed(d_conv)
    weight, bias = make_weights(d_conv, device, with_bias=with_bias)
    x = torch.randn(sum(spec.length for spec in SPECS), CONV_DIM, device=device)
    pool = poisoned_pool((NUM_SLOTS, d_conv - 1 + spare_window, CONV_DIM), torch.float32, device, filled=(1, 6))
    before = pool.clone()
    y = op(x, weight, bias, pool, pack_rows(SPECS, CHUNK, device))

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


def test_causal_conv_resumed_at_any_position_is_bit_equal(op: Op, device: str) -> None:
    torch.manual_seed(0)
    length, other = 27, RowSpec(5, final=3)
    weight, bias = make_weights(4, device)
    x, x_other = torch.randn(length, CONV_DIM, device=device), torch.randn(5, CONV_DIM, device=device)
    whole = poisoned_pool((6, 3, CONV_DIM), torch.float32, device)
    expected = op(x, weight, bias, whole, pack_rows([RowSpec(length, final=0)], CHUNK, device))
    for cut in range(0, length, 7 if INTERPRETED else 1):
        pool = poisoned_pool((6, 3, CONV_DIM), torch.float32, device)
        head = pack_rows([RowSpec(cut, final=1)], CHUNK, device)
        y_head = op(x[:cut], weight, bias, pool, head)
        resumed = RowSpec(length - cut, start=cut, initial=1, final=0)
        tail = pack_rows([other, resumed], CHUNK, device)
        y_tail = op(torch.cat([x_other, x[cut:]]), weight, bias, pool, tail)[5:]
        assert same_bits(torch.cat([y_head, y_tail]), expected)
        assert same_bits(pool[0], whole[0])


def test_causal_conv_is_bitwise_equal_in_any_batch_size(op: Op, device: str) -> None:
    torch.manual_seed(1)
    weight, bias = make_weights(4, device)
    length = 40 if INTERPRETED else 1000
    x = torch.randn(2 * length + 1, CONV_DIM, device=device)
    pool = poisoned_pool((2, 3, CONV_DIM), torch.float32, device)
    y = op(x, weight, bias, pool, pack_rows([RowSpec(length), RowSpec(length + 1)], CHUNK, device))
    alone = op(x[length:], weight, bias, pool, pack_rows([RowSpec(length + 1)], CHUNK, device))
    assert same_bits(y[length:], alone)


def test_causal_conv_nan_stays_in_its_request_and_padding_becomes_zero(op: Op, device: str) -> None:
    torch.manual_seed(2)
    weight, bias = make_weights(4, device)
    specs = [RowSpec(5, final=0), RowSpec(2, final=1), RowSpec(4, final=2)]
    x = torch.full((14, CONV_DIM), float("nan"), device=device)
    x[5:7] = torch.randn(2, CONV_DIM, device=device)
    pool = poisoned_pool((4, 3, CONV_DIM), torch.float32, device)
    y = op(x, weight, bias, pool, pack_rows(specs, CHUNK, device, num_padding=2))
    assert y[5:7].isfinite().all() and pool[1].isfinite().all()
    assert y[:5].isnan().all() and (y[11:] == 0).all()


def test_causal_conv_stores_no_state_for_a_padding_chunk(op: Op, device: str) -> None:
    weight, bias = make_weights(4, device)
    rows = pack_rows([RowSpec(CHUNK + 1, final=0)], CHUNK, device, num_padding=1)
    rows.chunk_slots[-1] = 2
    pool = poisoned_pool((4, 3, CONV_DIM), torch.float32, device)
    before = pool.clone()
    op(torch.randn(CHUNK + 1, CONV_DIM, device=device), weight, bias, pool, rows)
    assert_untouched(before, pool, {0})


@pytest.mark.parametrize("num_rows", [0, 3])
def test_causal_conv_of_padding_only_changes_no_state(num_rows: int, op: Op, device: str) -> None:
    weight, bias = make_weights(4, device)
    pool = poisoned_pool((4, 3, CONV_DIM), torch.float32, device)
    before = pool.clone()
    for num_tokens in (0, 3):
        x = torch.full((num_tokens, CONV_DIM), float("nan"), device=device)
        y = op(x, weight, bias, pool, pack_rows([], CHUNK, device, num_padding=num_rows))
        assert y.shape == x.shape and (y == 0).all()
    assert same_bits(before, pool)


def test_causal_conv_casts_stored_inputs_to_bf16_but_not_its_outputs(op: Op, device: str) -> None:
    torch.manual_seed(3)
    weight, bias = make_weights(4, device)
    x = torch.randn(6, CONV_DIM, device=device)
    pool = poisoned_pool((1, 3, CONV_DIM), torch.bfloat16, device)
    rows = pack_rows([RowSpec(6, final=0)], CHUNK, device)
    assert op(x, weight, bias, pool, rows).dtype == torch.float32
    assert same_bits(pool[0], x[3:].bfloat16())
    y = op(x.bfloat16(), weight, bias, pool, rows)
    exact = op(x.bfloat16().float(), weight, bias, pool, rows)
    assert same_bits(y, exact.bfloat16())


@pytest.mark.parametrize("d_conv", [1, 2, 4])
def test_causal_conv_of_single_tokens_equals_a_packed_prompt_bitwise(d_conv: int, op: Op, device: str) -> None:
    torch.manual_seed(4)
    weight, bias = make_weights(d_conv, device)
    x = torch.randn(2, 9, CONV_DIM, device=device)
    pool = torch.zeros(5, d_conv + 1, CONV_DIM, device=device)
    packed = pool.clone()
    step = conv_verify if op is causal_conv else conv_verify_ref
    specs = [RowSpec(9, final=3), RowSpec(9, final=1)]
    expected = op(x.flatten(0, 1), weight, bias, packed, pack_rows(specs, CHUNK, device))
    rows = one_token_rows([3, PAD_SLOT, 1], device)
    garbage = torch.full((CONV_DIM,), float("nan"), device=device)
    for t in range(9):
        y = step(torch.stack([x[0, t], garbage, x[1, t]]), weight, bias, pool, rows)
        assert same_bits(y[0], expected[t]) and same_bits(y[2], expected[9 + t])
        assert (y[1] == 0).all()
    assert same_bits(pool, packed)


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.bfloat16, torch.float32),
        *([] if INTERPRETED else [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16)]),
    ],
)
@pytest.mark.parametrize(
    ("conv_dim", "d_conv", "tiling"),
    [
        (63, 3, ConvTiling(8, 32, 8, 1)),
        (500, 4, ConvTiling(16, 256, 8, 4)),
        (64, 4, ConvTiling(32, 64, 8, 4)),
        (1, 2, ConvTiling(8, 128, 8, 4)),
        (20, 6, ConvTiling(16, 16, 8, 2)),
    ],
)
def test_causal_conv_kernel_matches_its_reference(
    conv_dim: int, d_conv: int, tiling: ConvTiling, dtype: torch.dtype, pool_dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(conv_dim)
    weight, bias = torch.randn(conv_dim, d_conv, device=device), torch.randn(conv_dim, device=device)
    x = torch.randn(50, conv_dim, device=device).to(dtype)
    pool = poisoned_pool((NUM_SLOTS, d_conv + 1, conv_dim), pool_dtype, device, filled=(1, 6))
    expected_pool, rows = pool.clone(), pack_rows(SPECS, CHUNK, device, num_padding=2)
    y = causal_conv(x, weight, bias, pool, rows, tiling)
    expected = causal_conv_ref(x, weight, bias, expected_pool, rows)
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y, expected, rtol=rtol, atol=1e-5)
    assert same_bits(pool, expected_pool)


@pytest.mark.parametrize("d_conv", [2, 4])
@settings(max_examples=5 if INTERPRETED else 25)
@given(data=st.data())
def test_causal_conv_windows_of_random_requests_match_the_reference(d_conv: int, data: st.DataObject) -> None:
    """Requests have a few tokens and store windows in their own slots; several may start from the same slot."""
    slots = iter(data.draw(st.permutations(range(1, 40))))
    specs = []
    for _ in range(data.draw(st.integers(1, 4))):
        length, start = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
        final = data.draw(st.sampled_from([PAD_SLOT, next(slots)]))
        initial = data.draw(st.sampled_from([PAD_SLOT, 0, final]))
        reached = [position for position in range(start + 1, start + length + 1) if position % 3 == 0]
        boundaries = {position: next(slots) for position in reached if data.draw(st.booleans())}
        specs.append(RowSpec(length, start, initial, final, boundaries))
    weight, bias = make_weights(d_conv, "cpu")
    x = torch.randn(sum(spec.length for spec in specs) + data.draw(st.integers(0, 2)), CONV_DIM)
    pool = torch.randn(40, d_conv - 1, CONV_DIM)
    expected_pool, rows = pool.clone(), pack_rows(specs, 3, "cpu", data.draw(st.integers(0, 2)))
    y = causal_conv(x, weight, bias, pool, rows, ConvTiling(8, 64, 8, 1))
    torch.testing.assert_close(y, causal_conv_ref(x, weight, bias, expected_pool, rows), rtol=1e-5, atol=1e-5)
    assert same_bits(pool, expected_pool)


def test_causal_conv_result_does_not_depend_on_the_tiling(device: str) -> None:
    torch.manual_seed(5)
    weight, bias = make_weights(4, device)
    x = torch.randn(sum(spec.length for spec in SPECS), CONV_DIM, device=device)
    rows, results = pack_rows(SPECS, CHUNK, device), []
    for tiling in (ConvTiling(16, 256, 8, 4), ConvTiling(8, 16, 8, 1), ConvTiling(64, 32, 8, 8)):
        pool = torch.ones(NUM_SLOTS, 3, CONV_DIM, device=device)
        results.append((causal_conv(x, weight, bias, pool, rows, tiling), pool))
    for y, pool in results[1:]:
        assert same_bits(y, results[0][0]) and same_bits(pool, results[0][1])


def test_causal_conv_accepts_views_as_inputs_and_state_pool(op: Op, device: str) -> None:
    torch.manual_seed(6)
    weight, bias = make_weights(4, device)
    wide = torch.randn(41, CONV_DIM + 9, device=device)
    layers = torch.randn(NUM_SLOTS, 2, 5, CONV_DIM + 1, device=device)
    before, plain, rows = layers.clone(), layers[:, 1, 1:, 1:].contiguous(), pack_rows(SPECS, CHUNK, device)
    y = op(wide[:, 3 : 3 + CONV_DIM], weight, bias, layers[:, 1, 1:, 1:], rows)
    assert same_bits(y, op(wide[:, 3 : 3 + CONV_DIM].contiguous(), weight, bias, plain, rows))
    assert same_bits(layers[:, 1, 1:, 1:], plain)
    layers[:, 1, 1:, 1:] = before[:, 1, 1:, 1:]
    assert same_bits(layers, before)


BAD_CALLS = {
    "weight": (lambda x, w, b, p, r: (x, w[1:], b, p, r), "must have 37 channels"),
    "transposed weight": (lambda x, w, b, p, r: (x, w.mT.contiguous().mT, b, p, r), "weight must be contiguous"),
    "bias": (lambda x, w, b, p, r: (x, w, b[1:], p, r), "bias must be contiguous"),
    "pool": (lambda x, w, b, p, r: (x, w, b, p[:, :2], r), "windows at least 3 inputs"),
    "dimensions": (lambda x, w, b, p, r: (x, w, b, p[0], r), "conv_pool"),
    "device": (lambda x, w, b, p, r: (x, w, b, p.to("meta"), r), "conv_pool must be on cpu"),
    "channels": (
        lambda x, w, b, p, r: (x.mT.contiguous().mT, w, b, p, r),
        "channels of x and conv_pool must be contiguous",
    ),
    "rows": (lambda x, w, b, p, r: (x, w, b, p, replace(r, initial_slots=r.initial_slots[1:])), "initial_slots"),
    "chunks": (lambda x, w, b, p, r: (x, w, b, p, replace(r, cu_chunks=r.cu_chunks[1:])), "cu_chunks"),
    "dtype": (lambda x, w, b, p, r: (x, w, b, p, replace(r, chunk_slots=r.chunk_slots.long())), "chunk_slots"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_causal_conv_refuses_mismatched_arguments(name: str) -> None:
    change, reason = BAD_CALLS[name]
    x, pool = torch.randn(9, CONV_DIM), torch.randn(2, 3, CONV_DIM)
    with pytest.raises(ValueError, match=reason):
        causal_conv(*change(x, *make_weights(4, "cpu"), pool, pack_rows([RowSpec(9, final=0)], CHUNK, "cpu")))


def test_causal_conv_uses_the_reference_for_float64(device: str) -> None:
    weight, bias = make_weights(4, device)
    x, pool = (torch.randn(*shape, CONV_DIM, dtype=torch.float64, device=device) for shape in ((9,), (2, 3)))
    expected_pool, rows = pool.clone(), pack_rows([RowSpec(9, final=0)], CHUNK, device)
    y = causal_conv(x, weight, bias, pool, rows)
    assert same_bits(y, causal_conv_ref(x, weight, bias, expected_pool, rows)) and same_bits(pool, expected_pool)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("conv_dim", [CONV_DIM, 1024])
def test_causal_conv_in_a_replayed_graph_reads_new_inputs(conv_dim: int) -> None:
    torch.manual_seed(7)
    weight, bias = torch.randn(conv_dim, 4, device="cuda"), torch.randn(conv_dim, device="cuda")
    x, pool = torch.randn(60, conv_dim, device="cuda"), torch.randn(NUM_SLOTS, 3, conv_dim, device="cuda")
    plans = [[RowSpec(60, final=2)], SPECS, [RowSpec(30, initial=4, final=4), RowSpec(2, 7, 5, 5, {8: 6})], []]
    names = PrefillBatch.__dataclass_fields__
    sizes = (9, 8, 8, 17, 16, 16, 9, 8)
    buffers = PrefillBatch(*(torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes))

    def fill(specs: list[RowSpec]) -> None:
        rows = pack_rows(specs, CHUNK, "cuda", num_padding=16)
        for name in names:
            buffer = getattr(buffers, name)
            buffer.copy_(getattr(rows, name)[: buffer.shape[0]])

    fill(plans[0])
    causal_conv(x, weight, bias, pool, buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = causal_conv(x, weight, bias, pool, buffers)
    for specs in plans:
        fill(specs)
        expected_pool = pool.clone()
        expected = causal_conv(x, weight, bias, expected_pool, buffers)
        graph.replay()
        assert same_bits(y, expected) and same_bits(pool, expected_pool)
