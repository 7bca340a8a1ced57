"""Steps overlap while drafting is paused for all requests, and drafts stay the same."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from megatron_mamba_cache.speculation.draft_policy import SHORTEST_PAUSE
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.overlapped_runs import is_ahead, start

pytestmark = pytest.mark.usefixtures("either_form")


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


class AlwaysWrong:
    """Drafts a token that differs from one known reply."""

    def __init__(self, reply: list[int]) -> None:
        self._reply = reply

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(((self._reply[len(request.running.generated)] + 1) % 96,)) for request in requests]

    def forget(self, request_id: int) -> None:
        """Do nothing."""


class RightOrNothing:
    """Drafts wrong tokens for request 0; for others their replies, but nothing in every seventh step."""

    def __init__(self, replies: list[list[int]]) -> None:
        self._replies = replies

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        request_id, start = request.running.request_id, len(request.running.generated)
        right = self._replies[request_id][start : start + request.num_tokens]
        if request_id == 0:
            return Draft(tuple((token + 1) % 96 for token in right))
        return Draft(tuple(right) if start % 7 else ())

    def forget(self, request_id: int) -> None:
        """Do nothing."""


@pytest.mark.parametrize("order", [1, -1])
def test_request_keeps_its_drafts_while_drafting_is_paused_for_others(order: int) -> None:
    plain = start(2, 80)
    plain.finish()
    replies = [plain.tokens(0), plain.tokens(1)]
    drafts = []
    for overlaps in (False, True):
        drafter = RightOrNothing(replies)
        run = start(2, 80, num_speculative_tokens=2, drafter=drafter, run_ahead=overlaps)
        run.context.running_requests[:] = run.context.running_requests[::order]
        run.finish()
        drafts.append([run.engine.draft_counts(request_id) for request_id in range(2)])
    assert drafts[0] == drafts[1] and drafts[0][1].accepted > 10


def test_steps_overlap_while_drafting_is_paused() -> None:
    plain = start(1, 80)
    plain.finish()
    reply = plain.tokens(0)
    num_drafted: list[list[int]] = []
    for overlaps in (False, True):
        run = start(1, 80, num_speculative_tokens=2, drafter=AlwaysWrong([*reply, 0]), run_ahead=overlaps)
        num_drafted.append([])
        num_early = 0
        while run.engine.has_unfinished_requests():
            num_early += is_ahead(run)
            before = run.counters.draft_tokens
            run.step()
            num_drafted[-1].append(run.counters.draft_tokens - before)
        assert run.tokens(0) == reply and not run.counters.accepted_tokens
        assert num_early > 30 if overlaps else not num_early
        run.assert_nothing_held()
    assert num_drafted[0] == num_drafted[1]
    # Two tokens are drafted until that seems not to pay, then at most by probes.
    drafted = [index for index, count in enumerate(num_drafted[1]) if count]
    rests = [later - earlier - 1 for earlier, later in pairwise([*drafted, len(num_drafted[1])])]
    print(f"steps with drafts: {drafted}")
    assert max(rests) >= SHORTEST_PAUSE and len(drafted) < 12
