"""Requests run alone after a number of failed steps, and are refused after more."""

import pytest

from megatron_mamba_cache.policy.scheduler import (
    FAILURES_BEFORE_ISOLATION,
    FAILURES_BEFORE_REFUSAL,
    FailedSteps,
    refusal_reason,
)


def failed(*steps: list[int]) -> FailedSteps:
    """Return the counts after these failed steps; each step is given by its request ids."""
    failures = FailedSteps()
    for request_ids in steps:
        failures.count(request_ids)
    return failures


def test_no_request_is_isolated_before_any_step_failed() -> None:
    assert not FailedSteps() and FailedSteps().next_isolated() is None


def test_request_is_refused_after_the_limit_of_failed_steps_and_not_before() -> None:
    failures = FailedSteps()
    refused = [failures.count([1]) for _ in range(FAILURES_BEFORE_REFUSAL)]
    assert refused == [[]] * (FAILURES_BEFORE_REFUSAL - 1) + [[1]]


def test_failed_steps_are_counted_separately_for_each_request() -> None:
    failures = failed(*[[1]] * (FAILURES_BEFORE_REFUSAL - 1))
    assert failures.count([2, 1, 3]) == [1]
    assert failures.count(iter([2, 3])) == []


def test_request_runs_alone_after_the_limit_of_failed_steps_and_not_before() -> None:
    steps = [[1, 2]] * FAILURES_BEFORE_ISOLATION
    assert failed(*steps[1:]).next_isolated() is None
    assert failed(*steps).next_isolated() == 1


def test_request_stays_isolated_until_it_is_forgotten() -> None:
    failures = failed(*[[1, 2]] * FAILURES_BEFORE_ISOLATION)
    failures.count([2])
    assert failures.next_isolated() == 1
    failures.forget(1)
    assert failures.next_isolated() == 2
    failures.forget(2)
    assert failures.next_isolated() is None and not failures


def test_forgotten_request_starts_with_no_failed_steps() -> None:
    failures = failed(*[[1]] * (FAILURES_BEFORE_REFUSAL - 1))
    failures.forget(1)
    assert failures.count([1]) == [] and failures.next_isolated() is None


def test_forgetting_an_unknown_request_changes_no_count() -> None:
    failures = failed([1])
    failures.forget(2)
    assert failures


@pytest.mark.parametrize("num_steps", [1, FAILURES_BEFORE_ISOLATION, FAILURES_BEFORE_REFUSAL])
def test_clearing_failed_steps_forgets_every_request(num_steps: int) -> None:
    failures = failed(*[[1, 2]] * num_steps)
    failures.clear()
    assert not failures and failures.next_isolated() is None


def test_refusal_message_has_the_number_of_failed_steps_and_the_error() -> None:
    reason = refusal_reason(ValueError("broken"))
    assert str(FAILURES_BEFORE_REFUSAL) in reason and "ValueError('broken')" in reason
