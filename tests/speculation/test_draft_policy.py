"""Gains and costs of the draft policy, in simulated steps of dense models and MoE models."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from megatron_mamba_cache.speculation.all_drafts import AllDrafts
from megatron_mamba_cache.speculation.draft_policy import (
    LONGEST_PAUSE,
    PATIENCE,
    SHORTEST_PAUSE,
    TRIAL_DRAFTS,
    DraftPolicy,
)
from tests.speculation.running_requests import request_of
from tests.speculation.simulated_steps import (
    MODELS,
    MOST,
    NANO_30B,
    NO_LIMIT,
    FixedCounts,
    plain_steps,
    simulate,
    time_of,
    wider,
)

NUM_STEPS = 1000
ROWS = [1, 8, 48]


shadowed = pytest.mark.parametrize("shadows", [False, True], ids=["probes", "shadows"])


def gain(model: str, num_requests: int, probability: float, policy: DraftPolicy | AllDrafts) -> float:
    """Return the tokens per second with this policy, relative to no drafts."""
    time = time_of(MODELS[model])
    with_drafts = simulate(policy, time, num_requests, lambda _id: probability, num_steps=NUM_STEPS)
    return with_drafts.speed / plain_steps(time, num_requests, NUM_STEPS).speed


@cache
def best_fixed(model: str, num_requests: int, probability: float) -> float:
    """Return the highest gain of any fixed number of drafts."""
    return max(gain(model, num_requests, probability, FixedCounts(number)) for number in (1, 2, MOST))


def policy_of(model: str, *, shadows: bool) -> DraftPolicy:
    """Return a new policy for this model."""
    return DraftPolicy(time_of(MODELS[model]), shadows=shadows)


@shadowed
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_requests", ROWS)
def test_inaccurate_drafts_cost_at_most_2_percent(model: str, num_requests: int, shadows: bool) -> None:
    for probability in (0.0, 0.02, 0.05):
        found = gain(model, num_requests, probability, policy_of(model, shadows=shadows))
        print(f"{model}, {num_requests} requests, right {probability:.0%}: {found:.4f} of no drafts")
        assert found >= (0.985 if shadows else 0.98)


@shadowed
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_requests", ROWS)
@pytest.mark.parametrize(
    "probability",
    [0.15, pytest.param(0.3, marks=pytest.mark.long), 0.5, pytest.param(0.7, marks=pytest.mark.long), 0.9],
)
def test_adaptive_counts_gain_nearly_as_much_as_the_best_fixed_count(
    model: str, num_requests: int, probability: float, shadows: bool
) -> None:
    fixed = best_fixed(model, num_requests, probability)
    found = gain(model, num_requests, probability, policy_of(model, shadows=shadows))
    print(
        f"{model}, {num_requests} requests, right {probability:.0%}: {found:.3f} of no drafts, best fixed {fixed:.3f}"
    )
    assert found >= (0.94 if shadows else 0.9) * max(1.0, fixed) and found >= 0.96


@shadowed
@pytest.mark.parametrize("model", MODELS)
def test_drafting_for_one_accurate_request_among_others_is_worthwhile(model: str, shadows: bool) -> None:
    time, policy = time_of(MODELS[model]), policy_of(model, shadows=shadows)
    found = simulate(policy, time, 8, lambda request_id: 0.97 if request_id % 8 == 0 else 0.03, num_steps=NUM_STEPS)
    plain = plain_steps(time, 8, NUM_STEPS)
    print(f"{model}: {found.speed / plain.speed:.3f} of no drafts")
    assert found.speed > (1.03 if model == "8b" else 0.98) * plain.speed


@shadowed
@pytest.mark.parametrize("offers", [0.0, 0.1])
def test_drafter_without_proposals_costs_almost_nothing(offers: float, shadows: bool) -> None:
    time = time_of(MODELS["8b"])
    found = simulate(policy_of("8b", shadows=shadows), time, 1, lambda _id: 0.3, num_steps=NUM_STEPS, offers=offers)
    plain = plain_steps(time, 1, NUM_STEPS)
    print(f"{offers:.0%} offered: {found.speed / plain.speed:.3f} of no drafts")
    assert found.speed > (0.97 if shadows or not offers else 0.9) * plain.speed


def test_drafter_slower_than_the_model_runs_only_in_trials() -> None:
    time = time_of(MODELS["8b"])
    policy = DraftPolicy(time, lambda num_requests, most: most * time.seconds(num_requests, 0))
    found = simulate(policy, time, 4, lambda _id: 0.9, num_steps=NUM_STEPS)
    probes = found.num_drafted / (4 * TRIAL_DRAFTS)
    assert NUM_STEPS / LONGEST_PAUSE - 1 <= probes <= NUM_STEPS / LONGEST_PAUSE + 3  # two or three more at the start


def test_accurate_drafter_is_tried_until_its_accuracy_is_known() -> None:
    time = time_of(MODELS["8b"])
    policy = DraftPolicy(time, lambda num_requests, most: 0.6 * most * time.seconds(num_requests, 0))
    assert simulate(policy, time, 1, lambda _id: 0.98, num_steps=300).num_drafted > 800
    assert policy.counts([request_of([0], request_id=9999)], [MOST], NO_LIMIT) == [MOST]


@pytest.mark.parametrize("answer", [float("nan"), -1.0, None, "raises"], ids=str)
def test_drafter_of_unknown_speed_is_tried_occasionally(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    def seconds(num_requests: int, most: int) -> float:
        if answer == "raises":
            raise RuntimeError("unknown")
        return answer

    time = time_of(MODELS["8b"])
    found = simulate(DraftPolicy(time, seconds), time, 2, lambda _id: 0.9, num_steps=600)
    assert 16 <= found.num_drafted <= 2 * TRIAL_DRAFTS * 7
    assert len(caplog.messages) == (answer in (None, "raises"))


def test_draft_model_is_called_until_the_prompt_is_prefilled() -> None:
    request = request_of([0])
    for is_patient in (True, False):
        policy = DraftPolicy(time_of(MODELS["8b"]), lambda num_requests, most: 1e-4, is_patient=is_patient)
        asked = []
        for _ in range(40):
            asked.append(policy.counts([request], [4], NO_LIMIT)[0] > 0)
            policy.note_step([request], asked=asked[-1], drafted=False)
        assert all(asked) == is_patient and all(asked[:PATIENCE])


@pytest.mark.parametrize("asked", [False, True], ids=["no block is free", "no draft is allowed"])
def test_trial_that_verifies_no_draft_is_repeated_soon_but_not_in_each_step(asked: bool) -> None:
    policy, request = DraftPolicy(time_of(MODELS["8b"]), lambda _, most: 2e-4 * most, is_patient=True), request_of([0])
    for _ in range(40):
        policy.note([0], [4], [0])

    def trials(num_steps: int, *, drafts: bool) -> list[int]:
        found = []
        for step in range(num_steps):
            is_trial = any(policy.counts([request], [MOST], NO_LIMIT))
            policy.note_step([request], asked=is_trial and (asked or drafts), drafted=is_trial and drafts)
            if is_trial:
                found.append(step)
        return found

    begun = trials(1000, drafts=True)
    print(f"trials with drafts: {begun}")
    (gap,) = {after - before for before, after in pairwise(begun[1:])}
    empty = trials(1000, drafts=False)
    print(f"trials without drafts: {empty}")
    distances = [after - before for before, after in pairwise(empty)]
    assert distances[0] == 1 + 2 * SHORTEST_PAUSE < gap and distances[-1] == 1 + LONGEST_PAUSE
    assert distances == sorted(distances)
    assert trials(LONGEST_PAUSE + 2, drafts=True)


def test_counts_prepared_in_advance_ignore_later_outcomes() -> None:
    requests = [request_of([0], request_id=index) for index in range(3)]
    policy = DraftPolicy(time_of(NANO_30B))
    for request in requests:
        policy.note([request.request_id], [40], [40])
    policy.decide_next(requests, 4)
    for request in 20 * requests:
        policy.note([request.request_id], [4], [0])  # outcomes of the step that ran in the meantime
    policy.note_step(requests, asked=True, drafted=True)
    assert policy.counts(requests, [4] * 3, NO_LIMIT) == policy.counts(requests, [4] * 3, NO_LIMIT) == [4, 4, 4]
    assert policy.counts(requests, [4, 3, 0], NO_LIMIT) == [4, 3, 0]
    assert policy.counts(requests[:2], [4] * 2, NO_LIMIT) == [0, 0]  # other requests, so a new estimate


@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_estimates_are_rare_while_the_same_requests_run(num_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    estimates, estimate = [], DraftPolicy._estimate

    def counted(self: DraftPolicy, *arguments: Any) -> Any:
        estimates.append(arguments)
        return estimate(self, *arguments)

    monkeypatch.setattr(DraftPolicy, "_estimate", counted)
    simulate(DraftPolicy(time_of(MODELS["8b"])), time_of(MODELS["8b"]), num_requests, lambda _id: 0.9, num_steps=400)
    assert 0 < len(estimates) <= 400 / 6  # requests end about every 36 / num_requests steps


def test_drafts_limited_by_the_budget_are_dropped_if_too_few_remain() -> None:
    policy = DraftPolicy(time_of(MODELS["8b"]))
    requests = [request_of([0], request_id=index) for index in range(128)]
    for request in requests:
        for _ in range(10):
            policy.note([request.request_id], [4], [4])
    assert policy.counts(requests[:4], [4] * 4, 6) == [4, 2, 0, 0]
    assert sum(policy.counts(requests, [4] * 128, NO_LIMIT)) == 512 and not any(policy.counts(requests, [4] * 128, 6))
    assert AllDrafts().counts(requests[:3], [4] * 3, 6) == [4, 2, 0] and AllDrafts().counts(requests[:1], [4], -3) == [
        0
    ]


@shadowed
@pytest.mark.parametrize("num_requests", [1, 8])
def test_drafting_resumes_when_drafts_become_accurate(num_requests: int, shadows: bool) -> None:
    time, policy = time_of(MODELS["nano"]), policy_of("nano", shadows=shadows)
    useless = simulate(policy, time, num_requests, lambda _id: 0.0, num_steps=400)
    useful = simulate(policy, time, num_requests, lambda _id: 0.95, num_steps=400)
    print(f"{useless.num_drafted / num_requests} drafts, then {useful.num_drafted / num_requests} of a request")
    assert useless.num_drafted < 20 * num_requests and useful.num_drafted > (1200 if shadows else 900) * num_requests


def test_expert_reads_count_tokens_of_all_expert_parallel_ranks() -> None:
    alone, shared = time_of(NANO_30B), wider(time_of(NANO_30B), 2)
    assert shared.reads.experts_hit(8) == pytest.approx(alone.reads.experts_hit(16) / 2)


def test_requests_that_may_not_draft_do_not_start_a_pause() -> None:
    policy = DraftPolicy(time_of(MODELS["8b"]))
    requests = [request_of([0], request_id=index) for index in range(3)]
    assert policy.counts(requests, [0, 0, 0], NO_LIMIT) == [0, 0, 0] and not policy.stays_paused(requests)
    assert policy.counts(requests, [0, 4, 1], NO_LIMIT) == [0, 4, 1]


def test_pause_ends_and_applies_only_to_its_requests() -> None:
    time = time_of(MODELS["nano"])
    policy = DraftPolicy(time)
    requests = [request_of([0], request_id=index) for index in range(2)]
    asked: list[bool] = []
    for _ in range(3000):
        counts = policy.counts(requests, [MOST] * 2, NO_LIMIT)
        assert policy.counts(requests, [MOST] * 2, NO_LIMIT) == counts  # planned again
        rested = policy.stays_paused(requests)
        for request, number in zip(requests, counts, strict=True):
            if number:
                policy.note([request.request_id], [number], [0])
        policy.note_step(requests, asked=any(counts), drafted=any(counts))
        asked.append(any(counts))
        if rested:
            assert not any(counts) and policy.counts(requests, [MOST] * 2, NO_LIMIT) == [0, 0]
    steps = [step for step, drafts in enumerate(asked) if drafts]
    stays_paused = [later - earlier for earlier, later in pairwise(steps)][-5:]
    print(f"steps with drafts: {steps}")
    assert stays_paused and len(set(stays_paused)) == 1 and SHORTEST_PAUSE <= stays_paused[0] <= LONGEST_PAUSE
    assert policy.stays_paused(requests[:1]) == policy.stays_paused(requests)  # the pause goes on when others leave
    assert not policy.stays_paused([*requests, request_of([0], request_id=9)])


@pytest.mark.parametrize("policy", [AllDrafts(), DraftPolicy(time_of(NANO_30B))], ids=["all", "adaptive"])
def test_step_without_requests_plans_no_drafts(policy: AllDrafts | DraftPolicy) -> None:
    """Otherwise, an idle rank would make the other expert-parallel ranks compute steps with drafts."""
    assert policy.stays_paused([]) and policy.counts([], [], NO_LIMIT) == []


def test_acceptance_estimate_of_a_forgotten_request_is_reset() -> None:
    policy = DraftPolicy(time_of(MODELS["8b"]))
    request = request_of([0], request_id=5)
    for _ in range(30):
        policy.note([5], [4], [0])
        policy.note([6], [4], [4])
    assert policy.counts([request], [4], NO_LIMIT) == [0]
    policy.forget(5)
    assert policy.counts([request], [4], NO_LIMIT) == [4]
