"""The references for the gated delta rule match transformers, and resumed results are bitwise equal."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.gated_delta.reference import delta_scan_ref
from tests.kernels.delta_steps import DeltaShape, DeltaSteps, random_steps
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

CHUNK = 8
SHAPE = DeltaShape()
SPECS = scan_specs(CHUNK)
NUM_SLOTS = 13


def make_pool(dtype: torch.dtype, device: str, filled: tuple[int, ...] = ()) -> Tensor:
    return poisoned_pool((NUM_SLOTS, *SHAPE.state), dtype, device, filled)


def transformers_rule(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a torch function of transformers, even if a kernel from the hub would replace it."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    return getattr(getattr(modeling, name), "__wrapped__", getattr(modeling, name))


@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, DeltaShape(3, 3, 8, 24), DeltaShape(1, 4, 16, 8)])
def test_delta_rule_reference_matches_transformers(name: str, dtype: torch.dtype, shape: DeltaShape) -> None:
    torch.manual_seed(0)
    rule, steps = transformers_rule(name), random_steps(70, "cpu", shape, dtype=dtype)
    initial = torch.randn(1, *shape.state)
    t, gates = steps.tokens, steps.gates
    # Older transformers releases need equally many heads in q, k and v.
    q, k = (x.repeat_interleave(shape.value_heads // shape.key_heads, dim=1) for x in (t.q, t.k))
    g = -gates.A_log.float().exp() * F.softplus(t.a.float() + gates.dt_bias)
    expected, state = rule(
        q[None], k[None], t.v[None], g=g[None], beta=t.b.sigmoid()[None], initial_state=initial,
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    pool = torch.cat([initial, torch.zeros_like(initial)])
    y = delta_scan_ref(t, gates, pool, pack_rows([RowSpec(70, initial=0, final=1)], 64, "cpu"))
    assert y.dtype == dtype
    torch.testing.assert_close(pool[1], state[0], rtol=2e-5, atol=2e-5)
    tolerance = 2e-5 if dtype == torch.float32 else 2**-8  # both are rounded to bf16
    torch.testing.assert_close(y, expected[0], rtol=tolerance, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("order", [1, -1])
def test_delta_scan_reference_matches_the_recurrence(
    dtype: torch.dtype, tolerance: float, order: int, device: str
) -> None:
    torch.manual_seed(order)
    specs = SPECS[::order]
    steps = random_steps(sum(spec.length for spec in specs) + 3, device, SHAPE, dtype=dtype)
    pool = make_pool(dtype, device, filled=(1, 11))
    before = pool.clone()
    y = delta_scan_ref(steps.tokens, steps.gates, pool, pack_rows(specs, CHUNK, device, num_padding=2))
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        initial = before[spec.initial] if spec.initial != PAD_SLOT else torch.zeros_like(before[0])
        expected, states = steps[tokens].recurrence(initial)
        assert spec.length == 0 or largest_error(y[tokens], expected) <= tolerance
        for position, slot in [(spec.start + spec.length, spec.final), *spec.boundaries.items()]:
            if slot != PAD_SLOT:
                assert largest_error(pool[slot], states[position - spec.start]) <= tolerance
    assert (y[-3:] == 0).all()
    assert_untouched(before, pool, written_slots(specs))


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.long
def test_delta_scan_reference_stays_accurate_over_4096_tokens() -> None:
    torch.manual_seed(1)
    shape = DeltaShape(1, 2, 128, 128)
    steps, pool = random_steps(4096, "cpu", shape), torch.zeros(1, *shape.state)
    y = delta_scan_ref(steps.tokens, steps.gates, pool, pack_rows([RowSpec(4096, final=0)], 64, "cpu"))
    expected, states = steps.recurrence(torch.zeros(shape.state))
    assert largest_error(y, expected) <= 2e-6 and largest_error(pool[0], states[-1]) <= 2e-6


@pytest.mark.parametrize("neighbours", [([], []), ([3, CHUNK], []), ([1], [2 * CHUNK + 5, 0, 1])])
def test_delta_scan_reference_resumed_after_any_token_is_bit_equal(
    neighbours: tuple[list[int], list[int]], device: str
) -> None:
    torch.manual_seed(2)
    length = 2 * CHUNK + 3
    steps = random_steps(length, device, SHAPE)
    slots = {position: position // CHUNK for position in range(CHUNK, length, CHUNK)}
    whole = make_pool(torch.float32, device)
    rows = pack_rows([RowSpec(length, final=0, boundaries=slots)], CHUNK, device)
    expected = delta_scan_ref(steps.tokens, steps.gates, whole, rows)
    before, after = ([RowSpec(n) for n in lengths] for lengths in neighbours)
    for cut in range(1, length):
        pool = make_pool(torch.float32, device)
        head = pack_rows([RowSpec(cut, final=12)], CHUNK, device)
        delta_scan_ref(steps[:cut].tokens, steps.gates, pool, head)
        later = {position: slot for position, slot in slots.items() if position > cut}
        specs = [*before, RowSpec(length - cut, cut, 12, 0, later), *after]
        others = [[random_steps(spec.length, device, SHAPE) for spec in side] for side in (before, after)]
        for other in (steps for side in others for steps in side):
            other.poison(slice(None))
        packed = steps[cut:].joined_with(*others)
        y = delta_scan_ref(packed.tokens, packed.gates, pool, pack_rows(specs, CHUNK, device, num_padding=1))
        assert same_bits(y[row_slices(specs)[len(before)]], expected[cut:])
        assert all(same_bits(pool[slot], whole[slot]) for slot in [0, *later.values()])


def test_delta_rule_reference_rounds_gates_to_bf16_like_the_model() -> None:
    torch.manual_seed(3)
    steps = random_steps(1, "cpu", DeltaShape(1, 1, 1, 1), dtype=torch.bfloat16)
    for strength in torch.linspace(-6, 6, 50):
        tokens = replace(steps.tokens, b=torch.full_like(steps.tokens.b, float(strength)))
        pool = torch.zeros(1, 1, 1, 1)
        delta_scan_ref(tokens, steps.gates, pool, pack_rows([RowSpec(1, final=0)], 8, "cpu"))
        k, v = tokens.k.float(), tokens.v.float()
        assert pool == k * torch.rsqrt(k * k + 1e-6) * (v * tokens.b.sigmoid().float())


def test_delta_rule_reference_returns_float64_for_float64_tokens() -> None:
    steps: DeltaSteps = random_steps(3, "cpu", dtype=torch.float64)
    pool = torch.zeros(1, *SHAPE.state, dtype=torch.float64)
    y = delta_scan_ref(steps.tokens, steps.gates, pool, pack_rows([RowSpec(3, final=0)], 8, "cpu"))
    assert y.dtype == torch.float64
