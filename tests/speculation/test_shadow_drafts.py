"""Properties of drafts that are compared with what a row writes by itself."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation.acceptance import ShadowDrafts
from megatron_mamba_cache.speculation.draft_planner import DraftPlanner
from megatron_mamba_cache.speculation.draft_policy import DraftPolicy
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.speculation.running_requests import row_of
from tests.speculation.simulated_steps import NANO_30B, NO_LIMIT, time_of

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(TOKENS, TOKENS, st.integers(1, 3))
def test_a_draft_ends_once_its_outcome_is_known(draft: list[int], reply: list[int], at_once: int) -> None:
    row, watched = row_of([5], generated=[1, 2]), ShadowDrafts()
    assert not watched.num_tokens(row)
    watched.watch(row, tuple(draft))
    assert watched.num_tokens(row) == len(draft)
    right = next((place for place, (one, other) in enumerate(zip(draft, reply, strict=False)) if one != other), None)
    known = right is not None or len(reply) >= len(draft)
    outcomes = []
    for begin in range(0, len(reply), at_once):
        row.generated.extend(reply[begin : begin + at_once])
        outcomes += watched.ended([row])
    expected = [(0, len(draft), len(draft) if right is None else right)] if known else []
    assert outcomes == expected and (watched.num_tokens(row) == 0) == known


def test_a_forgotten_request_has_no_draft() -> None:
    row, watched = row_of([5], request_id=3), ShadowDrafts()
    watched.watch(row, (1,))
    watched.forget(3)
    assert not watched.num_tokens(row)
    row.generated.append(1)
    assert not list(watched.ended([row]))


class KnowsTheReply:
    """Proposes 7s, until it fails."""

    def __init__(self) -> None:
        self.num_calls, self.fails, self.forgotten = 0, False, 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.num_calls += 1
        if self.fails:
            raise RuntimeError("no more")
        return [Draft((7,) * request.num_tokens) for request in requests]

    def forget(self, request_id: int) -> None:
        self.forgotten += 1


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_rest_draft_again_once_what_they_write_is_proposed(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, row = KnowsTheReply(), row_of([5])
    planner = DraftPlanner(drafter, 4, 10, DraftPolicy(time_of(NANO_30B), watches=True))

    def step(token: int) -> bool:
        (count,) = planner.counts([row], [4], NO_LIMIT)
        row.generated.append(token)
        planner.note_step([row])
        return count > 0

    for _ in range(40):  # wrong ones, verified by steps
        planner._policy.note(0, 4, 0)
    assert not any(step(1) for _ in range(50)) and planner.rest([row])
    asked, drafter.fails = drafter.num_calls, fails
    assert asked >= 49
    drafted = [step(7) for _ in range(60)]
    print(f"asked {asked} and {drafter.num_calls - asked} times; steps with drafts: {sum(drafted)} of 60")
    assert any(drafted) == (not fails)
    assert drafter.forgotten == (len(drafted) - 3 if fails else 0)  # once each time, behind the draft that was open
    assert len(caplog.messages) == (6 if fails else 0)  # the first, second, fourth, ... time
