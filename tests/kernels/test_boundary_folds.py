"""Properties of the states written at boundaries, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.mamba2.replay.outputs import state_replay
from megatron_mamba_cache.recurrences.mamba2.replay.reference import state_replay_ref
from megatron_mamba_cache.recurrences.replay import boundary_folds
from megatron_mamba_cache.recurrences.replay.boundary_folds import fold_boundaries
from megatron_mamba_cache.recurrences.replay.reference import fold_boundaries_ref
from megatron_mamba_cache.recurrences.replay.ring import BoundaryFolds, ReplayRing
from megatron_mamba_cache.recurrences.replay.tiling import folds_by_mma
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits
from tests.kernels.replay_steps import ReplayedRequests, Turn, int32, layered, poisoned_ring
from tests.kernels.ssm_steps import SSMShape, random_steps

SHAPE = SSMShape(heads=4, head_dim=5, d_state=7, groups=2)
Op = Callable[[Tensor, ReplayRing, BoundaryFolds, int], None]
BOTH_POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=[fold_boundaries, fold_boundaries_ref])
def op(request: pytest.FixtureRequest, device: str) -> Iterator[Op]:
    """Return the op or its reference; check that the kernel was launched or not."""
    of_kernel = request.param is fold_boundaries
    with launches_expected(boundary_folds, "_fold_boundaries_kernel", of_kernel=of_kernel, device=device):
        yield request.param


def decoded(number: int, ring_len: int, device: str, dtype: torch.dtype, most: int = 9) -> ReplayedRequests:
    """Return requests after a long step in which all tokens were accepted."""
    requests = ReplayedRequests(
        [random_steps(4 * ring_len + 9, device, SHAPE) for _ in range(number)], SHAPE, ring_len, most, dtype=dtype
    )
    draw = random.Random(ring_len)
    for request in requests.requests:
        for _ in range(draw.randint(1, 3)):
            requests.step(state_replay_ref, [Turn(request, most - 1, draw.randint(1, most))])
        requests.step(state_replay_ref, [Turn(request, most - 1, most)])
    return requests


@BOTH_POOLS
@pytest.mark.parametrize("ring_len", [4, 8])
def test_boundary_state_equals_the_state_that_later_steps_store(
    ring_len: int, dtype: torch.dtype, op: Op, device: str
) -> None:
    """The fold may span several multiples of the fold length; a bf16 state is cast at each."""
    torch.manual_seed(ring_len)
    requests = decoded(2, ring_len, device, dtype)
    ends = [request.computed // ring_len * ring_len for request in requests.requests]
    targets = [0, 2]
    op(*layered(requests.pool, requests.ring), requests.folds(targets, ends), ring_len)
    written = requests.pool[targets].clone()
    later = state_replay if op is fold_boundaries else state_replay_ref
    requests.step(later, [Turn(request, 0) for request in requests.requests])
    for request, end, state in zip(requests.requests, ends, written, strict=True):
        assert request.folded == end and same_bits(requests.pool[request.slot], state)


@pytest.mark.parametrize("ends_off_a_multiple", [1, 3])
def test_boundary_state_can_be_computed_at_any_position(ends_off_a_multiple: int, op: Op, device: str) -> None:
    torch.manual_seed(1)
    requests = decoded(1, 8, device, torch.float32)
    (request,) = requests.requests
    end = request.computed // 8 * 8 + ends_off_a_multiple - 8
    end = max(end, request.folded)
    op(*layered(requests.pool, requests.ring), requests.folds([2], [end]), 8)
    _, states = request.text[:end].recurrence(requests.initial[request.slot])
    torch.testing.assert_close(requests.pool[2].double(), states[end], rtol=1e-5, atol=1e-5)


@BOTH_POOLS
def test_boundary_state_op_writes_only_target_slots(dtype: torch.dtype, op: Op, device: str) -> None:
    """Requests without a target, and padding with a target, have arbitrary counts."""
    torch.manual_seed(2)
    requests = decoded(2, 4, device, dtype)
    before = requests.pool.clone()
    folds = BoundaryFolds(
        slots=int32([1, PAD_SLOT, 3], device),
        buffers=int32([1, 99, 0], device),
        folded=int32([0, 5, requests.requests[1].folded], device),
        ends=int32([10**6, 7, requests.requests[1].folded], device),
        targets=int32([PAD_SLOT, 2, 4], device),
    )
    op(*layered(requests.pool, requests.ring), folds, 4)
    assert same_bits(requests.pool[4], before[3])  # no tokens to apply, so the state is copied
    assert same_bits(requests.pool[:4], before[:4])
    op(*layered(requests.pool, requests.ring), folds._replace(targets=int32([PAD_SLOT] * 3, device)), 4)
    assert same_bits(requests.pool[:4], before[:4])


def test_boundary_state_op_may_overwrite_its_source_slot(op: Op, device: str) -> None:
    torch.manual_seed(3)
    requests = decoded(1, 4, device, torch.float32)
    (request,) = requests.requests
    op(*layered(requests.pool, requests.ring), requests.folds([2]), 4)
    op(*layered(requests.pool, requests.ring), requests.folds([request.slot]), 4)
    assert same_bits(requests.pool[request.slot], requests.pool[2])


def test_boundary_states_of_every_layer_are_written_to_strided_pools(op: Op, device: str) -> None:
    torch.manual_seed(4)
    num_layers, capacity = 3, 12
    pools = torch.randn(5, num_layers, 2, *SHAPE.state, device=device)[:, :, 1].transpose(0, 1)  # [layers, slots, ...]
    rings = ReplayRing(
        torch.randn(2, capacity, num_layers, SHAPE.heads, SHAPE.head_dim, device=device).permute(2, 0, 1, 3, 4),
        torch.randn(2, num_layers, capacity, SHAPE.groups, SHAPE.d_state, device=device).transpose(0, 1),
        torch.rand(num_layers, 2, 2 * capacity, 2, SHAPE.heads, device=device)[:, :, capacity:] - 0.9,
    )
    folds = BoundaryFolds(*(int32(values, device) for values in ([3], [1], [10], [17], [0])))
    before = pools.clone()
    op(pools, rings, folds, 4)
    for layer in range(num_layers):
        alone = before[layer].clone()
        ring = ReplayRing(rings.x[layer], rings.B[layer], rings.steps[layer])
        fold_boundaries_ref(*layered(alone, ring), folds, 4)
        torch.testing.assert_close(pools[layer, 0], alone[0], rtol=1e-5, atol=1e-5)
        assert same_bits(pools[layer, 1:], before[layer, 1:])


@pytest.mark.parametrize("number", [0, 1, 3 if INTERPRETED else 300])
def test_boundary_states_are_written_for_any_batch_size(number: int, device: str) -> None:
    torch.manual_seed(5)
    pool, ring = torch.randn(max(2 * number, 1), *SHAPE.state, device=device), poisoned_ring(1, 4, 4, SHAPE, device)
    before = pool.clone()
    slots = list(range(number))
    folds = BoundaryFolds(
        *(int32(v, device) for v in (slots, [0] * number, [8] * number, [8] * number, [number + s for s in slots]))
    )
    fold_boundaries(*layered(pool, ring), folds, 4)
    assert same_bits(pool[number : 2 * number], before[:number]) and same_bits(pool[:number], before[:number])


BAD_CALLS: dict[str, tuple[Callable[..., tuple], str]] = {
    "pool": (lambda p, r, w, n: (p[0], r, w, n), "pools must have shape"),
    "transposed pool": (lambda p, r, w, n: (p.mT.contiguous().mT, r, w, n), "contiguous states"),
    "groups": (lambda p, r, w, n: (p, replace(r, B=r.B[:, :, :, :0]), w, n), "B of the rings must have shape"),
    "x": (lambda p, r, w, n: (p, replace(r, x=r.x[..., 1:]), w, n), "x of the ring must have shape"),
    "ring_len": (lambda p, r, w, n: (p, r, w, 12), "power of two"),
    "ends": (lambda p, r, w, n: (p, r, w._replace(ends=w.ends.long()), n), "ends must be int32"),
    "slots": (lambda p, r, w, n: (p, r, w._replace(slots=w.slots[:0]), n), "slots"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_boundary_state_op_refuses_mismatched_arguments(name: str) -> None:
    change, reason = BAD_CALLS[name]
    pool, ring = torch.zeros(2, *SHAPE.state), poisoned_ring(1, 4, 4, SHAPE, "cpu")
    folds = BoundaryFolds(*(int32(v, "cpu") for v in ([0], [0], [0], [0], [1])))
    with pytest.raises(ValueError, match=reason):
        fold_boundaries(*change(*layered(pool, ring), folds, 4))


WHOLE_TILES = [
    SSMShape(heads=8, head_dim=64, d_state=128, groups=2),
    SSMShape(heads=2, head_dim=64, d_state=64, groups=1),
    SSMShape(heads=2, head_dim=80, d_state=16, groups=2),
    SSMShape(heads=3, head_dim=48, d_state=32, groups=1),
    SSMShape(heads=2, head_dim=64, d_state=256, groups=1),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BOTH_POOLS
@pytest.mark.parametrize("ring_len", [4, 16, 32])
@pytest.mark.parametrize("shape", WHOLE_TILES)
def test_tensor_core_boundary_states_match_the_reference(shape: SSMShape, ring_len: int, dtype: torch.dtype) -> None:
    """Fold from and to any position, over several multiples of the fold length or over none."""
    torch.manual_seed(ring_len)
    num_rows, most = 19, 9
    texts = [random_steps(3 * ring_len + 9, "cuda", shape).cast(torch.bfloat16) for _ in range(num_rows)]
    starts = [number % ring_len for number in range(num_rows)]
    requests = ReplayedRequests(texts, shape, ring_len, most, dtype=dtype, starts=starts)
    if not folds_by_mma(requests.pool, torch.bfloat16):
        pytest.skip("needs Hopper, and a Gluon that was tested")
    for kept in [most] * (1 + ring_len // most):
        requests.step(state_replay_ref, [Turn(request, most - 1, kept) for request in requests.requests])
    ends = [r.computed - number % 5 if number else r.folded for number, r in enumerate(requests.requests)]
    ends = [max(end, request.folded) for end, request in zip(ends, requests.requests, strict=True)]
    folds = requests.folds([2 * number for number in range(num_rows)], ends)
    expected = requests.pool.clone()
    fold_boundaries_ref(*layered(expected, requests.ring), folds, ring_len)
    fold_boundaries(*layered(requests.pool, requests.ring), folds, ring_len)
    # A bf16 state may be rounded differently at a multiple, and may have decayed since then.
    largest = expected.nan_to_num().abs().max().item()
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 2**-8 * largest)
    torch.testing.assert_close(requests.pool, expected, rtol=rtol, atol=atol, equal_nan=True)
    assert same_bits(requests.pool[0], requests.pool[requests.requests[0].slot])
    assert same_bits(requests.pool[1::2], expected[1::2])
