"""Properties of the reference scan over packed rows."""

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.reference import ssd_scan_ref
from megatron_mamba_cache.kernels.varlen_rows import PAD_SLOT
from tests.kernels.packed_rows import (
    RowSpec,
    assert_untouched,
    pack_rows,
    poisoned_pool,
    row_slices,
    same_bits,
    written_slots,
)

CHUNK = 8
HEADS, HEAD_DIM, D_STATE = 4, 5, 7
SPECS = [
    RowSpec(CHUNK - 1, final=0),
    RowSpec(CHUNK, initial=1, start=CHUNK, final=1),
    RowSpec(CHUNK + 1, final=2, boundaries={CHUNK: 3}),
    RowSpec(0, start=5, initial=11, final=4),
    RowSpec(1, start=13, initial=11, final=5),
    RowSpec(3 * CHUNK + 2, start=5, initial=11, final=6, boundaries={CHUNK: 7, 2 * CHUNK: 8, 3 * CHUNK: 9}),
    RowSpec(2, start=4),
    RowSpec(2 * CHUNK, start=2 * CHUNK, initial=11, boundaries={4 * CHUNK: 10}),
]
NUM_SLOTS = 13
Inputs = dict[str, Tensor]


def make_inputs(num_tokens: int, device: str, *, groups: int = 2, dtype: torch.dtype = torch.float32) -> Inputs:
    inputs = {
        "x": torch.randn(num_tokens, HEADS, HEAD_DIM),
        "dt": torch.nn.functional.softplus(torch.randn(num_tokens, HEADS)),
        "A": -torch.rand(HEADS) - 0.1,
        "B": torch.randn(num_tokens, groups, D_STATE),
        "C": torch.randn(num_tokens, groups, D_STATE),
        "D": torch.randn(HEADS),
    }
    return {name: tensor.to(device, dtype) for name, tensor in inputs.items()}


def tokens_of(inputs: Inputs, tokens: slice) -> Inputs:
    return inputs | {name: inputs[name][tokens] for name in ("x", "dt", "B", "C")}


def joined(parts: list[Inputs]) -> Inputs:
    return parts[0] | {name: torch.cat([part[name] for part in parts]) for name in ("x", "dt", "B", "C")}


