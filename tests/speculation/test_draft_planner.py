"""Properties of the plan of a step's drafts: which requests get some, what is refused, and what is remembered."""

from collections.abc import Sequence

import pytest
import torch

from megatron_mamba_cache.speculation.draft_planner import DraftLimit, DraftPlanner, NoDrafts
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.speculation.request_rows import row_of

VOCAB = 10


class CountingDrafter:
    """Proposes the request's id, as often as requested, and records what it was asked."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []
        self.forgotten: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls.append([(request.row.request_id, request.num_tokens) for request in requests])
        return [Draft((request.row.request_id,) * request.num_tokens) for request in requests]

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


class BrokenDrafter(CountingDrafter):
    """Answers with fixed drafts, whatever it was asked."""

    def __init__(self, answer: list[Draft]) -> None:
        super().__init__()
        self.answer = answer

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self.answer


def limits_of(*limits: int) -> list[DraftLimit]:
    """Return rows 1, 2, ... with these limits."""
    return [DraftLimit(row_of([0], request_id=index + 1), limit) for index, limit in enumerate(limits)]


def test_drafter_is_asked_once_for_the_rows_that_want_drafts() -> None:
    drafter = CountingDrafter()
    drafts = DraftPlanner(drafter, 3, VOCAB).plan(limits_of(2, 0, 5, -1))
    assert drafter.calls == [[(1, 2), (3, 3)]]
    assert [draft.tokens for draft in drafts] == [(1, 1), (), (3, 3, 3), ()]


def test_drafter_is_left_alone_where_nothing_is_wanted() -> None:
    drafter = CountingDrafter()
    planner = DraftPlanner(drafter, 3, VOCAB)
    assert planner.plan([]) == [] and planner.plan(limits_of(0, 0)) == [Draft(), Draft()]
    assert drafter.calls == []


def test_each_request_learns_from_its_own_steps() -> None:
    drafter = CountingDrafter()
    planner = DraftPlanner(drafter, 8, VOCAB)
    limits = limits_of(9, 9)
    for _ in range(3):
        drafts = planner.plan(limits)
        planner.note(limits[0].row, len(drafts[0].tokens), 0)
        planner.note(limits[1].row, len(drafts[1].tokens), len(drafts[1].tokens))
    assert [len(draft.tokens) for draft in planner.plan(limits)] == [0, 8]


def test_planning_again_gives_the_same_drafts() -> None:
    planner = DraftPlanner(CountingDrafter(), 8, VOCAB)
    assert planner.plan(limits_of(9, 3)) == planner.plan(limits_of(9, 3))


def test_forgotten_request_starts_anew() -> None:
    drafter = CountingDrafter()
    planner = DraftPlanner(drafter, 8, VOCAB)
    (entry,) = limits_of(9)
    for _ in range(3):
        planner.note(entry.row, len(planner.plan([entry])[0].tokens), 0)
    assert planner.plan([entry]) == [Draft()]
    planner.forget(1)
    assert drafter.forgotten == [1]
    assert len(planner.plan([entry])[0].tokens) == 4


def test_note_after_forget_remembers_nothing() -> None:
    planner = DraftPlanner(CountingDrafter(), 8, VOCAB)
    (entry,) = limits_of(9)
    planner.plan([entry])
    planner.forget(1)
    for _ in range(3):
        planner.note(entry.row, 4, 0)
    assert len(planner.plan([entry])[0].tokens) == 4


BROKEN = {
    "2 drafts for 1 requests": [Draft(), Draft()],
    "0 drafts for 1 requests": [],
    "3 tokens for request 1, at most 2 were requested": [Draft((1, 2, 3))],
    "token -1 for request 1": [Draft((3, -1))],
    r"token 10 for request 1, ids are in \[0, 10\)": [Draft((10,))],
    r"Tensor tensor\(1\) for request 1 as a token, ids are ints": [Draft(torch.tensor([1]))],
    r"distributions of shape \[2, 10\] for request 1, need \[1, 10\]": [Draft((1,), torch.ones(2, 10))],
    r"distributions of shape \[1, 9\]": [Draft((1,), torch.ones(1, 9))],
    r"distributions of shape \[10\]": [Draft((1,), torch.ones(10))],
    r"distributions of torch.int64": [Draft((1,), torch.ones(1, 10, dtype=torch.int64))],
}


@pytest.mark.parametrize("message", BROKEN)
def test_answer_that_breaks_the_contract_names_the_drafter(message: str) -> None:
    with pytest.raises(ValueError, match=f"drafter BrokenDrafter returned {message}"):
        DraftPlanner(BrokenDrafter(BROKEN[message]), 8, VOCAB).plan(limits_of(2))


def test_drafts_within_the_contract_pass() -> None:
    drafts = [Draft((0, 9), torch.ones(2, 10)), Draft(), Draft((4,))]
    assert DraftPlanner(BrokenDrafter(drafts), 8, VOCAB).plan(limits_of(2, 2, 2)) == drafts


@pytest.mark.parametrize(("max_drafts", "vocab_size"), [(0, 5), (1, 0)])
def test_sizes_below_one_are_refused(max_drafts: int, vocab_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1, found 0"):
        DraftPlanner(CountingDrafter(), max_drafts, vocab_size)


def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    class OwnVocabulary(CountingDrafter):
        vocab_size = VOCAB

    DraftPlanner(OwnVocabulary(), 2, VOCAB)
    with pytest.raises(ValueError, match=f"OwnVocabulary drafts from a vocabulary of {VOCAB} tokens, .* has 12"):
        DraftPlanner(OwnVocabulary(), 2, 12)


def test_no_drafts_answers_every_row_with_an_empty_draft() -> None:
    planner = NoDrafts()
    limits = limits_of(2, 3)
    assert planner.max_drafts == 0 and planner.plan(limits) == [Draft(), Draft()]
    planner.note(limits[0].row, 0, 0)
    planner.forget(1)
