"""Ranks of a model agree on capacities and decisions; if they diverge, all of them report it."""

import pytest

from tests.distributed import agreement_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds

TENSOR, PIPELINE = Layout(tensor=2), Layout(pipeline=2)


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_capacity_is_the_minimum_over_all_ranks_even_after_a_suspend(layout: Layout, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(agreement_cases.capacities, layout, "M*M*", [40, 30], [9, 12], [5, 4])
    num_live = 4
    assert first == second
    assert first[0] == first[1] == (30, first[0][1], 9 + num_live, num_live)


def test_pipeline_stage_without_a_layer_type_does_not_limit_that_capacity(worlds: Worlds) -> None:
    outcomes = worlds.of(2).run(agreement_cases.capacities, PIPELINE, "MM*-", [7, 30], [9, 12], [4, 4])
    assert outcomes[0] == outcomes[1]
    blocks, _, slots, _ = outcomes[0][0]
    assert (blocks, slots) == (30, 9 + 4)  # the first stage has the states, the second the KV blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([{}, {"max_tokens": 128}], "max_tokens differs between the ranks of the model: [64, 128]"),
    ],
)
def test_different_settings_raise_an_error_on_all_ranks(settings: list[dict], message: str, worlds: Worlds) -> None:
    for error in worlds.of(2).run(agreement_cases.error_of_settings, TENSOR, settings):
        assert message in error and error.startswith("ValueError")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("no model", "TypeError: model must be a MambaModel, found Linear"),
        ("sequence_parallel", "ValueError: sequence_parallel is True"),
        ("the part's modules", "ValueError: planted"),
        ("attention", "ValueError: planted"),
        ("states", "CacheCapacityError: cannot allocate"),
        ("a budget", "CacheBudgetError: cache_gb is 1 GiB, which cannot hold"),
        ("the host's memory", "HostBudgetError: host_cache_gb is 3 GiB"),
        ("a file", "FileNotFoundError: [Errno 2] No such file: 'weights'"),
        ("another package's type", "RuntimeError: json.decoder.JSONDecodeError: planted"),
        ("step buffers", "CacheCapacityError: cannot allocate the step buffers"),
    ],
)
def test_build_error_on_one_rank_is_raised_on_all(broken: str, message: str, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(agreement_cases.error_of_one_rank, TENSOR, broken)
    assert second.startswith(message) and first == second


@pytest.mark.parametrize(
    ("layout", "every", "part", "kind"),
    [
        (TENSOR, 1, "another block", "new KV blocks"),
        (TENSOR, 4, "another block", "new KV blocks"),
        (TENSOR, 4, "another token", "scheduled tokens"),
        (TENSOR, 1, "another slot", "reserved states"),
        (PIPELINE, 1, "another token", "scheduled tokens"),
        (PIPELINE, 4, "another slot", "reserved states"),
    ],
)
def test_error_names_the_first_decision_that_differs_between_ranks(
    layout: Layout, every: int, part: str, kind: str, worlds: Worlds
) -> None:
    outcomes = worlds.of(2).run(agreement_cases.error_of_a_part, layout, every, part)
    assert outcomes[0] == outcomes[1]
    error, num_steps = outcomes[0]
    assert kind in error and "is the first that differs: rank 0: step" in error and "rank 1: step" in error
    parted_at = int(error.split("rank 0: step ")[1].split(",")[0])
    assert parted_at > agreement_cases.STEPS_TOGETHER
    assert 0 <= agreement_cases.STEPS_TOGETHER + num_steps - parted_at < every


@pytest.mark.parametrize(("num_on_both", "other"), [(0, "nothing"), (1, "step 1, request 0, scheduled tokens")])
def test_rank_that_lacks_a_request_is_detected(num_on_both: int, other: str, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(agreement_cases.error_of_a_missing_request, TENSOR, num_on_both)
    assert first == second
    assert f"rank 0: step 1, request {num_on_both}, admission" in first and f"rank 1: {other}" in first


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_sampled_tokens_come_from_one_rank(layout: Layout, worlds: Worlds) -> None:
    for tokens, with_others_wrong in worlds.of(2).run(agreement_cases.broadcast_outcomes, layout):
        assert tokens == with_others_wrong


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_drafter_error_on_one_rank_disables_drafts_on_all(layout: Layout, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(agreement_cases.failures_of_one_drafter, layout)
    assert first == second
    num_failures, num_accepted = first
    assert num_failures and num_accepted
