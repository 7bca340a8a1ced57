"""Bits of fp16 states depend only on tokens, position, layer and element, for both recurrences, kernels and references.

Without a GPU or the interpreter, each op is its reference; `test_interpreted` runs this file again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import launches_kernel
from megatron_mamba_cache.recurrences.batches import DecodeBatch, PrefillBatch
from megatron_mamba_cache.recurrences.gated_delta import scan as delta_scan_module
from megatron_mamba_cache.recurrences.gated_delta.reference import delta_scan_ref, delta_verify_ref
from megatron_mamba_cache.recurrences.gated_delta.replay.outputs import delta_replay
from megatron_mamba_cache.recurrences.gated_delta.replay.reference import delta_replay_ref
from megatron_mamba_cache.recurrences.gated_delta.scan import delta_scan
from megatron_mamba_cache.recurrences.gated_delta.verify import delta_verify
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref, state_verify_ref
from megatron_mamba_cache.recurrences.mamba2.replay.outputs import state_replay
from megatron_mamba_cache.recurrences.mamba2.replay.reference import state_replay_ref
from megatron_mamba_cache.recurrences.mamba2.scan import ssd_scan
from megatron_mamba_cache.recurrences.mamba2.verify import state_verify
from megatron_mamba_cache.recurrences.replay.boundary_folds import fold_boundaries
from megatron_mamba_cache.recurrences.replay.reference import fold_boundaries_ref
from megatron_mamba_cache.recurrences.stochastic_rounding import cast_state, cast_state_ref, rounding_seed
from tests.kernels import delta_steps, ssm_steps
from tests.kernels.delta_steps import DeltaShape
from tests.kernels.packed_batches import RowSpec, VerifySpec, assert_untouched, pack_rows, pack_verify, same_bits
from tests.kernels.replay_steps import ReplayedRequests, Turn, layered
from tests.kernels.ssm_steps import SSMShape

FP16 = torch.float16
NAMES = ("mamba2", "gated delta")
RING = 4
SEED = rounding_seed(FP16, layer=2)


@dataclass(frozen=True)
class Case:
    """The ops of a recurrence, or their references, with a seed."""

    name: str
    is_kernel: bool
    tokens: torch.dtype = torch.float32

    @property
    def is_delta(self) -> bool:
        """True for Gated DeltaNet, False for Mamba2."""
        return self.name == "gated delta"

    def steps(self, num_tokens: int, device: str) -> Any:
        """Return random tokens."""
        shape, (of_keys, of_values) = self.shape, (self.shape.d_state, self.shape.head_dim)
        if self.is_delta:
            return delta_steps.random_steps(num_tokens, device, DeltaShape(2, 4, of_keys, of_values), dtype=self.tokens)
        return ssm_steps.random_steps(num_tokens, device, shape, dtype=self.tokens)

    @property
    def shape(self) -> SSMShape:
        """Dimensions of a layer; with bf16 tokens, those that the kernels for Hopper GPUs support."""
        head_dim, d_state = (32, 16) if self.tokens == torch.float32 else (128 if self.is_delta else 64, 128)
        return SSMShape(heads=4, head_dim=head_dim, d_state=d_state, groups=2)

    @property
    def grain(self) -> int:
        """Number of tokens per chunk."""
        return 16 if self.tokens == torch.float32 else 64

    def verify(self, steps: Any, pool: Tensor, rows: DecodeBatch, seed: int | None = SEED) -> Tensor:
        """Run decode steps in the window form."""
        ops = (delta_verify, delta_verify_ref) if self.is_delta else (state_verify, state_verify_ref)
        return ops[not self.is_kernel](steps.tokens, steps.weights, pool, rows, seed=seed)

    def scan(self, steps: Any, pool: Tensor, rows: PrefillBatch, seed: int | None = SEED) -> Tensor:
        """Scan prompts."""
        if self.is_delta and not self.is_kernel:
            return delta_scan_ref(steps.tokens, steps.weights, pool, rows, seed=seed)
        op = delta_scan if self.is_delta else ssd_scan if self.is_kernel else ssd_scan_ref
        return op(steps.tokens, steps.weights, pool, rows, self.grain, seed=seed)

    @property
    def replay(self) -> Callable[..., Tensor]:
        """The op for replayed steps."""
        ops = (delta_replay, delta_replay_ref) if self.is_delta else (state_replay, state_replay_ref)
        return partial(ops[not self.is_kernel], seed=SEED)

    @property
    def fold(self) -> Callable[..., None]:
        """The op for boundary folds; the pool's only layer has the seed of this module."""
        return partial(fold_boundaries if self.is_kernel else fold_boundaries_ref, seed=SEED)


