"""Properties of `DraftPlanner`: which requests get drafts, invalid proposals, and what it stores about requests."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_mamba_cache.speculation.all_drafts import AllDrafts
from megatron_mamba_cache.speculation.draft_planner import DraftLimit, DraftPlanner, NoDrafts
from megatron_mamba_cache.speculation.draft_policy import DraftPolicy
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.speculation.running_requests import request_of
from tests.speculation.simulated_steps import DENSE_8B, NO_LIMIT, time_of

VOCAB = 10


class CountingDrafter:
    """Drafter that proposes the request's id for every draft token, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []
        self.forgotten: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls.append([(request.running.request_id, request.num_tokens) for request in requests])
        return [Draft((request.running.request_id,) * request.num_tokens) for request in requests]

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


class BrokenDrafter(CountingDrafter):
    """Drafter that returns the same drafts for any requests."""

    def __init__(self, answer: list[Draft]) -> None:
        super().__init__()
        self.answer = answer

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self.answer


def planner_of(drafter: Any, max_drafts: int, vocab_size: int = VOCAB) -> DraftPlanner:
    """Return a planner whose policy drafts as long as drafts are accepted."""
    return DraftPlanner(drafter, max_drafts, vocab_size, DraftPolicy(time_of(DENSE_8B, max_drafts)))


def limits_of(*limits: int) -> list[DraftLimit]:
    """Return requests 1, 2, ... with these draft limits."""
    return [DraftLimit(request_of([0], request_id=index + 1), limit) for index, limit in enumerate(limits)]


def learn(planner: DraftPlanner, limits: list[DraftLimit]) -> None:
    """Run steps of two requests: all drafts of the first are rejected, and all drafts of the second are accepted."""
    wrong, right = (entry.request for entry in limits)
    for _ in range(20):
        for entry, draft in zip(limits, planner.plan(limits), strict=True):
            planner.note([entry.request], [len(draft.tokens)], [len(draft.tokens) * (entry.request is right)])
        planner.note_step([wrong, right])


def test_drafter_is_called_once_for_all_requests_that_may_draft() -> None:
    drafter = CountingDrafter()
    drafts = planner_of(drafter, 3).plan(limits_of(2, 0, 3, 0))
    assert drafter.calls == [[(1, 2), (3, 3)]]
    assert [draft.tokens for draft in drafts] == [(1, 1), (), (3, 3, 3), ()]


def test_drafter_is_not_called_if_no_request_may_draft() -> None:
    drafter = CountingDrafter()
    planner = planner_of(drafter, 3)
    assert planner.plan([]) == [] and planner.plan(limits_of(0, 0)) == [Draft(), Draft()]
    assert drafter.calls == []


def test_draft_counts_follow_the_acceptance_rate_of_each_request() -> None:
    planner = planner_of(CountingDrafter(), 8)
    limits = limits_of(4, 4)
    requests = [entry.request for entry in limits]
    learn(planner, limits)
    assert planner.counts(requests, [8, 8], NO_LIMIT)[1] == 8 > 2 >= planner.counts(requests, [8, 8], NO_LIMIT)[0]


def test_request_without_a_proposal_keeps_its_acceptance_estimate() -> None:
    planner = planner_of(CountingDrafter(), 4)
    limits = limits_of(4, 0)
    requests = [entry.request for entry in limits]
    for _ in range(20):
        planner.plan(limits)
        planner.note(requests, [4, 0], [4, 0])
        planner.note_step(requests)
        planner.note(requests, [0, 0], [0, 0])  # from a step that was not planned
    assert planner.counts(requests, [4, 4], NO_LIMIT) == [4, 4]