def sequential_scan(inputs: Inputs, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs in fp64, and the state before each token and after the last."""
    x, dt, A, B, C, D = (inputs[name].double() for name in ("x", "dt", "A", "B", "C", "D"))
    B, C = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (B, C))
    states, outputs = [state.double()], []
    for t in range(x.shape[0]):
        increment = torch.einsum("h,hn,hp->hnp", dt[t], B[t], x[t])
        states.append(torch.exp(dt[t] * A)[:, None, None] * states[-1] + increment)
        outputs.append(torch.einsum("hn,hnp->hp", C[t], states[-1]) + D[:, None] * x[t])
    return torch.stack(outputs) if outputs else x, states


def make_pool(dtype: torch.dtype, device: str, filled: tuple[int, ...] = ()) -> Tensor:
    return poisoned_pool((NUM_SLOTS, HEADS, D_STATE, HEAD_DIM), dtype, device, filled)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("seed", [0, 1])
def test_scan_matches_the_sequential_recurrence(
    groups: int, dtype: torch.dtype, tolerance: float, seed: int, device: str
) -> None:
    torch.manual_seed(seed)
    specs = SPECS if seed == 0 else SPECS[::-1]
    inputs = make_inputs(sum(spec.length for spec in specs), device, groups=groups, dtype=dtype)
    pool = make_pool(dtype, device, filled=(1, 11))
    before = pool.clone()
    y = ssd_scan_ref(**inputs, ssm_pool=pool, rows=pack_rows(specs, CHUNK, device), chunk_size=CHUNK)

    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        initial = before[spec.initial] if spec.initial != PAD_SLOT else torch.zeros_like(before[0])
        expected, states = sequential_scan(tokens_of(inputs, tokens), initial)
        torch.testing.assert_close(y[tokens].double(), expected.double(), rtol=tolerance, atol=tolerance)
        for position, slot in [(spec.start + spec.length, spec.final), *spec.boundaries.items()]:
            if slot != PAD_SLOT:
                state = states[position - spec.start]
                torch.testing.assert_close(pool[slot].double(), state, rtol=tolerance, atol=tolerance)
    assert_untouched(before, pool, written_slots(specs))


def neighbours(packing: str) -> tuple[list[int], list[int]]:
    """Return the lengths of the rows before and behind the row under test."""
    return {"alone": ([], []), "behind others": ([3, CHUNK], []), "amid others": ([1], [2 * CHUNK + 5, 0, 1])}[packing]


@pytest.mark.parametrize("packing", ["alone", "behind others", "amid others"])
@pytest.mark.parametrize("tail", [0, 1, CHUNK - 1])
def test_scan_resumed_at_every_boundary_is_bit_equal(packing: str, tail: int, device: str) -> None:
    torch.manual_seed(tail)
    length = 4 * CHUNK + tail
    inputs = make_inputs(length, device)
    slots = {position: position // CHUNK for position in range(CHUNK, length, CHUNK)}
    whole = make_pool(torch.float32, device)
    rows = pack_rows([RowSpec(length, final=0, boundaries=slots)], CHUNK, device)
    expected = ssd_scan_ref(**inputs, ssm_pool=whole, rows=rows, chunk_size=CHUNK)

    before, behind = ([RowSpec(n) for n in lengths] for lengths in neighbours(packing))
    for cut, cut_slot in slots.items():
        pool = make_pool(torch.float32, device)
        pool[cut_slot] = whole[cut_slot]
        later = {position: slot for position, slot in slots.items() if position > cut}
        specs = [*before, RowSpec(length - cut, cut, cut_slot, 0, later), *behind]
        parts = [make_inputs(spec.length, device) for spec in specs]
        parts[len(before)] = tokens_of(inputs, slice(cut, None))
        packed = joined(parts) | {"A": inputs["A"], "D": inputs["D"]}
        y = ssd_scan_ref(**packed, ssm_pool=pool, rows=pack_rows(specs, CHUNK, device), chunk_size=CHUNK)
        assert same_bits(y[row_slices(specs)[len(before)]], expected[cut:])
        assert all(same_bits(pool[slot], whole[slot]) for slot in [0, *later.values()])


def test_first_chunk_of_an_unaligned_row_ends_on_the_absolute_multiple(device: str) -> None:
    torch.manual_seed(0)
    inputs = make_inputs(3 * CHUNK, device)
    pool = make_pool(torch.float32, device)
    head = pack_rows([RowSpec(3, final=0)], CHUNK, device)
    ssd_scan_ref(**tokens_of(inputs, slice(3)), ssm_pool=pool, rows=head, chunk_size=CHUNK)
    tail = pack_rows([RowSpec(3 * CHUNK - 3, 3, 0, 0, {CHUNK: 1})], CHUNK, device)
    y = ssd_scan_ref(**tokens_of(inputs, slice(3, None)), ssm_pool=pool, rows=tail, chunk_size=CHUNK)
    resumed = pack_rows([RowSpec(2 * CHUNK, CHUNK, 1, 2)], CHUNK, device)
    y_resumed = ssd_scan_ref(**tokens_of(inputs, slice(CHUNK, None)), ssm_pool=pool, rows=resumed, chunk_size=CHUNK)
    assert same_bits(y[CHUNK - 3 :], y_resumed)
    assert same_bits(pool[0], pool[2])


def test_neighbours_nan_stays_with_them_and_padding_gives_zeros(device: str) -> None:
    torch.manual_seed(1)
    clean, poison = make_inputs(5, device), make_inputs(3, device)
    for name in ("x", "dt", "B", "C"):
        poison[name].fill_(float("nan"))
    packed = joined([clean, poison, clean, poison])
    specs = [RowSpec(5, final=0), RowSpec(3, final=1), RowSpec(5, final=2)]
    pool = make_pool(torch.float32, device)
    rows = pack_rows(specs, CHUNK, device, num_padding=2)
    y = ssd_scan_ref(**packed, ssm_pool=pool, rows=rows, chunk_size=CHUNK)
    assert y[:5].isfinite().all() and y[5:8].isnan().all() and (y[13:] == 0).all()
    assert same_bits(y[8:13], y[:5]) and same_bits(pool[2], pool[0]) and pool[0].isfinite().all()


def test_padding_chunk_stores_nothing(device: str) -> None:
    torch.manual_seed(4)
    inputs = make_inputs(CHUNK + 1, device)
    padded = pack_rows([RowSpec(CHUNK + 1, final=0)], CHUNK, device, num_padding=1)
    padded.chunk_slots[-1] = 5
    pool, plain = make_pool(torch.float32, device), make_pool(torch.float32, device)
    ssd_scan_ref(**inputs, ssm_pool=pool, rows=padded, chunk_size=CHUNK)
    rows = pack_rows([RowSpec(CHUNK + 1, final=0)], CHUNK, device)
    ssd_scan_ref(**inputs, ssm_pool=plain, rows=rows, chunk_size=CHUNK)
    assert same_bits(pool, plain)


def test_step_of_padding_touches_nothing(device: str) -> None:
    pool = make_pool(torch.float32, device)
    before = pool.clone()
    for num_tokens, num_padding in [(0, 0), (0, 2), (3, 2)]:
        inputs = make_inputs(num_tokens, device)
        rows = pack_rows([], CHUNK, device, num_padding=num_padding)
        y = ssd_scan_ref(**inputs, ssm_pool=pool, rows=rows, chunk_size=CHUNK)
        assert y.shape == inputs["x"].shape and (y == 0).all()
    assert same_bits(before, pool)


def test_pool_of_bf16_holds_rounded_states_and_carries_exact_ones(device: str) -> None:
    torch.manual_seed(2)
    inputs = make_inputs(3 * CHUNK + 1, device)
    spec = RowSpec(3 * CHUNK + 1, final=0, boundaries={CHUNK: 1, 2 * CHUNK: 2})
    exact, rounded = make_pool(torch.float32, device), make_pool(torch.bfloat16, device)
    rows = pack_rows([spec], CHUNK, device)
    y_exact = ssd_scan_ref(**inputs, ssm_pool=exact, rows=rows, chunk_size=CHUNK)
    y_rounded = ssd_scan_ref(**inputs, ssm_pool=rounded, rows=rows, chunk_size=CHUNK)
    assert same_bits(y_exact, y_rounded)
    assert same_bits(rounded[:3], exact[:3].bfloat16())


def test_outputs_are_rounded_to_the_input_dtype(device: str) -> None:
    torch.manual_seed(3)
    inputs = make_inputs(CHUNK + 3, device)
    inputs = inputs | {name: inputs[name].bfloat16() for name in ("x", "B", "C")}
    widened = inputs | {name: inputs[name].float() for name in ("x", "B", "C")}
    rows = pack_rows([RowSpec(CHUNK + 3)], CHUNK, device)
    y = ssd_scan_ref(**inputs, ssm_pool=make_pool(torch.float32, device), rows=rows, chunk_size=CHUNK)
    exact = ssd_scan_ref(**widened, ssm_pool=make_pool(torch.float32, device), rows=rows, chunk_size=CHUNK)
    assert same_bits(y, exact.bfloat16())
