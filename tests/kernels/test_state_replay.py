"""Properties of replayed states, for kernels and references.

Without a GPU or the interpreter, the ops are their references; `test_interpreted` runs this file again.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, has_tested_gluon, is_hopper
from megatron_mamba_cache.recurrences.batches import DecodeBatch, ReplayBatch
from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens
from megatron_mamba_cache.recurrences.mamba2.reference import state_verify_ref
from megatron_mamba_cache.recurrences.mamba2.replay import coefficients, outputs
from megatron_mamba_cache.recurrences.mamba2.replay.outputs import replay_tiled, state_replay
from megatron_mamba_cache.recurrences.mamba2.replay.reference import state_replay_ref
from megatron_mamba_cache.recurrences.mamba2.replay.tiling import ReplayTiling
from megatron_mamba_cache.recurrences.mamba2.verify import state_verify
from megatron_mamba_cache.recurrences.replay.boundary_folds import fold_boundaries, fold_portably
from megatron_mamba_cache.recurrences.replay.ring import ReplayRing
from megatron_mamba_cache.recurrences.replay.tiling import hopper_width
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import one_token_rows, same_bits
from tests.kernels.replay_steps import Op, ReplayedRequests, Turn, copied, int32, layered, poisoned_ring, ring_tensors
from tests.kernels.ssm_steps import SSMShape, SSMSteps, random_steps

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WHOLE_TILE = SSMShape(heads=2, head_dim=64, d_state=64, groups=1)
SHAPE = SSMShape(heads=4, head_dim=5, d_state=7, groups=2)
BOTH_POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
MOST = 2 if INTERPRETED else 4  # maximum number of requests
PERIODS = 2 if INTERPRETED else 5


@pytest.fixture(params=[state_replay, state_replay_ref])
def op(request: pytest.FixtureRequest, device: str) -> Iterator[Op]:
    """Return the op or its reference; check that the kernels were launched or not."""
    of_kernel = request.param is state_replay
    with ExitStack() as stack:
        for module, kernel in (
            (coefficients, "_coefficients_kernel"),
            (outputs, "_state_replay_kernel"),
        ):
            stack.enter_context(launches_expected(module, kernel, of_kernel=of_kernel, device=device))
        yield request.param


def texts(
    number: int, length: int, device: str, shape: SSMShape = SHAPE, dtype: torch.dtype = torch.float32
) -> list[SSMSteps]:
    """Return the inputs of random texts, each followed by further tokens for drafts."""
    every = random_steps(number * (length + 9), device, shape, dtype=dtype)
    return [every[i * (length + 9) : (i + 1) * (length + 9)] for i in range(number)]


def checkpoint_by_tokens(requests: ReplayedRequests, number: int) -> Tensor:
    """Compute a request's state at its last fold with single-token steps of the reference."""
    request = requests.requests[number]
    alone = ReplayedRequests([request.text], SHAPE, requests.ring_len, 1, dtype=requests.pool.dtype)
    alone.pool[1] = requests.initial[request.slot]
    while alone.requests[0].folded < request.folded:
        alone.step(state_replay_ref, [Turn(alone.requests[0])])
    return alone.pool[1]


@pytest.mark.parametrize(("num_drafts", "ring_len"), [(0, 4), (0, 16), (3, 8), (8, 4), (5, 16), (7, 32)])
def test_replayed_outputs_and_stored_states_match_the_recurrence(
    num_drafts: int, ring_len: int, op: Op, device: str
) -> None:
    torch.manual_seed(num_drafts)
    draw = random.Random(num_drafts)
    length = (PERIODS if ring_len < 32 else PERIODS // 2) * ring_len + 3
    requests = ReplayedRequests(texts(MOST, length, device), SHAPE, ring_len, 1 + num_drafts)
    requests.decode(op, draw, length, num_drafts)
    requests.assert_match_the_recurrence(rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 6))
