"""Properties of replayed states of the gated delta rule, for the kernels and their torch reference.

If kernels are neither compiled nor interpreted, the op is its reference; `test_interpreted` runs this file again.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.recurrences.batches import DecodeBatch
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens
from megatron_mamba_cache.recurrences.gated_delta.replay import factors, outputs, outputs_sums
from megatron_mamba_cache.recurrences.gated_delta.replay.outputs import delta_replay
from megatron_mamba_cache.recurrences.gated_delta.replay.reference import delta_replay_ref
from megatron_mamba_cache.recurrences.gated_delta.replay.tiling import SUMS, ReplayTiling
from megatron_mamba_cache.recurrences.gated_delta.verify import delta_verify
from megatron_mamba_cache.recurrences.replay.boundary_folds import fold_boundaries
from megatron_mamba_cache.recurrences.replay.reference import fold_boundaries_ref
from megatron_mamba_cache.recurrences.replay.tiling import has_gluon
from tests.kernels.delta_steps import DeltaShape, DeltaSteps, random_steps
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits
from tests.kernels.replay_steps import Op, ReplayedRequests, Turn, copied, int32, layered, ring_tensors

SHAPE = DeltaShape()
BOTH_POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
HAS_GLUON = torch.cuda.is_available() and has_gluon(torch.device("cuda", torch.cuda.current_device()))
ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GLUON, reason="needs a Hopper GPU and a tested Gluon")]
on_hopper = pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_HOPPER)])
HOPPER_SHAPE = DeltaShape(2, 4, 32, 64)
MOST = 2 if INTERPRETED else 4  # requests
PERIODS = 2 if INTERPRETED else 5


@pytest.fixture(params=[delta_replay, delta_replay_ref])
def op(request: pytest.FixtureRequest, device: str) -> Iterator[Op]:
    """Return the op or its reference; check that the kernels were launched, or were not."""
    of_kernel = request.param is delta_replay
    with ExitStack() as stack:
        for module, kernel in ((factors, "_factors_kernel"), (outputs, "_delta_replay_kernel")):
            stack.enter_context(launches_expected(module, kernel, of_kernel=of_kernel, device=device))
        yield request.param


@pytest.fixture
def hopper_op(device: str) -> Iterator[Op]:
    """Return the op; check that the Gluon kernel was launched."""
    with launches_expected(outputs_sums, "_delta_sums_kernel", of_kernel=True, device=device):
        yield delta_replay


def replayed(
    texts: Sequence[DeltaSteps],
    ring_len: int,
    max_tokens: int,
    *,
    shape: DeltaShape = SHAPE,
    dtype: torch.dtype = torch.float32,
    spare: tuple[int, int] = (0, 0),
    starts: Sequence[int] | None = None,
) -> ReplayedRequests:
    return ReplayedRequests(texts, shape.of_ring, ring_len, max_tokens, dtype=dtype, spare=spare, starts=starts)


def texts(
    number: int, length: int, device: str, shape: DeltaShape = SHAPE, dtype: torch.dtype = torch.float32
) -> list[DeltaSteps]:
    """Return token sequences of one layer; each has 9 more tokens for drafts."""
    every = random_steps(number * (length + 9), device, shape, dtype=dtype)
    return [every[i * (length + 9) : (i + 1) * (length + 9)] for i in range(number)]


@pytest.mark.parametrize(("num_drafts", "ring_len"), [(0, 4), (0, 16), (3, 8), (8, 4), (5, 16), (7, 32)])
def test_replayed_outputs_and_stored_states_match_the_recurrence(
    num_drafts: int, ring_len: int, op: Op, device: str
) -> None:
    torch.manual_seed(num_drafts)
    length = (PERIODS if ring_len < 32 else PERIODS // 2) * ring_len + 3
    requests = replayed(texts(MOST, length, device), ring_len, 1 + num_drafts)
    requests.decode(op, random.Random(num_drafts), length, num_drafts)
    requests.assert_match_the_recurrence(rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 6))
def test_float64_delta_replay_matches_the_recurrence_over_long_texts(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    length, ring_len, num_drafts = 150, draw.choice([4, 8, 16, 32]), draw.randint(0, 8)
    requests = replayed(texts(2, length, "cpu", dtype=torch.float64), ring_len, 1 + num_drafts, dtype=torch.float64)
    requests.decode(delta_replay, draw, length, num_drafts)
    requests.assert_match_the_recurrence(rtol=1e-12, atol=1e-12)


@settings(max_examples=4 if INTERPRETED else 20)
@given(st.data())
@BOTH_POOLS
@pytest.mark.parametrize(
    ("shape", "inputs"),
    [
        pytest.param(SHAPE, torch.float32, id="odd"),
        pytest.param(DeltaShape(2, 6, 16, 16), torch.bfloat16, id="whole"),
        pytest.param(HOPPER_SHAPE, torch.bfloat16, marks=ON_HOPPER, id="hopper"),
    ],
)
def test_outputs_rings_and_stored_states_depend_only_on_the_tokens(
    shape: DeltaShape, inputs: torch.dtype, dtype: torch.dtype, data: st.DataObject
) -> None:
    """For any drafts, accepted drafts, batch and ring capacity, the bits are those of one-token steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(data.draw(st.integers(0, 3)))
    ring_len = data.draw(st.sampled_from([4, 8] if INTERPRETED else [4, 8, 16, 32]))
    num_drafts = data.draw(st.integers(0, 8))
    length = ring_len * data.draw(st.integers(1, MOST // 2)) + data.draw(st.integers(1, ring_len))
    number, start = data.draw(st.integers(1, min(3, MOST))), data.draw(st.integers(0, ring_len))
    requests = replayed(
        [text.cast(inputs) for text in texts(number, length, device, shape)],
        ring_len,
        1 + num_drafts,
        shape=shape,
        dtype=dtype,
        spare=data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        starts=[start] * number,
    )
    requests.decode(delta_replay, data.draw(st.randoms(use_true_random=False)), length, num_drafts)
    one_by_one = replayed(
        [r.text for r in requests.requests], ring_len, 1, shape=shape, dtype=dtype, starts=[start] * number
    )
    one_by_one.pool.copy_(requests.pool)
    for request in one_by_one.requests:
        one_by_one.pool[request.slot] = requests.initial[request.slot]
    for alone, request in zip(one_by_one.requests, requests.requests, strict=True):
        while alone.computed < length:
            one_by_one.step(delta_replay, [Turn(alone)])
        assert same_bits(torch.cat(alone.outputs), torch.cat(request.outputs))
    targets = range(0, 2 * number, 2)
    for decoded in (one_by_one, requests):
        folds = decoded.folds(targets)
        fold_boundaries(*layered(decoded.pool, decoded.ring), folds, ring_len)
    for request in requests.requests:
        assert same_bits(one_by_one.pool[request.slot - 1], requests.pool[request.slot - 1])


@BOTH_POOLS
def test_boundary_state_equals_the_state_that_later_steps_store(dtype: torch.dtype, op: Op, device: str) -> None:
    fold = fold_boundaries if op is delta_replay else fold_boundaries_ref
    check_boundary_folds(op, fold, DeltaShape(2, 4, 16, 16), torch.float32, dtype, device)


@on_hopper
@BOTH_POOLS
def test_boundary_state_equals_the_state_that_later_steps_store_on_hopper(
    dtype: torch.dtype, hopper_op: Op, device: str
) -> None:
    check_boundary_folds(hopper_op, fold_boundaries, HOPPER_SHAPE, torch.bfloat16, dtype, device)


def check_boundary_folds(
    op: Op, fold: Callable[..., None], shape: DeltaShape, inputs: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    """Compare the bases that steps fold, before or between their tokens, with those of a boundary fold."""
    torch.manual_seed(3)
    ring_len, most = 8, 4
    every = [text.cast(inputs) for text in texts(2, 40, device, shape)]
    requests = replayed(every, ring_len, most, shape=shape, dtype=dtype, starts=[3, 8])
    requests.decode(op, random.Random(4), 21, most - 1)
    assert all(request.computed == 21 and request.folded == 16 for request in requests.requests)
    before = replayed([r.text for r in requests.requests], ring_len, most, shape=shape, dtype=dtype, starts=[3, 8])
    for request in before.requests:
        before.pool[request.slot] = requests.initial[request.slot]
    while open_requests := [request for request in before.requests if request.computed < 14]:
        before.step(op, [Turn(request) for request in open_requests])
    before.step(op, [Turn(request, 3, 3) for request in before.requests])  # 14 to 17, past the boundary at 16
    targets = [0, 2]
    pools, rings = layered(before.pool, before.ring)
    fold(pools, rings, before.folds(targets, [16, 16]), ring_len)
    for target, request in zip(targets, requests.requests, strict=True):
        assert same_bits(before.pool[target], requests.pool[request.slot])


def test_delta_replay_can_start_at_any_position(op: Op, device: str) -> None:
    """After prefill, the base is not at a multiple of the ring length, and the ring is empty."""
    torch.manual_seed(2)
    requests = replayed(texts(2, 30, device), 8, 3, starts=[5, 11])
    requests.decode(op, random.Random(2), 29, 2)
    requests.assert_match_the_recurrence(rtol=1e-5, atol=1e-5)


def test_nan_token_in_delta_replay_affects_only_later_tokens_of_its_request(op: Op, device: str) -> None:
    check_nan(op, SHAPE, torch.float32, device)


@on_hopper
def test_nan_token_in_delta_replay_affects_only_later_tokens_of_its_request_on_hopper(
    hopper_op: Op, device: str
) -> None:
    check_nan(hopper_op, HOPPER_SHAPE, torch.bfloat16, device)


def check_nan(op: Op, shape: DeltaShape, inputs: torch.dtype, device: str) -> None:
    """Set a kept token of one of two requests to NaN."""
    torch.manual_seed(3)
    requests = replayed([text.cast(inputs) for text in texts(2, 9, device, shape)], 8, 4, shape=shape)
    bad, good = requests.requests
    bad.text.poison(slice(2, 3))
    requests.step(op, [Turn(bad, 3, 4), Turn(good, 3, 4)])
    found = torch.cat(bad.outputs)
    assert found[:2].isfinite().all() and found[2:].isnan().all() and good.outputs[0].isfinite().all()


@BOTH_POOLS
@pytest.mark.parametrize("num_drafts", [0, 8])
def test_stored_states_are_cast_once_per_ring_length_even_within_a_step(
    num_drafts: int, dtype: torch.dtype, op: Op, device: str
) -> None:
    torch.manual_seed(4)
    requests = replayed(texts(1, 9, device), 4, 9, dtype=dtype)
    (request,) = requests.requests
    for _ in range(8 // (1 + num_drafts) or 1):
        requests.step(op, [Turn(request, num_drafts, min(8, 1 + num_drafts))])
    requests.step(op, [Turn(request)])
    state, found = requests.initial[request.slot], []
    for begin in (0, 4, 8):
        expected, (*_, state) = request.text[begin : begin + (4 if begin < 8 else 1)].recurrence(state.float())
        found.append(expected)
        state = state.to(dtype) if begin < 8 else state
        base = state if begin < 8 else base  # noqa: F821 (set in the first rounds)
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    assert request.folded == 8
    torch.testing.assert_close(requests.pool[request.slot], base, rtol=rtol, atol=1e-5)
    # Rounding may go either way where results differ in their last bits: a state's element by 2^-8, an output by less.
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(torch.cat(request.outputs).double(), torch.cat(found), rtol=loose, atol=loose)


@BOTH_POOLS
@pytest.mark.parametrize(
    ("shape", "width"),
    [
        (DeltaShape(1, 2, 128, 128), 32),
        (DeltaShape(2, 2, 64, 32), 64),
        (DeltaShape(2, 6, 7, 5), 4),
        (DeltaShape(3, 3, 1, 1), 64),
        (DeltaShape(1, 3, 16, 24), 16),
    ],
)
def test_delta_replay_kernel_matches_its_reference(
    shape: DeltaShape, width: int, dtype: torch.dtype, device: str
) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the kernels run on a GPU or in the interpreter")
    compare_with_reference(shape, ReplayTiling(width, num_warps=4, max_registers=128), torch.float32, dtype, device)


@on_hopper
@BOTH_POOLS
@pytest.mark.parametrize("ring_len", [4, 8, 16, 32])
@pytest.mark.parametrize("shape", [DeltaShape(1, 2, 128, 128), HOPPER_SHAPE, DeltaShape(2, 6, 16, 96)])
def test_hopper_delta_replay_kernel_matches_its_reference(
    shape: DeltaShape, ring_len: int, dtype: torch.dtype, hopper_op: Op, device: str
) -> None:
    assert hopper_op is delta_replay
    compare_with_reference(shape, SUMS, torch.bfloat16, dtype, device, ring_len)


def compare_with_reference(
    shape: DeltaShape,
    tiling: ReplayTiling,
    inputs: torch.dtype,
    dtype: torch.dtype,
    device: str,
    ring_len: int = 8,
) -> None:
    """Compare a step of the kernel with one of the reference, from the same states and rings."""
    torch.manual_seed(shape.key_dim)
    most = 9
    mine = replayed(
        [text.cast(inputs) for text in texts(3, 30, device, shape)], ring_len, most, shape=shape, dtype=dtype
    )
    mine.decode(delta_replay_ref, random.Random(1), 13, 8)
    its_pool, its_ring = mine.pool.clone(), copied(mine.ring)
    turns = [Turn(request, i % most, 1 + i % most) for i, request in enumerate(mine.requests, start=5)]
    rows = mine.rows(turns)
    step = turns[0].request.text[:0].joined_with([t.request.text[t.request.computed :][: t.kept] for t in turns], [])
    y = delta_replay(step.tokens, step.gates, mine.pool, mine.ring, rows, ring_len, tiling)
    expected = delta_replay_ref(step.tokens, step.gates, its_pool, its_ring, rows, ring_len)
    exact = dtype == torch.float32
    loose = 2e-2 if inputs == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, expected, rtol=max(2e-5, loose), atol=loose if exact else 2e-2)
    # Rounding to bf16 may go either way where fp32 results differ in their last bits.
    rtol = 1e-5 if exact else 2**-7
    torch.testing.assert_close(mine.pool, its_pool, rtol=rtol, atol=1e-5, equal_nan=True)
    for found, held in zip(ring_tensors(mine.ring), ring_tensors(its_ring), strict=True):
        torch.testing.assert_close(found, held, rtol=1e-5, atol=1e-5 if exact else 2e-2, equal_nan=True)


def test_delta_replay_of_padding_only_gives_zeros(device: str) -> None:
    steps = random_steps(3, device, SHAPE)
    requests = replayed([steps], 4, 1)
    y = delta_replay(steps.tokens, steps.gates, requests.pool, requests.ring, requests.rows([]), 4)
    assert y.shape == steps.tokens.v.shape and (y == 0).all()


def test_delta_replay_accepts_input_views_and_strided_pools(op: Op, device: str) -> None:
    torch.manual_seed(7)
    (text,) = texts(1, 12, device)
    plain, strided = (replayed([text], 4, 3) for _ in range(2))
    pools = torch.full((3, 2, *SHAPE.state), float("nan"), device=device)
    pools[1, 1] = plain.initial[1]
    for requests in (plain, strided):
        requests.pool[1] = plain.initial[1]
    strided.pool = pools[:, 1]

    def from_views(tokens: DeltaTokens, *others: object) -> Tensor:
        wide = torch.full((tokens.v.shape[0], 200), float("nan"), device=device)
        starts = {"q": (0, 14), "k": (20, 14), "v": (50, 20), "b": (90, 4), "a": (100, 4)}
        views = {name: wide[:, start : start + width] for name, (start, width) in starts.items()}
        for name, view in views.items():
            view.copy_(getattr(tokens, name).flatten(1))
        packed = DeltaTokens(
            views["q"].unflatten(1, (2, 7)), views["k"].unflatten(1, (2, 7)), views["v"].unflatten(1, (4, 5)),
            views["b"], views["a"],
        )  # fmt: skip
        return op(packed, *others)

    for _ in range(4):
        y = plain.step(op, [Turn(plain.requests[0], 2, 3)])
        assert same_bits(strided.step(from_views, [Turn(strided.requests[0], 2, 3)]), y)
    assert same_bits(pools[:, 1], plain.pool) and pools[:, 0].isnan().all()


BAD_CALLS: dict[str, tuple[Callable[..., tuple], str]] = {
    "k": (lambda t, p, r, w, n: (replace(t, k=t.k[:, :, :1]), p, r, w, n), "k must have"),
    "pool": (lambda t, p, r, w, n: (t, p[:, :, 1:], r, w, n), "the pool must have"),
    "ring_len": (lambda t, p, r, w, n: (t, p, r, w, 6), "power of two"),
    "short ring": (lambda t, p, r, w, n: (t, p, r, w, 8), "must be at least 13 and"),
    "x of the ring": (lambda t, p, r, w, n: (t, p, replace(r, x=r.x.bfloat16()), w, n), "x of the ring must be"),
    "dtype of B": (lambda t, p, r, w, n: (t, p, replace(r, B=r.B.half()), w, n), "B of the ring must be"),
    "slots": (lambda t, p, r, w, n: (t, p, r, replace(w, slots=w.slots.long()), n), "slots must be int32"),
    "max_tokens": (lambda t, p, r, w, n: (t, p, r, replace(w, max_tokens=0), n), "max_tokens"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_delta_replay_refuses_mismatched_arguments(name: str) -> None:
    change, reason = BAD_CALLS[name]
    requests = replayed(texts(1, 3, "cpu"), 4, 3)
    step = requests.requests[0].text[:3]
    rows = requests.rows([Turn(requests.requests[0], 2)])
    tokens, *others = change(step.tokens, requests.pool, requests.ring, rows, 4)
    with pytest.raises(ValueError, match=reason):
        delta_replay(tokens, step.gates, *others)


@pytest.mark.long
def test_replay_error_over_4096_tokens_is_at_most_that_of_delta_verify(device: str) -> None:
    """Errors are relative to the fp64 recurrence. Replay rounds bf16 states once per ring, not once per token."""
    torch.manual_seed(9)
    shape, length = DeltaShape(1, 2, 16, 8), 4096
    (text,) = texts(1, length, device, shape)
    expected, states = text[:length].recurrence(torch.zeros(shape.state, device=device))
    folds = range(16, length, 16)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        requests = replayed([text], 16, 8, shape=shape, dtype=dtype)
        (request,) = requests.requests
        requests.pool[request.slot] = 0
        window = requests.pool[1:2].clone()
        rows = DecodeBatch(int32([0, 8], device), int32([0] * 8, device)[None], int32([1], device), 8)
        found, windowed, of_window = {}, {}, []
        for first in range(0, length, 8):
            requests.step(delta_replay, [Turn(request, 7, 8)])
            found[request.folded] = requests.pool[request.slot].clone()
            of_window.append(delta_verify(text[first : first + 8].tokens, text.gates, window, rows))
            windowed[first + 8] = window[0].clone()
        each = (torch.cat(request.outputs), torch.cat(of_window))
        errors[dtype] = [
            tuple(relative(y.double(), expected) for y in each),
            tuple(fmean(relative(of[end].double(), states[end]) for end in folds) for of in (found, windowed)),
        ]
    print("errors of outputs and of states, replayed and in the window form:", errors)
    for replayed_error, windowed_error in errors[torch.float32]:
        assert replayed_error <= 1.05 * windowed_error < 1e-6
    for replayed_error, windowed_error in errors[torch.bfloat16]:
        assert replayed_error < 0.7 * windowed_error < 0.02


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
