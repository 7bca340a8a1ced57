"""Properties of shadow drafts, which are compared with the tokens that a request generates later."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation.acceptance import ShadowDrafts
from megatron_mamba_cache.speculation.draft_planner import DraftPlanner
from megatron_mamba_cache.speculation.draft_policy import DraftPolicy
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.speculation.running_requests import request_of
from tests.speculation.simulated_steps import NANO_30B, NO_LIMIT, time_of

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(TOKENS, TOKENS, st.integers(1, 3))
def test_shadow_draft_ends_when_its_outcome_is_known(draft: list[int], reply: list[int], at_once: int) -> None:
    request, shadowed = request_of([5], generated=[1, 2]), ShadowDrafts()
    assert not shadowed.num_tokens(request)
    shadowed.start(request, tuple(draft))
    assert shadowed.num_tokens(request) == len(draft)
    right = next((index for index, (one, other) in enumerate(zip(draft, reply, strict=False)) if one != other), None)
    known = right is not None or len(reply) >= len(draft)
    outcomes = []
    for begin in range(0, len(reply), at_once):
        request.generated.extend(reply[begin : begin + at_once])
        outcomes += shadowed.pop_ended()
    expected = [(0, len(draft), len(draft) if right is None else right)] if known else []
    assert outcomes == expected and (shadowed.num_tokens(request) == 0) == known


def test_forgotten_request_has_no_shadow_draft() -> None:
    request, shadowed = request_of([5], request_id=3), ShadowDrafts()
    shadowed.start(request, (1,))
    shadowed.forget(3)
    assert not shadowed.num_tokens(request)
    request.generated.append(1)
    assert not shadowed.pop_ended()


class KnowsTheReply:
    """Drafter that proposes 7s, and raises if it is set to fail."""

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
def test_drafting_resumes_when_shadow_drafts_are_correct(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    drafter, request = KnowsTheReply(), request_of([5])
    planner = DraftPlanner(drafter, 4, 10, DraftPolicy(time_of(NANO_30B), shadows=True))

    def step(token: int) -> bool:
        (count,) = planner.counts([request], [4], NO_LIMIT)
        request.generated.append(token)
        planner.note_step([request])
        return count > 0

    for _ in range(40):  # rejected drafts in verified steps
        planner._policy.note([0], [4], [0])
    assert not any(step(1) for _ in range(50)) and planner.stays_paused([request])
    asked, drafter.fails = drafter.num_calls, fails
    assert asked >= 49
    drafted = [step(7) for _ in range(60)]
    print(f"asked {asked} and {drafter.num_calls - asked} times; steps with drafts: {sum(drafted)} of 60")
    assert any(drafted) == (not fails)
    assert drafter.forgotten == (len(drafted) - 3 if fails else 0)  # once per failed call
    assert len(caplog.messages) == (6 if fails else 0)  # failures 1, 2, 4, 8, ... are logged
