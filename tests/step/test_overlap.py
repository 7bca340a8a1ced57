"""The next step may be launched early only if every condition holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.policy.request_settings import SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.policy.scheduler import QueueState
from megatron_mamba_cache.speculation.all_drafts import AllDrafts
from megatron_mamba_cache.speculation.draft_planner import DraftPlanner, NoDrafts
from megatron_mamba_cache.speculation.prompt_lookup import PromptLookupDrafter
from megatron_mamba_cache.step.batch import StepBatch
from megatron_mamba_cache.step.logits import Draws
from megatron_mamba_cache.step.overlap import may_launch_drafts, may_overlap
from megatron_mamba_cache.step.overlapped_step import OverlappedStep
from megatron_mamba_cache.step.shapes import StepShape
from megatron_mamba_cache.step.step import Step
from tests.policy.small_cache import small_cache
from tests.step.step_requests import BLOCK, decoding, lay_out, running_request

TOKENS = [7, 8]


class Graph:
    """A captured step with a fixed answer to `can_launch_next`, which records its arguments."""

    shape = StepShape(2, 1)
    wanted_outputs = torch.empty(0)

    def __init__(self, can_launch: bool) -> None:
        self._can_launch = can_launch
        self.asked: list[tuple[Sequence[RunningRequest], Sequence[int] | None]] = []

    def can_launch_next(self, requests: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        self.asked.append((requests, tokens))
        return self._can_launch

    def lay_out(self, requests: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        raise NotImplementedError

    def forward(self) -> Tensor:
        raise NotImplementedError

    def verify(self, draws: Draws) -> Tensor:
        raise NotImplementedError

    def launch_next(self, requests: Sequence[RunningRequest]) -> OverlappedStep:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions for an early launch after a step of two requests; by default, all allow it."""

    is_wanted: bool = True
    is_captured: bool = True
    is_settled: bool = True
    has_waiting: bool = False
    tokens: Sequence[int] | None = None
    num_running: int = 2
    drafts_rest: bool = True
    can_launch: bool = True
    tokens_in_block: int = 3  # of each request before the step
    num_blocks: int = 2  # that are available
    block_size: int = BLOCK
    grammar: str = ""


ALL_HOLD = Conditions()
HOLDING = {
    "tokens unknown": ALL_HOLD,
    "tokens known": replace(ALL_HOLD, tokens=TOKENS),
    "tokens known, a request waits": replace(ALL_HOLD, tokens=TOKENS, has_waiting=True),
    "a request begins a block": replace(ALL_HOLD, tokens_in_block=BLOCK - 1),
    "a request completes a block": replace(ALL_HOLD, tokens_in_block=BLOCK - 2),
    "a request has completed a block": replace(ALL_HOLD, tokens=TOKENS, has_waiting=True, tokens_in_block=0),
    "a request has a grammar": replace(ALL_HOLD, grammar="{}"),
    "a request with a grammar begins a block": replace(ALL_HOLD, tokens_in_block=BLOCK - 1, grammar="{}"),
    "a request with a grammar completes a block": replace(ALL_HOLD, tokens_in_block=BLOCK - 2, grammar="{}"),
}
FAILING = {
    "not wanted": {"is_wanted": False},
    "eager": {"is_captured": False},
    "queue not settled": {"is_settled": False},
    "a running request is not in the step": {"num_running": 3},
    "drafts do not rest": {"drafts_rest": False},
    "the graph cannot feed it": {"can_launch": False},
    "no block for a request": {"tokens_in_block": BLOCK - 1, "num_blocks": 0},
    "blocks of one token": {"block_size": 1},
    "a request waits, and a request begins a block": {
        "tokens_in_block": BLOCK - 1,
        "tokens": TOKENS,
        "has_waiting": True,
    },
    "a request waits, and a request completes one": {
        "tokens_in_block": BLOCK - 2,
        "tokens": TOKENS,
        "has_waiting": True,
    },
}