@pytest.fixture(params=[f"{name}{form}" for name in NAMES for form in ("", ", reference", ", bf16")])
def case(request: pytest.FixtureRequest, device: str) -> Case:
    """Return a recurrence and how it is computed."""
    name, _, form = request.param.partition(", ")
    if form == "bf16" and device != "cuda":
        pytest.skip("the interpreter has no bf16 matmuls")
    torch.manual_seed(len(name))
    return Case(name, form != "reference", torch.bfloat16 if form == "bf16" else torch.float32)


def zero_pool(case: Case, num_slots: int, device: str) -> Tensor:
    return torch.zeros(num_slots, *case.shape.state, dtype=FP16, device=device)


def test_verified_states_equal_those_of_single_token_steps_in_another_slot(case: Case, device: str) -> None:
    steps, pool = case.steps(7, device), zero_pool(case, 8, device)
    before = pool.clone()
    specs = [VerifySpec(2, (7, 6), computed=90), VerifySpec(5, (4, 1, 0, 5, 3), computed=13)]
    y = case.verify(steps, pool, pack_verify(specs, device))
    assert_untouched(before, pool, {7, 6, 4, 1, 0, 5, 3})
    alone = zero_pool(case, 1, device)
    for token in range(5):
        row = pack_verify([VerifySpec(1, (0,), computed=13 + token)], device)
        assert same_bits(case.verify(steps[[2 + token]], alone, row)[0], y[2 + token])
        assert same_bits(alone[0], pool[specs[1].columns[token]])


def test_stored_states_are_the_fp32_states_rounded_up_or_down(case: Case, device: str) -> None:
    """For the first token the exact state is known; later tokens continue from the rounded one."""
    steps, row = case.steps(1, device), pack_verify([VerifySpec(1, (0,), computed=5)], device)
    exact, pools = torch.zeros(1, *case.shape.state, device=device), []
    case.verify(steps, exact, row, None)
    for seed in (None, SEED, rounding_seed(FP16, layer=3)):
        pools.append(zero_pool(case, 1, device))
        case.verify(steps, pools[-1], row, seed)
        error = (pools[-1].float() - exact).abs()
        assert (error <= exact.abs() * 2.0 ** (-10 if seed else -11) * 1.001 + 2.0**-24).all()
    nearest, first, second = pools
    assert float((nearest != exact.to(FP16)).double().mean()) < 1e-3  # on a GPU, sums of another kernel variant differ
    assert 0.2 < float((first != nearest).double().mean()) < 0.3  # a quarter is rounded to the other side
    assert 0.2 < float((first != second).double().mean()) < 0.45  # 2 (1 - p) p for p uniform, so a third


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_scan_resumed_at_a_block_boundary_gives_the_bits_of_a_whole_scan(
    num_chunks: int, case: Case, device: str
) -> None:
    grain, boundary = case.grain, num_chunks * case.grain
    length = 3 * grain + 7
    steps, other = case.steps(length, device), case.steps(9, device)
    whole, hit = zero_pool(case, 4, device), zero_pool(case, 4, device)
    y = case.scan(steps, whole, pack_rows([RowSpec(length, final=0)], grain, device))
    first = [RowSpec(boundary + 3, boundaries={boundary: 2}), RowSpec(9, start=5)]
    case.scan(steps[: boundary + 3].joined_with([], [other]), hit, pack_rows(first, grain, device))
    resumed = [RowSpec(9, start=40), RowSpec(length - boundary, start=boundary, initial=2, final=3)]
    again = case.scan(steps[boundary:].joined_with([other], []), hit, pack_rows(resumed, grain, device))
    assert same_bits(hit[3], whole[0]) and same_bits(again[9:], y[boundary:])


