"""Verification of drafts, compared with a plain loop, and edge cases."""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.sampling import verification
from megatron_mamba_cache.kernels.sampling.verification import (
    DraftDistributions,
    RatioUniforms,
    VerifyLogits,
    accept_by_ratio,
    accept_matching,
    accept_matching_ref,
)
from tests.kernels.kernel_stand_ins import launches_expected

VOCAB = 4


@dataclass(frozen=True)
class Position:
    """One position: the sampled token, p, the draft that follows, and q if the draft was sampled."""

    token: int
    p: list[float]
    draft: int
    q: list[float] | None
    accept: float
    residual: float


def emitted_tokens(row: list[Position], *, by_ratio: bool) -> list[int]:
    """Verify one request with a plain loop, and return its emitted tokens."""
    emitted = []
    for position in row[:-1]:
        x, p, q = position.draft, position.p, position.q
        if not by_ratio or q is None:
            emitted.append(position.token)
            if x != position.token:
                return emitted
        elif p[x] > 0 and (q[x] == 0 or position.accept < p[x] / q[x]):
            emitted.append(x)
        else:
            residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            return [*emitted, sampled_token(residual if any(residual) else p, position.residual)]
    return [*emitted, row[-1].token]


def sampled_token(weights: list[float], uniform: float) -> int:
    cumulative = list(accumulate(weights))
    return next(token for token, reached in enumerate(cumulative) if reached > uniform * cumulative[-1])


def random_row(num_drafts: int, rng: np.random.Generator) -> list[Position]:
    return [random_position(rng, is_last=index == num_drafts) for index in range(num_drafts + 1)]


def random_position(rng: np.random.Generator, *, is_last: bool) -> Position:
    p, q = random_probabilities(rng), random_probabilities(rng)
    shape = rng.integers(5)
    if shape == 0:
        q = p
    sampled = not is_last and shape < 4
    numbers = rng.random(2).tolist()
    draft = int(rng.integers(VOCAB)) if not is_last else int(rng.integers(-99, 99))
    return Position(int(rng.integers(VOCAB)), p, draft, q if sampled else None, *numbers)


def random_probabilities(rng: np.random.Generator) -> list[float]:
    weights = rng.random(VOCAB) * (rng.random(VOCAB) < 0.7)
    weights[rng.integers(VOCAB)] += 0.1
    return (weights / weights.sum()).tolist()


@dataclass(frozen=True)
class Batch:
    """Arguments of both verification ops."""

    tokens: Tensor
    probabilities: Tensor
    rows: VerifyLogits
    sampled: DraftDistributions
    uniforms: RatioUniforms

    def match(self) -> list[list[int]]:
        return self._emitted(accept_matching(self.tokens, self.rows))

    def by_ratio(self) -> list[list[int]]:
        return self._emitted(accept_by_ratio(self.tokens, self.probabilities, self.rows, self.sampled, self.uniforms))

    def _emitted(self, result: Tensor) -> list[list[int]]:
        assert result.dtype == torch.int64
        assert result.shape == (len(self.rows.cu_logits) - 1, 2 + self.rows.max_drafts)
        return [tokens[:count] for count, *tokens in result.tolist()]


def batch_of(rows: list[list[Position]], device: str, *, num_padding: int = 0, max_drafts: int = 4) -> Batch:
    positions = [position for row in rows for position in row]
    distributions = [position.q for position in positions if position.q is not None]
    numbers = iter(range(len(positions)))
    index = [-1 if position.q is None else next(numbers) for position in positions]
    ends = list(accumulate((len(row) for row in rows), initial=0))
    cu_logits = torch.tensor(ends + ends[-1:] * num_padding, dtype=torch.int32, device=device)

    def float64(values: list[float] | list[list[float]]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    def int64(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        tokens=int64([position.token for position in positions]),
        probabilities=float64([position.p for position in positions]).reshape(-1, VOCAB),
        rows=VerifyLogits(cu_logits, int64([position.draft for position in positions]), max_drafts),
        sampled=DraftDistributions(float64(distributions).reshape(-1, VOCAB), int64(index).int()),
        uniforms=RatioUniforms(*(float64([getattr(p, name) for p in positions]) for name in ("accept", "residual"))),
    )


BATCHES = st.tuples(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 2), st.integers(0, 2**32))


@given(BATCHES)
def test_acceptance_by_matching_equals_a_loop_over_the_drafts(batch: tuple[list[int], int, int]) -> None:
    lengths, num_padding, seed = batch
    rng = np.random.default_rng(seed)
    rows = [random_row(num_drafts, rng) for num_drafts in lengths]
    emitted = batch_of(rows, "cpu", num_padding=num_padding).match()
    assert emitted[: len(rows)] == [emitted_tokens(row, by_ratio=False) for row in rows]
    assert all(len(tokens) == 1 for tokens in emitted[len(rows) :])