@pytest.mark.parametrize("step_fails", [False, True])
def test_drafting_pauses_after_a_step_without_proposals(step_fails: bool) -> None:
    """Drafts of the previous step, or of a failed step, do not count as proposals for this step."""

    class OnceOnly(CountingDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            self.calls.append([])
            return super().propose(requests) if len(self.calls) == 1 else [Draft()] * len(requests)

    planner = DraftPlanner(OnceOnly(), 4, VOCAB, DraftPolicy(time_of(DENSE_8B), shadows=True))
    limits = limits_of(4)
    requests = [limits[0].request]
    for stays_paused in (False, True):
        assert planner.counts(requests, [4], NO_LIMIT) == [4]
        planner.note(requests, [len(planner.plan(limits)[0].tokens)], [4 * (not stays_paused)])
        if stays_paused or not step_fails:
            planner.note_step(requests)
        assert planner.stays_paused(requests) == stays_paused


def test_planning_a_step_again_gives_the_same_drafts() -> None:
    planner = planner_of(CountingDrafter(), 8)
    assert planner.plan(limits_of(8, 3)) == planner.plan(limits_of(8, 3))


def test_proposed_drafts_are_dropped_if_a_step_without_drafts_is_faster() -> None:
    """A captured step pads every request to the most drafts: drafts of one request make it compute five times more."""

    class OneDraft(CountingDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            drafts = [Draft((1, 2)), *[Draft()] * (len(requests) - 1)]
            return drafts

    for num_requests, kept in ((4, 2), (200, 0)):
        planner = planner_of(OneDraft(), 4)
        drafts = planner.plan(limits_of(*[4] * num_requests))
        assert [len(draft.tokens) for draft in drafts] == [kept, *[0] * (num_requests - 1)]
    planner = DraftPlanner(OneDraft(), 4, VOCAB, AllDrafts())
    assert len(planner.plan(limits_of(*[4] * 200))[0].tokens) == 2


def test_truncated_draft_keeps_the_distributions_of_its_tokens() -> None:
    draft = Draft((1, 2, 3), torch.eye(3, VOCAB))
    assert draft.first(3) is draft and draft.first(2).tokens == (1, 2)
    assert torch.equal(draft.first(2).distributions, torch.eye(3, VOCAB)[:2])  # type: ignore[arg-type]


def test_forgotten_request_loses_its_acceptance_estimate() -> None:
    drafter = CountingDrafter()
    planner = planner_of(drafter, 8)
    limits = limits_of(4, 4)
    requests = [entry.request for entry in limits]
    learn(planner, limits)
    before = planner.counts(requests[:1], [8], NO_LIMIT)
    planner.forget(1)
    assert drafter.forgotten == [1]
    assert planner.counts(requests[:1], [8], NO_LIMIT) > before


def test_outcome_of_a_forgotten_request_is_ignored() -> None:
    planner = planner_of(CountingDrafter(), 8)
    (entry,) = limits_of(4)
    for _ in range(3):
        planner.plan([entry])
        planner.forget(1)
        planner.note([entry.request], [4], [0])
    assert planner.counts([entry.request], [4], NO_LIMIT) == [4]


BROKEN = {
    "2 drafts for 1 requests": [Draft(), Draft()],
    "0 drafts for 1 requests": [],
    "3 tokens for request 1, but at most 2 were requested": [Draft((1, 2, 3))],
    "token -1 for request 1": [Draft((3, -1))],
    r"token 10 for request 1, but token ids must be in \[0, 10\)": [Draft((10,))],
    r"Tensor tensor\(1\) for request 1 as a token, but token ids must be ints": [Draft(torch.tensor([1]))],
    r"distributions of shape \[2, 10\] for request 1, but the shape must be \[1, 10\]": [
        Draft((1,), torch.ones(2, 10))
    ],
    r"distributions of shape \[1, 9\]": [Draft((1,), torch.ones(1, 9))],
    r"distributions of shape \[10\]": [Draft((1,), torch.ones(10))],
    r"distributions of dtype torch.int64": [Draft((1,), torch.ones(1, 10, dtype=torch.int64))],
}


@pytest.mark.parametrize("message", BROKEN)
def test_error_for_an_invalid_draft_names_the_drafter(message: str) -> None:
    with pytest.raises(ValueError, match=f"drafter BrokenDrafter returned {message}"):
        planner_of(BrokenDrafter(BROKEN[message]), 8).plan(limits_of(2))


def test_valid_drafts_are_accepted() -> None:
    drafts = [Draft((0, 9), torch.ones(2, 10)), Draft(), Draft((4,))]
    assert planner_of(BrokenDrafter(drafts), 8).plan(limits_of(2, 2, 2)) == drafts


@pytest.mark.parametrize(("max_drafts", "vocab_size"), [(0, 5), (1, 0)])
def test_max_drafts_or_vocab_size_below_one_is_refused(max_drafts: int, vocab_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1, found 0"):
        planner_of(CountingDrafter(), max_drafts, vocab_size)


def test_drafter_with_another_vocabulary_size_is_refused() -> None:
    class OwnVocabulary(CountingDrafter):
        vocab_size = VOCAB

    planner_of(OwnVocabulary(), 2)
    with pytest.raises(ValueError, match=f"OwnVocabulary drafts from a vocabulary of {VOCAB} tokens, .* has 12"):
        planner_of(OwnVocabulary(), 2, 12)


def test_engine_without_drafter_plans_empty_drafts() -> None:
    planner = NoDrafts()
    limits = limits_of(2, 3)
    assert planner.max_drafts == 0 and planner.plan(limits) == [Draft(), Draft()]
    requests = [entry.request for entry in limits]
    planner.note(requests, [0, 0], [0, 0])
    planner.note_step(requests)
    planner.forget(1)
    assert planner.stays_paused(requests)
