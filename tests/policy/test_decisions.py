"""Decision logs: equal logs have equal hashes, and the first difference between logs is reported."""

import pytest

from megatron_mamba_cache.ranks.digest import Decision, DecisionKind, DecisionLog, first_difference

Entry = tuple[DecisionKind, int, tuple[int, ...]]
COMMON: list[Entry] = [(DecisionKind.ADMIT, 1, (0, 2)), (DecisionKind.SCHEDULE, 1, (0, 8))]


def log_of(entries: list[Entry]) -> DecisionLog:
    log = DecisionLog()
    for step, (kind, request_id, facts) in enumerate(entries):
        log.step = step
        log.note(kind, request_id, *facts)
    return log


def test_equal_decision_logs_have_equal_62_bit_fingerprints() -> None:
    one, other = log_of(COMMON), log_of(COMMON)
    assert one.fingerprint() == other.fingerprint()
    assert all(0 <= piece < 2**62 for piece in one.fingerprint())
    assert one.num_noted == 2


@pytest.mark.parametrize(
    "last",
    [
        (DecisionKind.SCHEDULE, 1, (0, 9)),
        (DecisionKind.SCHEDULE, 2, (0, 8)),
        (DecisionKind.GROW, 1, (0, 8)),
        (DecisionKind.SCHEDULE, 1, (0, 8, 0)),
    ],
)
def test_different_decision_changes_the_fingerprint_and_is_reported(last: Entry) -> None:
    one, other = log_of(COMMON), log_of([COMMON[0], last])
    assert one.fingerprint() != other.fingerprint()
    reported = first_difference([one.recent(), other.recent()])
    assert reported.startswith("decision 1 is the first that differs: rank 0: step 1, request 1, scheduled tokens")
    assert str(Decision(1, *last)) in reported


def test_decision_fingerprint_includes_the_step_number() -> None:
    late = DecisionLog()
    late.step = 3
    late.note(*COMMON[0][:2], *COMMON[0][2])
    assert late.fingerprint() != log_of(COMMON[:1]).fingerprint()


def test_missing_decision_of_a_rank_is_reported_as_nothing() -> None:
    reported = first_difference([log_of(COMMON).recent(), log_of(COMMON[:1]).recent()])
    assert reported.endswith("rank 1: nothing")


def test_decision_log_is_bounded_and_reports_forgotten_differences() -> None:
    many = [(DecisionKind.EVICT, -1, (number,)) for number in range(10_000)]
    one, other = log_of(many), log_of([(DecisionKind.EVICT, -1, (-5,)), *many[1:]])
    assert len(one.recent().decisions) < 5000
    assert one.num_noted == 10_000 and one.fingerprint() != other.fingerprint()
    assert "which the log no longer contains" in first_difference([one.recent(), other.recent()])


def test_eviction_decisions_are_labeled_with_their_pool() -> None:
    assert str(Decision(4, DecisionKind.EVICT, -1, (1, 2))).startswith("step 4, pools, evictions")
