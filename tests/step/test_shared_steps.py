"""Expert-parallel ranks agree on the shape of each step, and on overlapping it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.policy.scheduler import QueueState
from megatron_mamba_cache.ranks.agreement import settings_of_peers
from megatron_mamba_cache.speculation.draft_planner import NoDrafts
from megatron_mamba_cache.step import padding_steps
from megatron_mamba_cache.step.shapes import StepShape
from megatron_mamba_cache.step.shared_steps import NO_REQUESTS, Part, SharedSteps
from tests.step.meetings import Meeting

SHAPES = (StepShape(1), StepShape(4), StepShape(8), StepShape(0, 1, 2, 32), StepShape(8, 1, 2, 32))
SURE, UNSURE = QueueState(is_settled=True), QueueState()


class Rows:
    """Running requests of a rank: the number of decode requests, and the scheduled tokens of each prompt."""

    def __init__(self, decoding: int, prompts: Sequence[int] = ()) -> None:
        spec = SimpleNamespace(prompt_len=1000)
        self.decoding = [SimpleNamespace()] * decoding
        self.prefilling = [SimpleNamespace(scheduled=count, computed=0, spec=spec) for count in prompts]

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)


def ranks_with(requests: Sequence[Rows], captured: list[int] | None = None) -> list[SharedSteps]:
    meeting = Meeting(len(requests))
    noted = [] if captured is None else captured
    return [
        SharedSteps(meeting, mine, NoDrafts(), lambda: SHAPES, lambda rank=rank: noted.append(rank))
        for rank, mine in enumerate(requests)
    ]


def on_each(ranks: Sequence[SharedSteps], ask: Callable[[int, SharedSteps], object]) -> list:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda pair: ask(*pair), enumerate(ranks)))


@pytest.mark.parametrize(
    ("requests", "shape"),
    [
        ((Rows(3), Rows(1)), StepShape(4)),
        ((Rows(0), Rows(0)), StepShape(1)),
        ((Rows(8), Rows(0, [20])), StepShape(8, 1, 2, 32)),
        ((Rows(0), Rows(0, [20, 5])), StepShape(0, 1, 2, 32)),
        ((Rows(2, [30]), Rows(0, [20, 16])), StepShape(2, 1, 2, 36)),  # no graph holds it
        ((Rows(9), Rows(1)), StepShape(9)),
    ],
)
def test_all_ranks_use_the_smallest_shape_that_fits_every_rank(requests: tuple[Rows, Rows], shape: StepShape) -> None:
    ranks = ranks_with(requests)
    assert on_each(ranks, lambda _, rank: rank.next_shape()) == [shape, shape]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Arguments of `agree_on_next` on one rank."""

    requests: int
    queue: QueueState
    wants_overlap: bool


sayings = st.builds(Ahead, st.integers(0, 9), st.sampled_from([SURE, UNSURE]), st.booleans())


@given(st.lists(sayings, min_size=2, max_size=4), st.integers(0, 8))
def test_ranks_agree_on_the_next_step_if_all_know_their_requests(reports: list[Ahead], present: int) -> None:
    ranks = ranks_with([Rows(present)] * len(reports))
    on_each(ranks, lambda _, rank: rank.next_shape())
    owed = on_each(
        ranks,
        lambda index, rank: rank.agree_on_next(
            StepShape(reports[index].requests), reports[index].queue, wants_overlap=reports[index].wants_overlap
        ),
    )
    all_sure = all(one.queue is SURE for one in reports)
    most = max(one.requests for one in reports)
    fixed = next((shape for shape in SHAPES[:3] if shape.num_decode_requests >= most), StepShape(most))
    is_owed = all_sure and any(one.wants_overlap for one in reports) and fixed == ranks[0].present
    assert owed == [is_owed] * len(reports) == [rank.is_owed for rank in ranks]
    assert [rank.is_fixed for rank in ranks] == [all_sure] * len(reports)
    if all_sure:  # then the shape is fixed, without another exchange
        assert ranks[0].next_shape() == fixed and not ranks[0].is_fixed and not ranks[0].is_owed