def answer(conditions: Conditions) -> tuple[bool, Graph]:
    graph = Graph(conditions.can_launch)
    sampling = SamplingSettings(top_k=1, grammar=conditions.grammar)
    requests = [decoding(0), decoding(1, prompt_len=BLOCK + conditions.tokens_in_block, sampling=sampling)]
    batch = lay_out(requests, "cpu")
    cache = small_cache(num_blocks=2, block_size=conditions.block_size)
    cache.kv.allocate(2 - conditions.num_blocks)
    step = Step(batch, graph=graph if conditions.is_captured else None)
    planner = NoDrafts() if conditions.drafts_rest else DraftPlanner(PromptLookupDrafter(), 3, 100, AllDrafts())
    is_allowed = may_overlap(
        step,
        step.graph,
        conditions.num_running,
        QueueState(has_waiting=conditions.has_waiting, is_settled=conditions.is_settled),
        planner,
        conditions.tokens,
        cache,
        is_wanted=conditions.is_wanted,
    )
    return is_allowed, graph


@pytest.mark.parametrize("name", HOLDING)
def test_next_step_may_overlap_if_every_condition_holds(name: str) -> None:
    conditions = HOLDING[name]
    is_allowed, graph = answer(conditions)
    assert is_allowed
    [(requests, tokens)] = graph.asked
    assert [request.request_id for request in requests] == [0, 1] and tokens is conditions.tokens


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize("failing", FAILING)
def test_next_step_does_not_overlap_if_one_condition_fails(failing: str, holding: str) -> None:
    assert not answer(replace(HOLDING[holding], **FAILING[failing]))[0]  # type: ignore[arg-type]


def test_next_step_is_not_launched_before_tokens_are_read_while_a_request_waits() -> None:
    assert not answer(replace(ALL_HOLD, has_waiting=True))[0]


@dataclass(frozen=True, slots=True)
class DraftConditions:
    """Conditions for an early launch with drafts after a step of two requests; by default, all allow it."""

    is_wanted: bool = True
    has_drafter: bool = True
    is_captured: bool = True
    is_settled: bool = True
    has_waiting: bool = True
    num_left: int = 2
    num_others: int = 0
    is_paused: bool = False
    prefills: bool = False
    tokens_in_block: int = BLOCK - 5  # of each request; with one token and 3 drafts more, one is left in the block


FAILING_DRAFTS = {
    "not wanted": {"is_wanted": False},
    "no drafter": {"has_drafter": False},
    "eager": {"is_captured": False},
    "queue not settled": {"is_settled": False},
    "a request has ended": {"num_left": 1},
    "a running request is not in the step": {"num_others": 1},
    "a request has ended, and a running request is not in the step": {"num_left": 1, "num_others": 1},
    "a request is paused": {"is_paused": True},
    "a request prefilled": {"prefills": True},
    "a request waits, and a boundary is within reach": {"tokens_in_block": BLOCK - 4},
    "a request waits, and a request is at the end of its block": {"tokens_in_block": BLOCK - 1},
    "a request waits, and a boundary was reached": {"tokens_in_block": 0},
}


def may_draft(conditions: DraftConditions) -> bool:
    requests = [decoding(0, prompt_len=2), decoding(1, prompt_len=BLOCK + conditions.tokens_in_block)]
    if conditions.prefills:
        requests[1] = running_request(1, prompt_len=4, computed=0, scheduled=4)
    step = Step(lay_out(requests, "cpu"), graph=Graph(can_launch=True) if conditions.is_captured else None)
    for request in requests:  # it lands
        request.scheduled = 0
    requests[1].computed, requests[1].is_paused = BLOCK + conditions.tokens_in_block, conditions.is_paused
    return may_launch_drafts(
        step,
        [*requests[: conditions.num_left], *(decoding(2, prompt_len=2) for _ in range(conditions.num_others))],
        QueueState(has_waiting=conditions.has_waiting, is_settled=conditions.is_settled),
        DraftPlanner(PromptLookupDrafter(), 3, 100, AllDrafts()) if conditions.has_drafter else NoDrafts(),
        BLOCK,
        is_wanted=conditions.is_wanted,
    )


def test_next_step_with_drafts_may_overlap_if_every_condition_holds() -> None:
    assert may_draft(DraftConditions())
    for row in (0, BLOCK - 4, BLOCK - 1):
        assert may_draft(DraftConditions(has_waiting=False, tokens_in_block=row))


@pytest.mark.parametrize("failing", FAILING_DRAFTS)
def test_next_step_with_drafts_does_not_overlap_if_one_condition_fails(failing: str) -> None:
    assert not may_draft(replace(DraftConditions(), **FAILING_DRAFTS[failing]))  # type: ignore[arg-type]
