"""Random workloads with log-probs whose steps and reports fail: every list equals that of an undisturbed run."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import (
    FLAVOURS,
    MODEL_FORMS,
    WorkloadOutcome,
    make_workload,
    run_workload,
    undisturbed,
)
from tests.mcore.record_lists import assert_same_lists
from tests.mcore.workload_totals import WorkloadTotals

SEEDS = [pytest.param(range(2), id="short"), pytest.param(range(2, 8), id="long", marks=pytest.mark.slow)]
CASES = [
    ("disturbed", True, "dense"),
    ("tight_blocks", False, "dense"),
    pytest.param("disturbed", False, "dense", marks=pytest.mark.long),
    pytest.param("small_steps", True, "dense", marks=pytest.mark.long),
    pytest.param("tight_blocks", True, "dense", marks=pytest.mark.long),
    pytest.param("small_steps", False, "dense", marks=pytest.mark.long),
    ("tight_blocks", False, "gated delta"),
    pytest.param("disturbed", True, "gated delta", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("name", "has_drafts", "form"), CASES)
def test_log_probs_are_unchanged_by_failures_and_interruptions(
    name: str, has_drafts: bool, form: str, seeds: range, totals: WorkloadTotals
) -> None:
    def run(seed: int) -> WorkloadOutcome:
        rng = random.Random(f"log-probs {name} {seed}")
        num_drafts = rng.randrange(1, 5) if has_drafts else 0
        work = make_workload(FLAVOURS[name], 2000 + seed, num_drafts, has_log_probs=True, models=MODEL_FORMS[form])
        plain = run_workload(undisturbed(work))
        vocab = work.subject.sizes.vocab_size
        drafter = NoisyDrafter(plain.texts, accuracy=0.8, vocab_size=vocab, seed=seed) if has_drafts else None
        outcome = run_workload(work, drafter)
        assert_same_lists(outcome.run, plain.run.finished)
        return outcome

    exercises = ["errors in reports", "steps_aborted", "chunked_steps", *(["accepted_tokens"] if has_drafts else [])]
    totals.run_batch(name, seeds, run, exercises)


@pytest.mark.parametrize(
    ("changed_share", "scores_prompts"),
    [
        (0.3, False),
        pytest.param(0.0, True, marks=pytest.mark.long),
        pytest.param(0.0, False, marks=pytest.mark.slow),
        pytest.param(0.3, True, marks=pytest.mark.slow),
    ],
)
def test_log_probs_are_unchanged_by_graphs_and_overlapped_steps(
    scores_prompts: bool, changed_share: float, totals: WorkloadTotals, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)

    def run(seed: int) -> WorkloadOutcome:
        work = make_workload(FLAVOURS["disturbed"], 2100 + seed, has_log_probs=True, changed_share=changed_share)
        plain = undisturbed(work)
        plain = replace(plain, config=replace(plain.config, prefix_caching=False, run_ahead=False))
        expected = run_workload(plain)
        assert not expected.seen["graph_steps"]
        config = replace(work.config, num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
        outcome = run_workload(replace(work, config=config, scores_prompts=scores_prompts))
        assert_same_lists(outcome.run, expected.run.finished)
        return outcome

    exercises = ["errors in reports", "steps_aborted", "graph_steps", "early steps that are scored"]
    exercises += ["early steps that need the host"] if changed_share else []
    totals.run_batch("disturbed, graphs", range(3), run, exercises)