def test_a_scan_is_the_same_with_larger_blocks_until_the_first_boundary(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a block the state is not rounded, so that only boundaries cost accuracy."""
    monkeypatch.setattr(delta_scan_module, "_runs_gluon", lambda device: False)  # as with a seed
    steps = case.steps(2 * case.grain + 3, device)
    pools = [torch.zeros(1, *case.shape.state, dtype=dtype, device=device) for dtype in (FP16, torch.float32)]
    rows = replace(pack_rows([RowSpec(2 * case.grain + 3, final=0)], case.grain, device), block_size=4 * case.grain)
    for pool in pools:
        case.scan(steps, pool, rows, SEED if pool.dtype == FP16 else None)
    error = (pools[0].float() - pools[1]).abs()
    assert (error <= pools[1].abs() * 2.0**-10 * 1.001 + 2.0**-24).all()


def replayed(case: Case, text: Any, counts: Sequence[int], device: str) -> ReplayedRequests:
    """Decode a text after zero states in steps of these numbers of tokens, all accepted, alongside another request."""
    requests = ReplayedRequests([text, text[:50]], case.shape, RING, max(counts), dtype=FP16)
    requests.pool.zero_()
    request, other = requests.requests
    for count in counts:
        turns = [Turn(other), Turn(request, count - 1, count)]
        requests.step(case.replay, turns[count % 2 :])
    return requests


def test_replayed_states_do_not_depend_on_the_number_of_tokens_a_step(case: Case, device: str) -> None:
    """Steps of a Mamba2 layer end where the state is cast; those of a Gated DeltaNet layer may pass it."""
    text, draw = case.steps(60, device), random.Random(1)
    one = replayed(case, text, [1] * 22, device)
    counts: list[int] = []
    while (done := sum(counts)) < 22:
        limit = 9 if case.is_delta else RING - done % RING
        counts.append(min(draw.randint(1, limit), 22 - done))
    several = replayed(case, text, counts, device)
    slot = one.requests[0].slot
    assert same_bits(one.pool[slot], several.pool[slot]) and one.pool[slot].any()
    for ends in (20, 21):
        for requests in (one, several):
            folds = requests.folds([0, -1], [ends, requests.requests[1].folded])
            case.fold(*layered(requests.pool, requests.ring), folds, RING)
        assert same_bits(one.pool[0], several.pool[0])


def test_a_boundary_state_equals_the_base_that_a_later_step_stores(case: Case, device: str) -> None:
    requests = replayed(case, case.steps(60, device), [3, 1, 4, 2], device)
    request = requests.requests[0]
    case.fold(*layered(requests.pool, requests.ring), requests.folds([0, -1], [8, requests.requests[1].folded]), RING)
    requests.step(case.replay, [Turn(request, 1, 2)])
    assert request.folded == 8 and same_bits(requests.pool[request.slot], requests.pool[0])


@pytest.mark.parametrize("name", NAMES)
def test_kernels_round_as_their_references(name: str, device: str) -> None:
    """Sums differ in their last bits, so a few elements may be rounded to the other side."""
    cases = [Case(name, is_kernel) for is_kernel in (True, False)]
    steps, found = cases[0].steps(40, device), []
    for case in cases:
        pool = zero_pool(case, 4, device)
        case.scan(steps, pool, pack_rows([RowSpec(40, start=16, final=0, boundaries={2 * 16: 1})], 16, device))
        case.verify(steps[:2], pool, pack_verify([VerifySpec(2, (2, 3), computed=7)], device))
        requests = replayed(case, steps, [1, 3, 1], device)
        found.append(torch.cat([pool, requests.pool[requests.requests[0].slot][None]]))
    kernel, reference = found
    assert float((kernel != reference).double().mean()) < 0.02
    torch.testing.assert_close(kernel.float(), reference.float(), rtol=2**-8, atol=2**-16)


def test_a_seed_needs_an_fp16_pool_and_positions(device: str) -> None:
    case = Case("mamba2", is_kernel=True)
    steps, row = case.steps(1, device), pack_verify([VerifySpec(1, (0,))], device)
    with pytest.raises(ValueError, match=r"needs a pool in torch.float16, found torch.float32"):
        case.verify(steps, zero_pool(case, 1, device).float(), row)
    with pytest.raises(ValueError, match="needs `computed`"):
        case.verify(steps, zero_pool(case, 1, device), replace(row, computed=None))
    rows = pack_rows([RowSpec(1)], 16, device)
    with pytest.raises(ValueError, match="block_size of at least 1"):
        case.scan(steps, zero_pool(case, 1, device), replace(rows, block_size=0))


@triton.jit
def _cast_kernel(source, target, positions, seed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    state = tl.load(source + row * COLUMNS + column)
    stored = cast_state(state, target.dtype.element_ty, seed, tl.load(positions), row, column)
    tl.store(target + row * COLUMNS + column, stored)


@pytest.mark.parametrize("position", [0, 1, 4096, 2**31 - 1])
def test_kernels_round_bit_for_bit_as_the_reference(position: int, device: str) -> None:
    torch.manual_seed(0)
    states = (torch.randn(4, 16, 32) * torch.exp2(torch.randint(-30, 18, (4, 16, 32)).float())).to(device)
    if not launches_kernel(states):
        pytest.skip("kernels neither compile nor are interpreted here; test_interpreted runs this file again")
    nan = torch.tensor([0x7FFFFFFF, -1], device=device, dtype=torch.int32).view(torch.float32)
    states.view(-1)[:5] = torch.tensor([0.0, -0.0, 65504.0, -70000.0, float("inf")], device=device)
    states.view(-1)[6:8] = nan
    found = torch.empty_like(states, dtype=FP16)
    positions = torch.tensor([position], dtype=torch.int32, device=device)
    _cast_kernel[(4,)](states, found, positions, SEED, ROWS=16, COLUMNS=32)
    expected = cast_state_ref(states, FP16, SEED, positions[0])
    assert torch.equal(found.isnan(), expected.isnan()) and int(found.isnan().sum()) == 2
    assert torch.equal(found.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))