@pytest.mark.parametrize("max_drafts", [0, 1, 4, 7])
@pytest.mark.parametrize("num_padding", [0, 3])
def test_acceptance_by_matching_kernel_equals_its_reference(max_drafts: int, num_padding: int, device: str) -> None:
    rng = np.random.default_rng(max_drafts)
    rows = [random_row(int(rng.integers(max_drafts + 1)), rng) for _ in range(40)]
    batch = batch_of(rows, device, num_padding=num_padding, max_drafts=max_drafts)
    drafts = torch.where(torch.rand(len(batch.tokens)) < 0.8, batch.tokens.cpu(), batch.rows.draft_ids.cpu()).to(device)
    agreeing = replace(batch, rows=replace(batch.rows, draft_ids=drafts))
    for case in (batch, agreeing):
        with launches_expected(verification, "_accept_kernel", of_kernel=True, device=device):
            found = accept_matching(case.tokens, case.rows)
        assert found.tolist() == accept_matching_ref(case.tokens, case.rows).tolist()
    kept = [count - 1 for count in accept_matching(agreeing.tokens, agreeing.rows)[:, 0].tolist()]
    assert max(kept, default=0) == 0 if max_drafts == 0 else max(kept) >= min(max_drafts, 3)


@given(BATCHES)
def test_acceptance_by_ratio_equals_a_loop_over_the_drafts(batch: tuple[list[int], int, int]) -> None:
    lengths, num_padding, seed = batch
    rng = np.random.default_rng(seed)
    rows = [random_row(num_drafts, rng) for num_drafts in lengths]
    emitted = batch_of(rows, "cpu", num_padding=num_padding).by_ratio()
    assert emitted[: len(rows)] == [emitted_tokens(row, by_ratio=True) for row in rows]
    assert all(len(tokens) == 1 for tokens in emitted[len(rows) :])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 2**32))
def test_drafts_without_probabilities_are_verified_by_matching(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(num_drafts, rng) for num_drafts in [*lengths, 4, 4, 4]]
    batch = batch_of(rows, "cpu")
    for row, matched, emitted in zip(rows, batch.match(), batch.by_ratio(), strict=True):
        if all(position.q is None for position in row):
            assert emitted == matched


@given(BATCHES)
def test_verification_returns_only_valid_token_ids(batch: tuple[list[int], int, int]) -> None:
    lengths, num_padding, seed = batch
    rng = np.random.default_rng(seed)
    args = batch_of([random_row(num_drafts, rng) for num_drafts in lengths], "cpu", num_padding=num_padding)
    for result in (
        accept_matching(args.tokens, args.rows),
        accept_by_ratio(args.tokens, args.probabilities, args.rows, args.sampled, args.uniforms),
    ):
        assert ((result[:, 1:] >= 0) & (result[:, 1:] < VOCAB)).all()


def decide(p: list[float], q: list[float], accept: float, residual: float, device: str) -> list[int]:
    """Verify one request whose only draft, token 0, was sampled; the model's sample is token 3 at each position."""
    first = Position(3, p, 0, q, accept, residual)
    return batch_of([[first, Position(3, p, 0, None, 0, 0)]], device, max_drafts=1).by_ratio()[0]


def test_draft_is_accepted_if_the_random_number_is_below_the_ratio(device: str) -> None:
    p, q = [0.25, 0.75, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]
    assert decide(p, q, 0.499, 0.9, device) == [0, 3]
    assert decide(p, q, 0.5, 0.9, device) == [1]
    assert decide(p, [0.125, 0.875, 0, 0], 0.999, 0.9, device) == [0, 3]


def test_draft_with_probability_0_is_accepted_only_if_the_model_allows_it(device: str) -> None:
    q = [0.0, 1.0, 0.0, 0.0]
    assert decide([1e-9, 1.0, 0.0, 0.0], q, 0.999, 0.0, device) == [0, 3]
    assert decide([0.0, 0.5, 0.5, 0.0], q, 0.0, 0.0, device) == [2]


def test_rejected_draft_with_empty_residual_samples_from_the_model(device: str) -> None:
    p = [0.0, 0.25, 0.75, 0.0]
    assert [decide(p, p, 0.0, uniform, device) for uniform in (0.0, 0.24, 0.26)] == [[1], [1], [2]]


def test_greedy_requests_keep_the_argmax_for_any_drafts(device: str) -> None:
    one_hot = [0.0, 0.0, 1.0, 0.0]
    assert decide(one_hot, [0.9, 0.0, 0.1, 0.0], 0.0, 0.999, device) == [2]
    assert decide([1.0, 0.0, 0.0, 0.0], [0.9, 0.0, 0.1, 0.0], 0.999, 0.0, device) == [0, 3]


@pytest.mark.parametrize("num_rows", [0, 2])
def test_verification_of_padding_only_emits_one_token_per_request(num_rows: int, device: str) -> None:
    batch = batch_of([], device, num_padding=num_rows)
    assert batch.match() == batch.by_ratio() == [[0]] * num_rows


def test_verification_of_a_request_without_drafts_emits_its_sampled_token(device: str) -> None:
    rows = [random_row(0, np.random.default_rng(seed)) for seed in range(3)]
    batch = batch_of(rows, device, max_drafts=0)
    assert batch.match() == batch.by_ratio() == [[row[0].token] for row in rows]