def test_float64_state_replay_matches_the_recurrence_over_long_texts(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    length, ring_len, num_drafts = 150, draw.choice([4, 8, 16, 32]), draw.randint(0, 8)
    requests = ReplayedRequests(
        texts(2, length, "cpu", dtype=torch.float64), SHAPE, ring_len, 1 + num_drafts, dtype=torch.float64
    )
    requests.decode(state_replay, draw, length, num_drafts)
    requests.assert_match_the_recurrence(rtol=1e-12, atol=1e-12)


@settings(max_examples=3 if INTERPRETED else 15)
@given(st.data())
@BOTH_POOLS
@pytest.mark.parametrize(
    ("shape", "inputs"),
    [(SHAPE, torch.float32), pytest.param(WHOLE_TILE, torch.bfloat16, marks=[pytest.mark.gpu, needs_cuda])],
)
def test_stored_replay_states_depend_only_on_the_tokens(
    shape: SSMShape, inputs: torch.dtype, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Stored states equal those of single-token steps bitwise, for any drafts, accepted tokens, batch and capacity."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(data.draw(st.integers(0, 3)))
    ring_len = data.draw(st.sampled_from([4, 8] if INTERPRETED else [4, 8, 16, 32]))
    num_drafts = data.draw(st.integers(0, 8))
    length = ring_len * data.draw(st.integers(1, MOST // 2)) + data.draw(st.integers(1, ring_len))
    spare = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    requests = ReplayedRequests(
        [text.cast(inputs) for text in texts(data.draw(st.integers(1, min(3, MOST))), length, device, shape)],
        shape,
        ring_len,
        1 + num_drafts,
        dtype=dtype,
        spare=spare,
    )
    requests.decode(state_replay, data.draw(st.randoms(use_true_random=False)), length, num_drafts)
    one_by_one = ReplayedRequests([r.text for r in requests.requests], shape, ring_len, 1, dtype=dtype)
    one_by_one.pool.copy_(requests.pool)
    for request in one_by_one.requests:
        one_by_one.pool[request.slot] = requests.initial[request.slot]
    for number, request in enumerate(one_by_one.requests):
        while request.folded < requests.requests[number].folded:
            one_by_one.step(state_replay, [Turn(request)])
        assert same_bits(one_by_one.pool[request.slot], requests.pool[request.slot])


def test_float32_replay_equals_state_verify_bit_for_bit(op: Op, device: str) -> None:
    torch.manual_seed(1)
    ring_len, length = 8, 17
    requests = ReplayedRequests(texts(2, length, device), SHAPE, ring_len, 4)
    requests.decode(op, random.Random(1), length, 3)
    verify = state_verify if op is state_replay else state_verify_ref
    for request in requests.requests:
        pool, text = requests.initial[request.slot][None].clone(), request.text
        for position in range(request.folded):
            verify(text[[position]].tokens, text.weights, pool, one_token_rows([0], device))
        assert request.folded > 0 and same_bits(pool[0], requests.pool[request.slot])


def test_state_replay_can_start_at_any_position(op: Op, device: str) -> None:
    """After prefill, the stored state may be at any position, and the ring is empty."""
    torch.manual_seed(2)
    requests = ReplayedRequests(texts(2, 30, device), SHAPE, 8, 3, starts=[5, 11])
    requests.decode(op, random.Random(2), 29, 2)
    requests.assert_match_the_recurrence(rtol=1e-5, atol=2e-5)


def test_nan_token_in_state_replay_affects_only_later_tokens_of_its_request(op: Op, device: str) -> None:
    torch.manual_seed(3)
    requests = ReplayedRequests(texts(2, 9, device), SHAPE, 8, 4)
    bad, good = requests.requests
    bad.text.poison(slice(2, 3))
    requests.step(op, [Turn(bad, 3, 4), Turn(good, 3, 4)])
    outputs = torch.cat(bad.outputs)
    assert outputs[:2].isfinite().all() and outputs[2:].isnan().all() and good.outputs[0].isfinite().all()


@BOTH_POOLS
def test_stored_replay_states_are_cast_once_per_ring_length(dtype: torch.dtype, op: Op, device: str) -> None:
    torch.manual_seed(4)
    requests = ReplayedRequests(texts(1, 9, device), SHAPE, 4, 9, dtype=dtype)
    (request,) = requests.requests
    requests.step(op, [Turn(request, 8, 8)])
    requests.step(op, [Turn(request)])
    state = requests.initial[request.slot]
    for begin in (0, 4):
        (*_, state) = request.text[begin : begin + 4].recurrence(state.float())[1]
        state = state.to(dtype)
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    assert request.folded == 8
    torch.testing.assert_close(requests.pool[request.slot], state, rtol=rtol, atol=1e-5)


KERNEL_SHAPES = [
    (SSMShape(heads=2, head_dim=64, d_state=128, groups=1), "portable", 64),
    (SSMShape(heads=2, head_dim=80, d_state=16, groups=2), "portable", 32),
    (SSMShape(heads=2, head_dim=48, d_state=33, groups=1), "portable", 64),
    (SSMShape(heads=34, head_dim=2, d_state=1, groups=2), "portable", 64),
    (SSMShape(heads=2, head_dim=64, d_state=256, groups=1), "portable", 16),
]


@BOTH_POOLS
@pytest.mark.parametrize(("shape", "kernel", "width"), KERNEL_SHAPES)
def test_state_replay_kernel_matches_its_reference(
    shape: SSMShape, kernel: str, width: int, dtype: torch.dtype, device: str
) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the kernels run on a GPU or in the interpreter")
    tiling = ReplayTiling(kernel, width, num_warps=4, max_registers=128)
    compare_with_twin(tiling, shape, torch.float32, dtype, device)


def compare_with_twin(
    tiling: ReplayTiling, shape: SSMShape, inputs: torch.dtype, dtype: torch.dtype, device: str, num_rows: int = 3
) -> None:
    """Compare a step of the kernel with one of the reference, from the same states and rings."""
    torch.manual_seed(shape.d_state)
    ring_len, most = 8, 9
    mine = ReplayedRequests(
        [text.cast(inputs) for text in texts(num_rows, 30, device, shape)], shape, ring_len, most, dtype=dtype
    )
    mine.decode(state_replay_ref, random.Random(1), 13, 8)
    its_pool, its_ring = mine.pool.clone(), copied(mine.ring)
    turns = [Turn(request, i % most, 1 + i % most) for i, request in enumerate(mine.requests)]
    rows = mine.rows(turns)
    step = turns[0].request.text[:0].joined_with([t.request.text[t.request.computed :][: t.kept] for t in turns], [])
    arguments = (step.tokens, step.weights)
    y = replay_tiled(*arguments, mine.pool, mine.ring, rows, ring_len, tiling)
    expected = state_replay_ref(*arguments, its_pool, its_ring, rows, ring_len)
    exact = inputs == dtype == torch.float32
    rounding = 2**-21 * expected.abs().max().item()  # a few rounding errors of sums whose terms cancel
    torch.testing.assert_close(y, expected, rtol=2e-5 if exact else 1e-2, atol=max(2e-5, rounding) if exact else 2e-2)
    # If fp32 results differ in their last bits, they may round to different bf16 values.
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(mine.pool, its_pool, rtol=rtol, atol=1e-5, equal_nan=True)
    for found, held in zip(ring_tensors(mine.ring), ring_tensors(its_ring), strict=True):
        torch.testing.assert_close(found, held, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("number", [1, 3 if INTERPRETED else 63])
def test_state_replay_works_for_any_batch_size(number: int, op: Op, device: str) -> None:
    torch.manual_seed(5)
    every = texts(number, 3, device)
    requests = ReplayedRequests(every, SHAPE, 4, 3)
    requests.step(op, [Turn(request, 2, 2) for request in requests.requests])
    for request in requests.requests:
        outputs, _ = request.text[:2].recurrence(requests.initial[request.slot])
        torch.testing.assert_close(request.outputs[0].double(), outputs, rtol=1e-5, atol=1e-5)


def test_state_replay_of_padding_only_gives_zeros(device: str) -> None:
    steps = random_steps(3, device, SHAPE)
    requests = ReplayedRequests([steps], SHAPE, 4, 1)
    y = state_replay(steps.tokens, steps.weights, requests.pool, requests.ring, requests.rows([]), 4)
    assert y.shape == steps.tokens.x.shape and (y == 0).all()


def test_state_replay_accepts_input_views_and_strided_pools_and_rings(op: Op, device: str) -> None:
    torch.manual_seed(7)
    steps = random_steps(3, device, SHAPE)
    wide = torch.full((3, 200), float("nan"), device=device)
    views = [wide[:, start : start + width] for start, width in ((0, 20), (50, 4), (70, 14), (100, 14))]
    for view, name in zip(views, ("x", "dt", "B", "C"), strict=True):
        view.copy_(getattr(steps.tokens, name).flatten(1))
    x, dt, B, C = views
    strided = SSMTokens(x.unflatten(1, (4, 5)), dt, B.unflatten(1, (2, 7)), C.unflatten(1, (2, 7)))
    pools = torch.randn(3, 2, *SHAPE.state, device=device)
    plain = poisoned_ring(2, 4, 3, SHAPE, device, spare=(0, 3))  # equally many entries for x and the rest
    capacity = plain.capacity
    one_allocation = torch.full((2, capacity, 2, 100), float("nan"), device=device)
    segments = one_allocation[:, :, 1]
    ring = ReplayRing(
        segments[:, :, :20].unflatten(2, (4, 5)),
        segments[:, :, 30:44].unflatten(2, (2, 7)),
        segments[:, :, 60:68].unflatten(2, (2, 4)),
    )
    rows = ReplayBatch(*(int32(values, device) for values in ([0, 3], [2], [1], [0], [0])), max_tokens=3)
    plain_pool = pools[:, 1].clone()
    y = op(strided, steps.weights, pools[:, 1], ring, rows, 4)
    assert same_bits(y, op(steps.tokens, steps.weights, plain_pool, plain, rows, 4))
    for found, expected in zip(ring_tensors(ring), ring_tensors(plain), strict=True):
        assert same_bits(found.contiguous(), expected)
    assert one_allocation[:, :, 0].isnan().all() and one_allocation[:, :, 1, 20:30].isnan().all()


BAD_CALLS: dict[str, tuple[Callable[..., tuple], str]] = {
    "C": (lambda t, p, r, w, n: (replace(t, C=t.C[:, :, :1]), p, r, w, n), "C must have"),
    "pool": (lambda t, p, r, w, n: (t, p[:, :, 1:], r, w, n), "ssm_pool"),
    "ring_len": (lambda t, p, r, w, n: (t, p, r, w, 6), "power of two"),
    "short ring": (lambda t, p, r, w, n: (t, p, r, w, 8), "must be at least 13 and"),
    "x of the ring": (lambda t, p, r, w, n: (t, p, replace(r, x=r.x[:, :, 1:]), w, n), "x of the ring must have shape"),
    "dtype of B": (lambda t, p, r, w, n: (t, p, replace(r, B=r.B.half()), w, n), "B of the ring must be"),
    "steps": (lambda t, p, r, w, n: (t, p, replace(r, steps=r.steps.mT.contiguous().mT), w, n), "contiguous within"),
    "slots": (lambda t, p, r, w, n: (t, p, r, replace(w, slots=w.slots.long()), n), "slots must be int32"),
    "computed": (lambda t, p, r, w, n: (t, p, r, replace(w, computed=w.computed[:0]), n), "computed"),
    "max_tokens": (lambda t, p, r, w, n: (t, p, r, replace(w, max_tokens=0), n), "max_tokens"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_state_replay_refuses_mismatched_arguments(name: str) -> None:
    change, reason = BAD_CALLS[name]
    requests = ReplayedRequests(texts(1, 3, "cpu"), SHAPE, 4, 3)
    step = requests.requests[0].text[:3]
    rows = requests.rows([Turn(requests.requests[0], 2)])
    tokens, *others = change(step.tokens, requests.pool, requests.ring, rows, 4)
    with pytest.raises(ValueError, match=reason):
        state_replay(tokens, step.weights, *others)


@pytest.mark.long
@pytest.mark.parametrize("inputs", [torch.float32, pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, needs_cuda])])
def test_replay_error_over_4096_tokens_is_at_most_that_of_state_verify(inputs: torch.dtype, device: str) -> None:
    """Errors are relative to the fp64 recurrence. Replay rounds bf16 states once per ring instead of per token.

    The errors of states are means over all folds: that of one fold depends on the few tokens before it.
    """
    torch.manual_seed(9)
    small, whole_tiles = (SSMShape(heads=2, head_dim=size, d_state=16, groups=1) for size in (4, 64))
    shape, length = whole_tiles if device == "cuda" else small, 4096
    text = random_steps(length, device, shape)
    steps = text.tokens.dt
    steps.sub_(3)  # weak decays: a token has an effect for tens of tokens
    text = text.cast(inputs)
    outputs, states = text.recurrence(torch.zeros(shape.state, device=device))
    folds = range(16, length, 16)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        requests = ReplayedRequests([text], shape, 16, 8, dtype=dtype)
        (request,) = requests.requests
        requests.pool[request.slot] = 0
        window = requests.pool[1:2].clone()
        rows = DecodeBatch(int32([0, 8], device), int32([0] * 8, device)[None], int32([1], device), 8)
        replayed, windowed, window_outputs = {}, {}, []
        for first in range(0, length, 8):
            requests.step(state_replay, [Turn(request, 7, 8)])
            replayed[request.folded] = requests.pool[request.slot].clone()
            window_outputs.append(state_verify(text[first : first + 8].tokens, text.weights, window, rows))
            windowed[first + 8] = window[0].clone()
        found = [torch.cat(request.outputs), torch.cat(window_outputs)]
        errors[dtype] = [
            tuple(relative(each.double(), outputs) for each in found),
            tuple(fmean(relative(of[end].double(), states[end]) for end in folds) for of in (replayed, windowed)),
        ]
    print("errors of outputs and of states, replayed and in the window form:", errors)
    (outputs_of_fp32, states_of_fp32), (outputs_of_bf16, states_of_bf16) = errors[torch.float32], errors[torch.bfloat16]
    assert states_of_fp32[0] <= 1.05 * states_of_fp32[1] < 1e-6
    assert states_of_bf16[0] < 0.6 * states_of_bf16[1] < 0.02
    if inputs == torch.float32:
        assert outputs_of_fp32[0] <= 1.05 * outputs_of_fp32[1] < 1e-6
        assert outputs_of_bf16[0] < 0.6 * outputs_of_bf16[1] < 0.02
    else:  # outputs are rounded to bf16
        for replayed, windowed in (outputs_of_fp32, outputs_of_bf16):
            assert replayed <= 1.05 * windowed < 0.02


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


WHOLE_TILES = [
    SSMShape(heads=8, head_dim=64, d_state=128, groups=2),
    WHOLE_TILE,
    SSMShape(heads=2, head_dim=80, d_state=16, groups=2),
    SSMShape(heads=3, head_dim=48, d_state=32, groups=1),
    SSMShape(heads=2, head_dim=64, d_state=256, groups=1),
]


@pytest.mark.gpu
@needs_cuda
@BOTH_POOLS
@pytest.mark.parametrize("shape", WHOLE_TILES)
@pytest.mark.parametrize("kernel", ["sums", "mma"])
def test_gluon_state_replay_kernels_match_the_reference(kernel: str, shape: SSMShape, dtype: torch.dtype) -> None:
    width = hopper_width(shape.head_dim, shape.d_state)
    if not is_hopper(torch.device("cuda")) or not has_tested_gluon() or width is None:
        pytest.skip("needs Hopper, and a Gluon that was tested")
    tiling = ReplayTiling(kernel, width, num_warps=1, max_registers=255)
    for inputs in [torch.bfloat16] if kernel == "mma" else [torch.bfloat16, torch.float32]:
        compare_with_twin(tiling, shape, inputs, dtype, "cuda", num_rows=19)


@pytest.mark.gpu
@needs_cuda
@BOTH_POOLS
@pytest.mark.parametrize("ring_len", [4, 16])
@pytest.mark.parametrize("kernel", ["portable", "sums", "mma"])
def test_every_replay_kernel_stores_the_same_state_as_the_boundary_op(
    kernel: str, ring_len: int, dtype: torch.dtype
) -> None:
    """A step may span several multiples of the fold length; outputs before a NaN token stay finite."""
    if kernel != "portable" and not (is_hopper(torch.device("cuda")) and has_tested_gluon()):
        pytest.skip("needs Hopper, and a Gluon that was tested")
    torch.manual_seed(11)
    shape, most = WHOLE_TILES[0], 8
    tiling = ReplayTiling(kernel, 32, num_warps=1, max_registers=255)
    requests = ReplayedRequests(
        [text.cast(torch.bfloat16) for text in texts(3, 64, "cuda", shape)], shape, ring_len, most, dtype=dtype
    )

    def op(*arguments: Any) -> Tensor:
        return replay_tiled(*arguments, tiling)

    for _ in range(3):
        requests.step(op, [Turn(request, most - 1, most) for request in requests.requests], num_tail=2)
        kept = torch.cat([request.outputs[-1] for request in requests.requests])
        assert kept.isfinite().all()
        ends = [request.computed // ring_len * ring_len for request in requests.requests]
        folds = requests.folds([0, 2, 4], ends)
        if kernel == "portable":
            fold_portably(*layered(requests.pool, requests.ring), folds, ring_len, None)
        else:
            fold_boundaries(*layered(requests.pool, requests.ring), folds, ring_len)
        written = requests.pool[[0, 2, 4]].clone()
        requests.step(op, [Turn(request, most - 1, 1 + i) for i, request in enumerate(requests.requests)])
        for request, state in zip(requests.requests, written, strict=True):
            assert request.outputs[-1].isfinite().all()  # the rejected drafts were NaN
            assert same_bits(requests.pool[request.slot], state)


@pytest.mark.gpu
@needs_cuda
@BOTH_POOLS
@pytest.mark.parametrize("shape", [SHAPE, WHOLE_TILES[0]])
def test_state_replay_in_a_replayed_graph_reads_new_inputs(shape: SSMShape, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    requests = ReplayedRequests(
        [text.cast(torch.bfloat16) for text in texts(3, 40, "cuda", shape)], shape, 8, 4, dtype=dtype
    )
    requests.decode(state_replay, random.Random(8), 20, 3)
    plans = []
    for lengths in ((1, 1, 1), (4, 2, 3), (1, 4, 4)):
        turns = [Turn(r, length - 1, length) for r, length in zip(requests.requests, lengths, strict=True)]
        plans.append(requests.rows(turns))
        for request, length in zip(requests.requests, lengths, strict=True):
            request.folded = max(request.folded, request.computed // 8 * 8)
            request.computed += length
    steps = random_steps(12, "cuda", shape).cast(torch.bfloat16)
    buffers = replace(plans[0], **{name: getattr(plans[0], name).clone() for name in ROW_TENSORS})
    state_replay(steps.tokens, steps.weights, requests.pool, requests.ring, buffers, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = state_replay(steps.tokens, steps.weights, requests.pool, requests.ring, buffers, 8)
    for rows in plans:
        for name in ROW_TENSORS:
            getattr(buffers, name).copy_(getattr(rows, name))
        pool, ring = requests.pool.clone(), copied(requests.ring)
        expected = state_replay(steps.tokens, steps.weights, pool, ring, rows, 8)
        graph.replay()
        assert same_bits(y, expected) and same_bits(requests.pool, pool)
        for found, held in zip(ring_tensors(requests.ring), ring_tensors(ring), strict=True):
            assert same_bits(found, held)


ROW_TENSORS = ("cu_tokens", "slots", "buffers", "folded", "computed")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("stride", "dtype"), [(2**31 + 16, torch.bfloat16), (2**30 + 16, torch.float32)])
@pytest.mark.parametrize("num_drafts", [0, 7])
def test_state_replay_handles_offsets_beyond_32_bits(num_drafts: int, stride: int, dtype: torch.dtype) -> None:
    num_bytes = 2 * (3 * stride + 2**20) * dtype.itemsize
    if num_bytes > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of free device memory")
    shape = SSMShape(heads=2, head_dim=64, d_state=128, groups=1)
    near = ReplayedRequests(
        [text.cast(torch.bfloat16) for text in texts(1, 20, "cuda", shape)], shape, 8, 8, dtype=dtype
    )
    (request,) = near.requests
    near.step(state_replay, [Turn(request, 7, 8)])
    buffer = torch.empty((3 * stride + 2**20), dtype=dtype, device="cuda")
    pool = buffer.as_strided((3, *shape.state), (stride, 128 * 64, 64, 1))
    pool.copy_(near.pool)
    xs = torch.empty(3 * stride + 2**20, dtype=torch.bfloat16, device="cuda")
    x = xs.as_strided((4, *near.ring.x.shape[1:]), (stride, 128, 64, 1))
    x[3].copy_(near.ring.x[0])
    ring = replace(near.ring, x=x, B=near.ring.B[[1, 1, 1, 0]], steps=near.ring.steps[[1, 1, 1, 0]])
    rows = near.rows([Turn(request, num_drafts)])
    step = request.text[8 : 9 + num_drafts]
    y = state_replay(step.tokens, step.weights, pool, ring, replace(rows, buffers=rows.buffers + 3), 8)
    assert same_bits(y, state_replay(step.tokens, step.weights, near.pool, near.ring, rows, 8))
    assert same_bits(pool.contiguous(), near.pool) and same_bits(x[3], near.ring.x[0])
    del pool, buffer, x, xs
    torch.cuda.empty_cache()
