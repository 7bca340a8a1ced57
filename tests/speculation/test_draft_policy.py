"""What drafts bring and cost by the policy, in simulated steps of dense models and of models with experts."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from megatron_mamba_cache.speculation.draft_policy import (
    LONGEST_REST,
    PATIENCE,
    SHORTEST_REST,
    TRIAL_DRAFTS,
    AllDrafts,
    DraftPolicy,
)
from tests.speculation.running_requests import row_of
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


watched = pytest.mark.parametrize("watches", [False, True], ids=["probes", "watches"])


def gain(model: str, num_rows: int, chance: float, policy: DraftPolicy | AllDrafts) -> float:
    """Return the tokens a second with drafts, of those without."""
    time = time_of(MODELS[model])
    with_drafts = simulate(policy, time, num_rows, lambda _id: chance, num_steps=NUM_STEPS)
    return with_drafts.speed / plain_steps(time, num_rows, NUM_STEPS).speed


@cache
def best_fixed(model: str, num_rows: int, chance: float) -> float:
    """Return what the best number of drafts in every step gains."""
    return max(gain(model, num_rows, chance, FixedCounts(number)) for number in (1, 2, MOST))


def policy_of(model: str, *, watches: bool) -> DraftPolicy:
    """Return a policy that knows nothing yet."""
    return DraftPolicy(time_of(MODELS[model]), watches=watches)


@watched
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_useless_drafts_cost_2_percent_at_most(model: str, num_rows: int, watches: bool) -> None:
    for chance in (0.0, 0.02, 0.05):
        found = gain(model, num_rows, chance, policy_of(model, watches=watches))
        print(f"{model}, {num_rows} rows, right {chance:.0%}: {found:.4f} of no drafts")
        assert found >= (0.985 if watches else 0.98)


@watched
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("chance", [0.15, 0.3, 0.5, 0.7, 0.9])
def test_drafts_bring_nearly_what_the_best_fixed_number_brings(
    model: str, num_rows: int, chance: float, watches: bool
) -> None:
    fixed = best_fixed(model, num_rows, chance)
    found = gain(model, num_rows, chance, policy_of(model, watches=watches))
    print(f"{model}, {num_rows} rows, right {chance:.0%}: {found:.3f} of no drafts, the best fixed number {fixed:.3f}")
    assert found >= (0.94 if watches else 0.9) * max(1.0, fixed) and found >= 0.96


@watched
@pytest.mark.parametrize("model", MODELS)
def test_one_row_that_repeats_itself_drafts_beside_others_that_do_not(model: str, watches: bool) -> None:
    time, policy = time_of(MODELS[model]), policy_of(model, watches=watches)
    found = simulate(policy, time, 8, lambda request_id: 0.97 if request_id % 8 == 0 else 0.03, num_steps=NUM_STEPS)
    plain = plain_steps(time, 8, NUM_STEPS)
    print(f"{model}: {found.speed / plain.speed:.3f} of no drafts")
    assert found.speed > (1.03 if model == "8b" else 0.98) * plain.speed


@watched
@pytest.mark.parametrize("offers", [0.0, 0.1])
def test_a_drafter_that_finds_nothing_costs_hardly_anything(offers: float, watches: bool) -> None:
    time = time_of(MODELS["8b"])
    found = simulate(policy_of("8b", watches=watches), time, 1, lambda _id: 0.3, num_steps=NUM_STEPS, offers=offers)
    plain = plain_steps(time, 1, NUM_STEPS)
    print(f"{offers:.0%} offered: {found.speed / plain.speed:.3f} of no drafts")
    assert found.speed > (0.97 if watches or not offers else 0.9) * plain.speed


def test_a_drafter_that_takes_longer_than_the_model_is_asked_by_probes_only() -> None:
    time = time_of(MODELS["8b"])
    policy = DraftPolicy(time, lambda num_rows, most: most * time.seconds(num_rows, 0))
    found = simulate(policy, time, 4, lambda _id: 0.9, num_steps=NUM_STEPS)
    probes = found.num_drafted / (4 * TRIAL_DRAFTS)
    assert NUM_STEPS / LONGEST_REST - 1 <= probes <= NUM_STEPS / LONGEST_REST + 3  # two or three at the start


def test_a_drafter_that_is_nearly_always_right_is_tried_long_enough_to_be_known() -> None:
    time = time_of(MODELS["8b"])
    policy = DraftPolicy(time, lambda num_rows, most: 0.6 * most * time.seconds(num_rows, 0))
    assert simulate(policy, time, 1, lambda _id: 0.98, num_steps=300).num_drafted > 800
    assert policy.counts([row_of([0], request_id=9999)], [MOST], NO_LIMIT) == [MOST]


@pytest.mark.parametrize("answer", [float("nan"), -1.0, None, "raises"], ids=str)
def test_a_drafter_that_does_not_say_how_long_it_takes_is_tried_now_and_then(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def seconds(num_rows: int, most: int) -> float:
        if answer == "raises":
            raise RuntimeError("unknown")
        return answer

    time = time_of(MODELS["8b"])
    found = simulate(DraftPolicy(time, seconds), time, 2, lambda _id: 0.9, num_steps=600)
    assert 16 <= found.num_drafted <= 2 * TRIAL_DRAFTS * 7
    assert len(caplog.messages) == (answer in (None, "raises"))


def test_a_draft_model_that_reads_a_prompt_is_asked_until_it_has() -> None:
    row = row_of([0])
    for is_patient in (True, False):
        policy = DraftPolicy(time_of(MODELS["8b"]), lambda num_rows, most: 1e-4, is_patient=is_patient)
        asked = []
        for _ in range(40):
            asked.append(policy.counts([row], [4], NO_LIMIT)[0] > 0)
            policy.note_step([row], asked=asked[-1], drafted=False)
        assert all(asked) == is_patient and all(asked[:PATIENCE])


def test_drafts_that_were_foreseen_follow_what_was_known_then() -> None:
    rows = [row_of([0], request_id=index) for index in range(3)]

    def foreseeing() -> DraftPolicy:
        policy = DraftPolicy(time_of(NANO_30B))
        for row in rows:
            policy.note(row.request_id, 40, 40)
        policy.foresee(rows, 4)
        for row in 20 * rows:
            policy.note(row.request_id, 4, 0)  # by the step that ran meanwhile
        return policy

    landed, failed = foreseeing(), foreseeing()
    landed.note_step(rows, asked=True, drafted=True)
    assert landed.counts(rows, [4] * 3, NO_LIMIT) == [4, 4, 4]
    expected = [failed.counts(rows, [4] * 3, NO_LIMIT), failed.counts(rows[:2], [4] * 2, NO_LIMIT)]
    assert expected == [[0, 0, 0], [0, 0]]  # of steps that were not foreseen
    others = foreseeing()
    others.note_step(rows, asked=True, drafted=True)
    assert others.counts(rows[:2], [4] * 2, NO_LIMIT) == [0, 0]
    less_room = foreseeing()
    less_room.note_step(rows, asked=True, drafted=True)
    assert less_room.counts(rows, [4, 3, 4], NO_LIMIT) == [0, 0, 0]
    landed.note_step(rows, asked=True, drafted=True)
    assert landed.counts(rows, [4] * 3, NO_LIMIT) == [0, 0, 0]


def test_drafts_that_a_budget_cuts_are_left_out_if_too_few_remain() -> None:
    policy = DraftPolicy(time_of(MODELS["8b"]))
    rows = [row_of([0], request_id=index) for index in range(128)]
    for row in rows:
        for _ in range(10):
            policy.note(row.request_id, 4, 4)
    assert policy.counts(rows[:4], [4] * 4, 6) == [4, 2, 0, 0]
    assert sum(policy.counts(rows, [4] * 128, NO_LIMIT)) == 512 and not any(policy.counts(rows, [4] * 128, 6))
    assert AllDrafts().counts(rows[:3], [4] * 3, 6) == [4, 2, 0] and AllDrafts().counts(rows[:1], [4], -3) == [0]


@watched
@pytest.mark.parametrize("num_rows", [1, 8])
def test_rows_begin_to_draft_again_once_it_pays(num_rows: int, watches: bool) -> None:
    time, policy = time_of(MODELS["nano"]), policy_of("nano", watches=watches)
    useless = simulate(policy, time, num_rows, lambda _id: 0.0, num_steps=400)
    useful = simulate(policy, time, num_rows, lambda _id: 0.95, num_steps=400)
    print(f"{useless.num_drafted / num_rows} drafts, then {useful.num_drafted / num_rows} of a row")
    assert useless.num_drafted < 60 * num_rows and useful.num_drafted > (1200 if watches else 500) * num_rows


def test_experts_shared_by_ranks_are_read_for_the_tokens_of_all() -> None:
    alone, shared = time_of(NANO_30B), wider(time_of(NANO_30B), 2)
    assert shared.reads.experts_hit(8) == pytest.approx(alone.reads.experts_hit(16) / 2)


def test_nothing_is_decided_for_rows_without_room() -> None:
    policy = DraftPolicy(time_of(MODELS["8b"]))
    rows = [row_of([0], request_id=index) for index in range(3)]
    assert policy.counts(rows, [0, 0, 0], NO_LIMIT) == [0, 0, 0] and not policy.rests(rows)
    assert policy.counts(rows, [0, 4, 1], NO_LIMIT) == [0, 4, 1]


def test_a_rest_holds_for_its_rows_until_it_ends() -> None:
    time = time_of(MODELS["nano"])
    policy = DraftPolicy(time)
    rows = [row_of([0], request_id=index) for index in range(2)]
    asked: list[bool] = []
    for _ in range(3000):
        counts = policy.counts(rows, [MOST] * 2, NO_LIMIT)
        assert policy.counts(rows, [MOST] * 2, NO_LIMIT) == counts  # planned again
        rested = policy.rests(rows)
        for row, number in zip(rows, counts, strict=True):
            if number:
                policy.note(row.request_id, number, 0)
        policy.note_step(rows, asked=any(counts), drafted=any(counts))
        asked.append(any(counts))
        if rested:
            assert not any(counts) and policy.counts(rows, [MOST] * 2, NO_LIMIT) == [0, 0]
    steps = [step for step, drafts in enumerate(asked) if drafts]
    rests = [later - earlier for earlier, later in pairwise(steps)][-5:]
    print(f"steps with drafts: {steps}")
    assert rests and len(set(rests)) == 1 and SHORTEST_REST <= rests[0] <= LONGEST_REST
    assert policy.rests(rows[:1]) == policy.rests(rows)  # rows that leave end no rest
    assert not policy.rests([*rows, row_of([0], request_id=9)])


@pytest.mark.parametrize("policy", [AllDrafts(), DraftPolicy(time_of(NANO_30B))], ids=["all", "adaptive"])
def test_no_rows_want_no_drafts(policy: AllDrafts | DraftPolicy) -> None:
    """Else an idle rank would have the ranks that share its experts compute steps of full width."""
    assert policy.rests([]) and policy.counts([], [], NO_LIMIT) == []


def test_a_forgotten_request_is_new() -> None:
    policy = DraftPolicy(time_of(MODELS["8b"]))
    row = row_of([0], request_id=5)
    for _ in range(30):
        policy.note(5, 4, 0)
        policy.note(6, 4, 4)
    assert policy.counts([row], [4], NO_LIMIT) == [0]
    policy.forget(5)
    assert policy.counts([row], [4], NO_LIMIT) == [4]
