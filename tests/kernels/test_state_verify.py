"""Properties of the state update over base tokens and drafts, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, DecodeBatch
from megatron_mamba_cache.recurrences.mamba2 import verify as state_verify_module
from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens, SSMWeights
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref, state_verify_ref
from megatron_mamba_cache.recurrences.mamba2.verify import VerifyTiling, state_verify
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
from tests.kernels.ssm_steps import SSMShape, random_steps

SHAPE = SSMShape(heads=4, head_dim=5, d_state=7, groups=2)
NUM_SLOTS = 8
Op = Callable[[SSMTokens, SSMWeights, Tensor, DecodeBatch], Tensor]
BOTH_POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=[state_verify, state_verify_ref])
def op(request: pytest.FixtureRequest, device: str) -> Iterator[Op]:
    """Return the op or its reference; check that the kernel was launched or not."""
    of_kernel = request.param is state_verify
    with launches_expected(state_verify_module, "_state_verify_kernel", of_kernel=of_kernel, device=device):
        yield request.param


def seeds(count: int) -> range:
    """Return random seeds, only a few of them for slow kernels."""
    return range(max(1, count // 10) if INTERPRETED else count)


def make_pool(num_slots: int, dtype: torch.dtype, device: str, filled: set[int]) -> Tensor:
    return poisoned_pool((num_slots, *SHAPE.state), dtype, device, sorted(filled))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slots", [[6], [5, PAD_SLOT, 0], [PAD_SLOT, 3, 7, 1]])
def test_state_verify_of_one_token_equals_one_step_of_the_recurrence(
    groups: int, slots: list[int], op: Op, device: str
) -> None:
    torch.manual_seed(groups)
    step = random_steps(len(slots), device, replace(SHAPE, groups=groups))
    written = set(slots) - {PAD_SLOT}
    pool = poisoned_pool((NUM_SLOTS, *SHAPE.state), torch.float32, device, filled=sorted(written))
    before = pool.clone()
    y = op(step.tokens, step.weights, pool, one_token_rows(slots, device))

    for row, slot in enumerate(slots):
        if slot == PAD_SLOT:
            assert (y[row] == 0).all()
            continue
        (output,), (_, state) = step[[row]].recurrence(before[slot])
        torch.testing.assert_close(pool[slot].double(), state, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y[row].double(), output, rtol=1e-5, atol=1e-5)
    assert_untouched(before, pool, written)


def test_state_verify_ignores_nan_in_padding(op: Op, device: str) -> None:
    step = random_steps(3, device, SHAPE)
    step.poison(slice(None))
    pool = poisoned_pool((NUM_SLOTS, *SHAPE.state), torch.float32, device, filled=(0, 1))
    before = pool.clone()
    y = op(step.tokens, step.weights, pool, one_token_rows([PAD_SLOT] * 3, device))
    assert same_bits(before, pool) and (y == 0).all()


def test_state_verify_casts_the_stored_state_to_bf16(op: Op, device: str) -> None:
    torch.manual_seed(3)
    step = random_steps(1, device, SHAPE)
    rows = one_token_rows([2], device)
    stored = poisoned_pool((NUM_SLOTS, *SHAPE.state), torch.bfloat16, device, filled=(2,))
    exact = stored.float()
    y_stored = op(step.tokens, step.weights, stored, rows)
    y_exact = op(step.tokens, step.weights, exact, rows)
    assert same_bits(stored[2], exact[2].bfloat16())
    torch.testing.assert_close(y_stored, y_exact, rtol=1e-5, atol=1e-5)  # the order of the sum may differ


@BOTH_POOLS
@pytest.mark.parametrize("seed", seeds(20))
def test_state_verify_equals_single_token_steps_bit_for_bit(seed: int, dtype: torch.dtype, op: Op, device: str) -> None:
    torch.manual_seed(seed)
    specs = random_verify_specs(seed, num_slots := 60)
    step = random_steps(sum(spec.length for spec in specs), device, replace(SHAPE, groups=1 + seed % 2))
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            step.poison(tokens)
    pool = make_pool(num_slots, dtype, device, {spec.source for spec in specs if spec.columns})
    before = pool.clone()
    y = op(step.tokens, step.weights, pool, pack_verify(specs, device, num_spare=seed % 3))

    written: set[int] = set()
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            assert (y[tokens] == 0).all()
            continue
        alone = before[spec.source : spec.source + 1].clone()
        for j, token in enumerate(range(tokens.start, tokens.stop)):
            y_alone = op(step[[token]].tokens, step[[token]].weights, alone, one_token_rows([0], device))
            assert same_bits(y[token], y_alone[0])
            assert same_bits(pool[spec.columns[j]], alone[0])
        written.update(spec.columns[: spec.length])
    assert_untouched(before, pool, written)


@BOTH_POOLS
@pytest.mark.parametrize("seed", seeds(8))
def test_state_verify_is_unaffected_by_drafts_rejected_in_earlier_steps(
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
        spec = VerifySpec(1 + num_drafts, columns, accepted)
        y = op(tokens.tokens, tokens.weights, pool, pack_verify([spec], device))
        for j in range(kept):
            token = text[[position + j]]
            y_plain = op(token.tokens, token.weights, plain, one_token_rows([0], device))
            assert same_bits(y[j], y_plain[0])
        position, accepted = position + kept, kept
        assert same_bits(pool[columns[accepted - 1]], plain[0])


@pytest.mark.parametrize("num_drafts", range(0, 9, 4 if INTERPRETED else 1))
def test_state_verify_matches_the_prefill_scan(num_drafts: int, op: Op, device: str) -> None:
    torch.manual_seed(num_drafts)
    length = 1 + num_drafts
    step = random_steps(2 * length, device, SHAPE)
    specs = [VerifySpec(length, tuple(range(9)), accepted=3), VerifySpec(length, tuple(range(10, 19)))]
    pool = make_pool(20, torch.float32, device, {2, 10})
    scanned = pool.clone()
    y = op(step.tokens, step.weights, pool, pack_verify(specs, device))
    prefill = [RowSpec(length, initial=spec.source, final=19 - row) for row, spec in enumerate(specs)]
    chunk = 4
    expected = ssd_scan_ref(step.tokens, step.weights, scanned, pack_rows(prefill, chunk, device), chunk)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    for spec, row in zip(specs, prefill, strict=True):
        torch.testing.assert_close(pool[spec.columns[num_drafts]], scanned[row.final], rtol=2e-5, atol=2e-5)


def test_state_verify_nan_stays_in_its_request_and_extra_tokens_become_zero(op: Op, device: str) -> None:
    torch.manual_seed(4)
    specs = [VerifySpec(3, (0, 1, 2)), VerifySpec(2, (3, 4)), VerifySpec(1, (5,))]
    step = random_steps(8, device, SHAPE)
    step.poison(slice(3))
    step.poison(slice(5, None))
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0, 3, 5})
    before = pool.clone()
    y = op(step.tokens, step.weights, pool, pack_verify(specs, device))
    assert y[3:5].isfinite().all() and pool[3:5].isfinite().all()
    assert y[:3].isnan().all() and (y[6:] == 0).all()
    assert_untouched(before, pool, set(range(6)))


def test_state_verify_outputs_have_the_input_dtype(op: Op, device: str) -> None:
    torch.manual_seed(5)
    step = random_steps(3, device, SHAPE)
    step = step.cast(torch.bfloat16)
    widened = step.cast(torch.float32)
    pool = make_pool(NUM_SLOTS, torch.float32, device, {0})
    wide_pool, rows = pool.clone(), pack_verify([VerifySpec(3, (0, 1, 2))], device)
    y = op(step.tokens, step.weights, pool, rows)
    exact = op(widened.tokens, widened.weights, wide_pool, rows)
    assert same_bits(y, exact.bfloat16()) and same_bits(pool, wide_pool)


@BOTH_POOLS
@pytest.mark.parametrize(
    ("shape", "width"),
    [
        (SSMShape(heads=2, head_dim=64, d_state=128, groups=1), 64),
        (SSMShape(heads=2, head_dim=64, d_state=128, groups=2), 32),
        (SSMShape(heads=4, head_dim=5, d_state=7, groups=2), 4),
        (SSMShape(heads=3, head_dim=1, d_state=1, groups=1), 64),
        (SSMShape(heads=1, head_dim=80, d_state=33, groups=1), 64),
    ],
)
def test_state_verify_kernel_matches_its_reference(
    shape: SSMShape, width: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(shape.d_state)
    specs = [VerifySpec(3, (3, 1, 6, 5), accepted=4), VerifySpec(2), VerifySpec(1, (4, 8, 9), accepted=2)]
    steps = random_steps(8, device, shape, dt_limit=(0.1, 1.5))
    pool = poisoned_pool((10, *shape.state), dtype, device, filled=(5, 8))
    expected_pool, rows = pool.clone(), pack_verify(specs, device)
    y = state_verify(steps.tokens, steps.weights, pool, rows, VerifyTiling(width, num_warps=4, max_registers=128))
    expected = state_verify_ref(steps.tokens, steps.weights, expected_pool, rows)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5 if dtype == torch.float32 else 2e-2)
    # If fp32 results differ in their last bits, they may round to different bf16 values.
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(pool, expected_pool, rtol=rtol, atol=1e-5, equal_nan=True)
    assert_untouched(expected_pool, pool, {1, 3, 4, 6})


def test_state_verify_keeps_the_precision_of_small_time_steps(op: Op, device: str) -> None:
    """The state contains only the input of the first token, dt * B * x."""
    steps = random_steps(1, device, SSMShape(heads=32, head_dim=1, d_state=1, groups=1))
    steps.tokens.x.fill_(1)
    steps.tokens.B.fill_(1)
    steps.tokens.dt.copy_(torch.linspace(-80, 30, 32, device=device))
    steps.weights.dt_bias.zero_()
    pool = torch.zeros(1, 32, 1, 1, device=device)
    op(steps.tokens, steps.weights, pool, one_token_rows([0], device))
    exact = torch.log1p(torch.exp(steps.tokens.dt[0].double()))
    torch.testing.assert_close(pool.flatten().double(), exact, rtol=1e-6, atol=0)


def test_state_verify_handles_infinite_and_nan_time_steps(op: Op, device: str) -> None:
    steps = random_steps(1, device, SSMShape(heads=3, head_dim=1, d_state=1, groups=1))
    steps.tokens.dt.copy_(torch.tensor([-float("inf"), float("nan"), 200.0], device=device))
    pool = torch.ones(1, 3, 1, 1, device=device)
    op(steps.tokens, steps.weights, pool, one_token_rows([0], device))
    assert pool[0, 0] == 1 and pool[0, 1].isnan() and pool[0, 2].isfinite()


def test_state_verify_accepts_input_views_and_a_strided_state_pool(op: Op, device: str) -> None:
    torch.manual_seed(7)
    steps, shape = random_steps(3, device, SHAPE), SHAPE
    wide = torch.full((3, 200), float("nan"), device=device)
    views = [wide[:, start : start + width] for start, width in ((0, 20), (50, 4), (70, 14), (100, 14))]
    for view, name in zip(views, ("x", "dt", "B", "C"), strict=True):
        view.copy_(getattr(steps.tokens, name).flatten(1))
    x, dt, B, C = views
    strided = SSMTokens(x.unflatten(1, (4, 5)), dt, B.unflatten(1, (2, 7)), C.unflatten(1, (2, 7)))
    layers = torch.randn(NUM_SLOTS, 2, *shape.state, device=device)
    plain = layers[:, 1].clone()
    other_layer = layers[:, 0].clone()
    rows = pack_verify([VerifySpec(3, (4, 2, 7), accepted=2)], device)
    y = op(strided, steps.weights, layers[:, 1], rows)
    assert same_bits(y, op(steps.tokens, steps.weights, plain, rows))
    assert same_bits(layers[:, 1], plain) and same_bits(layers[:, 0], other_layer)


def test_state_verify_uses_the_reference_for_float64(device: str) -> None:
    steps = random_steps(2, device, SHAPE, dtype=torch.float64)
    pool = torch.randn(NUM_SLOTS, *SHAPE.state, dtype=torch.float64, device=device)
    expected_pool, rows = pool.clone(), pack_verify([VerifySpec(2, (1, 3))], device)
    y = state_verify(steps.tokens, steps.weights, pool, rows)
    assert same_bits(y, state_verify_ref(steps.tokens, steps.weights, expected_pool, rows))
    assert y.dtype == torch.float64 and same_bits(pool, expected_pool)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_state_verify_of_padding_only_gives_zeros(num_tokens: int, device: str) -> None:
    steps = random_steps(num_tokens, device, SHAPE)
    pool = make_pool(2, torch.float32, device, set())
    rows = DecodeBatch(*(torch.zeros(size, dtype=torch.int32, device=device) for size in ((1,), (0, 1), (0,))), 1)
    y = state_verify(steps.tokens, steps.weights, pool, rows)
    assert y.shape == steps.tokens.x.shape and (y == 0).all() and pool.isnan().all()


BAD_CALLS = {
    "heads": (lambda t, w, p, r: (replace(t, B=t.B[:, :0], C=t.C[:, :0]), w, p, r), "number of groups must divide"),
    "dt": (lambda t, w, p, r: (replace(t, dt=t.dt[:, :1]), w, p, r), "dt must have"),
    "C": (lambda t, w, p, r: (replace(t, C=t.C[:, :, :1]), w, p, r), "C must have"),
    "D": (lambda t, w, p, r: (t, replace(w, D=w.D[:1]), p, r), "D must have"),
    "channels": (lambda t, w, p, r: (replace(t, x=t.x.mT.contiguous().mT), w, p, r), "x must be contiguous within"),
    "pool": (lambda t, w, p, r: (t, w, p[:, :, 1:], r), "ssm_pool"),
    "transposed pool": (lambda t, w, p, r: (t, w, p.mT.contiguous().mT, r), "states in ssm_pool must be contiguous"),
    "pool's device": (lambda t, w, p, r: (t, w, p.to("meta"), r), "ssm_pool"),
    "accepted": (lambda t, w, p, r: (t, w, p, replace(r, accepted=r.accepted.long())), "accepted"),
    "cu_tokens": (lambda t, w, p, r: (t, w, p, replace(r, cu_tokens=r.cu_tokens[1:])), "cu_tokens"),
    "max_len": (lambda t, w, p, r: (t, w, p, replace(r, max_len=4)), "max_len"),
    "columns": (lambda t, w, p, r: (t, w, p, replace(r, columns=r.columns.long())), "columns"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_state_verify_refuses_mismatched_arguments(name: str) -> None:
    change, reason = BAD_CALLS[name]
    steps, pool = random_steps(3, "cpu", SHAPE), make_pool(4, torch.float32, "cpu", {0})
    with pytest.raises(ValueError, match=reason):
        state_verify(*change(steps.tokens, steps.weights, pool, pack_verify([VerifySpec(3, (0, 1, 2))], "cpu")))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@BOTH_POOLS
@pytest.mark.parametrize("shape", [SHAPE, SSMShape(heads=8, head_dim=64, d_state=128, groups=2)])
def test_state_verify_in_a_replayed_graph_reads_new_inputs(shape: SSMShape, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    steps, pool = random_steps(20, "cuda", shape), torch.randn(40, *shape.state, device="cuda").to(dtype)
    lengths = ((3, 4, 1), (1, 1, 1), (5, 0, 9), (2, 6, 4))
    plans = [
        [
            VerifySpec(length, tuple(range(12 * row, 12 * row + 9)) if length else (), accepted=1 + number)
            for row, length in enumerate(plan)
        ]
        for number, plan in enumerate(lengths)
    ]
    packed = [replace(pack_verify(specs, "cuda", num_spare=0), max_len=9) for specs in plans]
    buffers = DecodeBatch(
        *(torch.full(size, PAD_SLOT, dtype=torch.int32, device="cuda") for size in ((4,), (3, 9), (3,))), 9
    )

    def fill(rows: DecodeBatch) -> None:
        buffers.cu_tokens.copy_(rows.cu_tokens)
        buffers.columns.fill_(PAD_SLOT)
        buffers.columns[:, : rows.columns.shape[1]] = rows.columns
        buffers.accepted.copy_(rows.accepted)

    fill(packed[0])
    state_verify(steps.tokens, steps.weights, pool, buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = state_verify(steps.tokens, steps.weights, pool, buffers)
    for rows in packed:
        fill(rows)
        expected_pool = pool.clone()
        expected = state_verify(steps.tokens, steps.weights, expected_pool, buffers)
        graph.replay()
        assert same_bits(y, expected) and same_bits(pool, expected_pool)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("slot_stride", "dtype"), [(2**31 + 16, torch.bfloat16), (2**30 + 16, torch.float32)])
def test_state_verify_handles_offsets_beyond_32_bits(slot_stride: int, dtype: torch.dtype) -> None:
    num_bytes = (3 * slot_stride + 2**20) * dtype.itemsize
    if num_bytes > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of free device memory")
    shape = SSMShape(heads=2, head_dim=64, d_state=128, groups=1)
    buffer = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="cuda")
    pool = buffer.as_strided((4, *shape.state), (slot_stride, 128 * 64, 64, 1)).normal_()
    near, steps = pool.contiguous(), random_steps(2, "cuda", shape)
    rows = pack_verify([VerifySpec(2, (2, 1, 3), accepted=3)], "cuda")
    y = state_verify(steps.tokens, steps.weights, pool, rows)
    assert same_bits(y, state_verify(steps.tokens, steps.weights, near, rows))
    assert same_bits(pool.contiguous(), near)
    del pool, buffer
    torch.cuda.empty_cache()
