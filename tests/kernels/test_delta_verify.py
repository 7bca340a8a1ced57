"""Decode steps of the gated delta rule match the recurrence for any drafts, for kernel and reference."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, DecodeBatch
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens, GateWeights
from megatron_mamba_cache.recurrences.gated_delta.reference import delta_scan_ref, delta_verify_ref
from megatron_mamba_cache.recurrences.gated_delta.verify import VerifyTiling, delta_verify
from tests.kernels.delta_steps import DeltaShape, random_steps
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

Op = Callable[[DeltaTokens, GateWeights, Tensor, DecodeBatch], Tensor]
SHAPE = DeltaShape()
NUM_SLOTS = 8
OPS = {"reference": delta_verify_ref, "op": delta_verify}
BOTH_POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=OPS)
def op(request: pytest.FixtureRequest) -> Op:
    return OPS[request.param]


def seeds(number: int) -> range:
    return range(max(1, number // 5) if INTERPRETED else number)


def make_pool(num_slots: int, dtype: torch.dtype, device: str, filled: set[int]) -> Tensor:
    return poisoned_pool((num_slots, *SHAPE.state), dtype, device, tuple(filled))


def test_delta_verify_of_one_token_matches_the_recurrence(op: Op, device: str) -> None:
    torch.manual_seed(0)
    slots = [3, PAD_SLOT, 0, 6]
    step = random_steps(5, device, SHAPE)
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0, 3, 6})
    before = pool.clone()
    y = op(step.tokens, step.gates, pool, one_token_rows(slots, device))
    for row, slot in enumerate(slots):
        if slot == PAD_SLOT:
            assert (y[row] == 0).all()
            continue
        (output,), (_, state) = step[[row]].recurrence(before[slot])
        torch.testing.assert_close(pool[slot].double(), state, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(y[row].double(), output, rtol=2e-6, atol=2e-6)
    assert (y[4] == 0).all()
    assert_untouched(before, pool, {0, 3, 6})


def test_delta_verify_ignores_nan_in_padding(op: Op, device: str) -> None:
    step = random_steps(3, device, SHAPE)
    step.poison(slice(None))
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0, 1})
    before = pool.clone()
    y = op(step.tokens, step.gates, pool, one_token_rows([PAD_SLOT] * 3, device))
    assert same_bits(before, pool) and (y == 0).all()


@BOTH_POOLS
@pytest.mark.parametrize("seed", seeds(20))
def test_delta_verify_equals_single_token_steps_bit_for_bit(seed: int, dtype: torch.dtype, op: Op, device: str) -> None:
    torch.manual_seed(seed)
    specs = random_verify_specs(seed, num_slots := 60)
    step = random_steps(sum(spec.length for spec in specs), device, replace(SHAPE, key_heads=1 + seed % 2))
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            step.poison(tokens)
    pool = make_pool(num_slots, dtype, device, {spec.source for spec in specs if spec.columns})
    before = pool.clone()
    y = op(step.tokens, step.gates, pool, pack_verify(specs, device, num_spare=seed % 3))
    written: set[int] = set()
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            assert (y[tokens] == 0).all()
            continue
        alone = before[spec.source : spec.source + 1].clone()
        for j, token in enumerate(range(tokens.start, tokens.stop)):
            y_alone = op(step[[token]].tokens, step[[token]].gates, alone, one_token_rows([0], device))
            assert same_bits(y[token], y_alone[0])
            assert same_bits(pool[spec.columns[j]], alone[0])
        written.update(spec.columns[: spec.length])
    assert_untouched(before, pool, written)


@BOTH_POOLS
@pytest.mark.parametrize("seed", seeds(8))
def test_delta_verify_is_unaffected_by_drafts_rejected_in_earlier_steps(
    seed: int, dtype: torch.dtype, op: Op, device: str
) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    length = 12 if INTERPRETED else 40
    text = random_steps(length, device, SHAPE)
    columns = tuple(draw.sample(range(12), 9))
    pool = make_pool(12, dtype, device, {columns[0]})
    plain = pool[columns[0]][None].clone()
    position, accepted = 0, 1
    while position < length:
        num_drafts = min(draw.randint(0, 8), length - position - 1)
        kept = draw.randint(1, 1 + num_drafts)
        tokens = text[position : position + 1 + num_drafts]
        tokens.poison(slice(kept, None))  # rejected drafts, which must not be read later
        y = op(tokens.tokens, tokens.gates, pool, pack_verify([VerifySpec(1 + num_drafts, columns, accepted)], device))
        for j in range(kept):
            token = text[[position + j]]
            y_plain = op(token.tokens, token.gates, plain, one_token_rows([0], device))
            assert same_bits(y[j], y_plain[0])
        position, accepted = position + kept, kept
        assert same_bits(pool[columns[accepted - 1]], plain[0])


@pytest.mark.parametrize("num_drafts", range(0, 9, 4))
def test_delta_verify_matches_the_prefill_scan(num_drafts: int, op: Op, device: str) -> None:
    torch.manual_seed(num_drafts)
    length = 1 + num_drafts
    step = random_steps(2 * length, device, SHAPE)
    specs = [VerifySpec(length, tuple(range(9)), accepted=3), VerifySpec(length, tuple(range(10, 19)))]
    pool = make_pool(20, torch.float32, device, {2, 10})
    scanned = pool.clone()
    y = op(step.tokens, step.gates, pool, pack_verify(specs, device))
    prefill = [RowSpec(length, initial=spec.source, final=19 - row) for row, spec in enumerate(specs)]
    expected = delta_scan_ref(step.tokens, step.gates, scanned, pack_rows(prefill, 4, device))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for spec, row in zip(specs, prefill, strict=True):
        torch.testing.assert_close(pool[spec.columns[num_drafts]], scanned[row.final], rtol=1e-5, atol=1e-5)


def test_delta_verify_nan_stays_in_its_request(op: Op, device: str) -> None:
    torch.manual_seed(4)
    specs = [VerifySpec(3, (0, 1, 2)), VerifySpec(2, (3, 4)), VerifySpec(1, (5,))]
    step = random_steps(8, device, SHAPE)
    step.poison(slice(3))
    step.poison(slice(5, None))
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0, 3, 5})
    before = pool.clone()
    y = op(step.tokens, step.gates, pool, pack_verify(specs, device))
    assert y[3:5].isfinite().all() and pool[3:5].isfinite().all()
    assert y[:3].isnan().all() and (y[6:] == 0).all()
    assert_untouched(before, pool, set(range(6)))


def test_delta_verify_outputs_have_the_input_dtype(op: Op, device: str) -> None:
    torch.manual_seed(5)
    step = random_steps(3, device, SHAPE).cast(torch.bfloat16)
    widened = replace(step.tokens, **{name: getattr(step.tokens, name).float() for name in ("q", "k", "v", "a")})
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0})
    wide_pool, rows = pool.clone(), pack_verify([VerifySpec(3, (0, 1, 2))], device)
    y = op(step.tokens, step.gates, pool, rows)
    exact = op(widened, step.gates, wide_pool, rows)  # b is not widened, as its sigmoid is rounded to its dtype
    assert same_bits(y, exact.bfloat16()) and same_bits(pool, wide_pool)


@BOTH_POOLS
@pytest.mark.parametrize(
    ("shape", "width"),
    [
        (DeltaShape(1, 2, 128, 128), 32),
        (DeltaShape(2, 2, 64, 32), 64),
        (DeltaShape(2, 4, 7, 5), 4),
        (DeltaShape(3, 3, 1, 1), 64),
        (DeltaShape(1, 3, 16, 24), 16),
    ],
)
def test_delta_verify_kernel_matches_its_reference(
    shape: DeltaShape, width: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(shape.key_dim)
    specs = [VerifySpec(3, (3, 1, 6, 5), accepted=4), VerifySpec(2), VerifySpec(1, (4, 8, 9), accepted=2)]
    steps = random_steps(8, device, shape)
    pool = poisoned_pool((10, *shape.state), dtype, device, filled=(5, 8))
    expected_pool, rows = pool.clone(), pack_verify(specs, device)
    tiling = VerifyTiling(width, num_warps=4, max_registers=128)
    y = delta_verify(steps.tokens, steps.gates, pool, rows, tiling)
    expected = delta_verify_ref(steps.tokens, steps.gates, expected_pool, rows)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=1e-5 if dtype == torch.float32 else 2e-2)
    # If fp32 results differ in their last bits, they may round to different bf16 values.
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(pool, expected_pool, rtol=rtol, atol=1e-5, equal_nan=True)
    assert_untouched(expected_pool, pool, {1, 3, 4, 6})


def test_delta_verify_accepts_input_views_and_a_strided_state_pool(op: Op, device: str) -> None:
    torch.manual_seed(7)
    steps = random_steps(3, device, SHAPE)
    wide = torch.full((3, 200), float("nan"), device=device)
    starts = {"q": (0, 14), "k": (20, 14), "v": (50, 20), "b": (90, 4), "a": (100, 4)}
    views = {name: wide[:, start : start + width] for name, (start, width) in starts.items()}
    for name, view in views.items():
        view.copy_(getattr(steps.tokens, name).flatten(1))
    strided = DeltaTokens(
        views["q"].unflatten(1, (2, 7)), views["k"].unflatten(1, (2, 7)), views["v"].unflatten(1, (4, 5)),
        views["b"], views["a"],
    )  # fmt: skip
    layers = torch.randn(NUM_SLOTS, 2, *SHAPE.state, device=device)
    plain, other_layer = layers[:, 1].clone(), layers[:, 0].clone()
    rows = pack_verify([VerifySpec(3, (4, 2, 7), accepted=2)], device)
    y = op(strided, steps.gates, layers[:, 1], rows)
    assert same_bits(y, op(steps.tokens, steps.gates, plain, rows))
    assert same_bits(layers[:, 1], plain) and same_bits(layers[:, 0], other_layer)


def test_delta_verify_uses_the_reference_for_float64(device: str) -> None:
    steps = random_steps(2, device, SHAPE, dtype=torch.float64)
    pool = torch.randn(NUM_SLOTS, *SHAPE.state, dtype=torch.float64, device=device)
    expected_pool, rows = pool.clone(), pack_verify([VerifySpec(2, (1, 3))], device)
    y = delta_verify(steps.tokens, steps.gates, pool, rows)
    assert same_bits(y, delta_verify_ref(steps.tokens, steps.gates, expected_pool, rows))
    assert y.dtype == torch.float64 and same_bits(pool, expected_pool)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_delta_verify_of_padding_only_gives_zeros(num_tokens: int, device: str) -> None:
    steps = random_steps(num_tokens, device, SHAPE)
    pool = make_pool(2, torch.float32, device, set())
    rows = DecodeBatch(*(torch.zeros(size, dtype=torch.int32, device=device) for size in ((1,), (0, 1), (0,))), 1)
    y = delta_verify(steps.tokens, steps.gates, pool, rows)
    assert y.shape == steps.tokens.v.shape and (y == 0).all() and pool.isnan().all()


BAD_CALLS = {
    "heads": (lambda t, g, p, r: (replace(t, q=t.q[:, :0], k=t.k[:, :0]), g, p, r), "number of key heads must divide"),
    "b": (lambda t, g, p, r: (replace(t, b=t.b[:, :1]), g, p, r), "b must have"),
    "k": (lambda t, g, p, r: (replace(t, k=t.k[:, :, :1]), g, p, r), "k must have"),
    "dtypes": (lambda t, g, p, r: (replace(t, k=t.k.double()), g, p, r), "must have the same dtype"),
    "gates": (lambda t, g, p, r: (t, replace(g, A_log=g.A_log[:1]), p, r), "A_log must have"),
    "channels": (lambda t, g, p, r: (replace(t, v=t.v.mT.contiguous().mT), g, p, r), "v must be contiguous within"),
    "pool": (lambda t, g, p, r: (t, g, p[:, :, 1:], r), "the pool must have"),
    "transposed pool": (lambda t, g, p, r: (t, g, p.mT.contiguous().mT, r), "states in the pool must be contiguous"),
    "pool's device": (lambda t, g, p, r: (t, g, p.to("meta"), r), "the pool must have"),
    "accepted": (lambda t, g, p, r: (t, g, p, replace(r, accepted=r.accepted.long())), "accepted"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_delta_verify_refuses_mismatched_arguments(name: str) -> None:
    change, reason = BAD_CALLS[name]
    steps, pool = random_steps(3, "cpu", SHAPE), make_pool(4, torch.float32, "cpu", {0})
    with pytest.raises(ValueError, match=reason):
        delta_verify(*change(steps.tokens, steps.gates, pool, pack_verify([VerifySpec(3, (0, 1, 2))], "cpu")))