def test_step_without_a_graph_is_not_launched_early_by_any_rank() -> None:
    ranks = ranks_with([Rows(9), Rows(9)])
    on_each(ranks, lambda _, rank: rank.next_shape())
    assert on_each(ranks, lambda _, rank: rank.agree_on_next(StepShape(9), SURE, wants_overlap=True)) == [False, False]


def test_all_ranks_capture_graphs_together_before_the_next_step() -> None:
    captured: list[int] = []
    ranks = ranks_with([Rows(1), Rows(0)], captured)
    ranks[1].wants_capture = True
    assert on_each(ranks, lambda _, rank: rank.agree_on_next(NO_REQUESTS, SURE, wants_overlap=True)) == [False, False]
    on_each(ranks, lambda _, rank: rank.next_shape())
    assert sorted(captured) == [0, 1] and not ranks[1].wants_capture


def test_ranks_do_not_agree_on_the_next_step_early_while_a_rank_prefills() -> None:
    ranks = ranks_with([Rows(1), Rows(0, [32])])
    on_each(ranks, lambda _, rank: rank.next_shape())
    assert not any(on_each(ranks, lambda _, rank: rank.agree_on_next(NO_REQUESTS, SURE, wants_overlap=True)))
    assert not ranks[0].is_fixed and not ranks[1].is_fixed


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 512), ("num_cuda_graphs", 3), ("num_speculative_tokens", 2)]
)
def test_ranks_with_different_graph_settings_are_refused(field: str, value: int) -> None:
    meeting = Meeting(2)
    settings = [CacheConfig(**{"num_cuda_graphs": 2, **given}).resolved() for given in ({}, {field: value})]

    def refused(config: CacheConfig) -> str:
        with pytest.raises(ValueError) as error:
            settings_of_peers(config, meeting)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(refused, settings):
            assert message.startswith(f"{field} ranges from ") and "over the expert-parallel ranks" in message


def test_ranks_use_the_smallest_max_requests_of_all_ranks() -> None:
    meeting = Meeting(2)
    settings = [CacheConfig(max_requests=most).resolved() for most in (4, 9)]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda config: settings_of_peers(config, meeting), settings)
        assert [config.max_requests for config in found] == [4, 4]


class Failing:
    """Fake runner and model of a rank whose step fails; records the launches."""

    def __init__(self, sharing: SharedSteps) -> None:
        self.sharing, self.graphs, self.queue = sharing, None, UNSURE
        self.overlapped_steps, self.planner = SimpleNamespace(take=lambda: None), NoDrafts()


PARTS = {
    Part.BEGUN: lambda rank: rank.begin(),
    Part.AGREED: lambda rank: (rank.begin(), rank.next_shape()),
    Part.LAUNCHED: lambda rank: (rank.begin(), rank.next_shape(), rank.note_launched()),
}


@pytest.mark.parametrize("part", PARTS)
def test_rank_whose_step_fails_still_makes_all_expert_exchanges(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[StepShape] = []
    monkeypatch.setattr(padding_steps, "_compute_padding", lambda shape, *_, eagerly: computed.append(shape))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = SimpleNamespace(resuming_exchanges=lambda: nullcontext(False))

    def step(number: int, rank: SharedSteps) -> bool:
        if number == 0:
            PARTS[part](rank)
            assert rank.part is part
            padding_steps.complete_failed_step(model, Failing(rank))
        else:
            PARTS[Part.LAUNCHED](rank)
            rank.agree_on_next(StepShape(3), SURE, wants_overlap=True)
        return rank.part is Part.COMPLETE and not rank.is_fixed and not rank.is_owed

    ranks = ranks_with([Rows(2), Rows(3)])
    for _ in range(2):  # complete the failed step, then the next one
        computed.clear()
        assert on_each(ranks, step) == [True, True]
        assert computed == ([] if part is Part.LAUNCHED else [StepShape(4)])
