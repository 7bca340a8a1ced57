"""Random workloads in which about half of the requests follow grammars: tokens are the oracle's best allowed ones."""

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
from tests.mcore.workload_totals import WorkloadTotals

SHORT, ENOUGH = range(3), 1
SEEDS = [pytest.param(SHORT, id="short"), pytest.param(range(1, 20), id="long", marks=pytest.mark.slow)]
BY_DEFAULT = ("tight_blocks", "disturbed", "disturbed_budget")
CASES = [
    pytest.param(name, "dense", id=name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in FLAVOURS
] + [
    pytest.param(name, "gated delta", id=f"{name}-gated-delta", marks=() if name == "strides" else pytest.mark.long)
    for name in FLAVOURS
]


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_greedy_token_is_the_most_probable_token_that_the_grammar_allows(
    name: str, form: str, has_drafts: bool, seeds: range, totals: WorkloadTotals
) -> None:
    def run(seed: int) -> WorkloadOutcome:
        num_drafts = random.Random(f"grammars {name} {seed}").randrange(1, 6) if has_drafts else 0
        work = make_workload(FLAVOURS[name], 3000 + seed, num_drafts, has_grammars=True, models=MODEL_FORMS[form])
        assert work.has_grammars
        drafter = None
        if has_drafts:
            texts = run_workload(undisturbed(work)).texts
            vocab = work.subject.sizes.vocab_size
            drafter = NoisyDrafter(texts, accuracy=0.8, vocab_size=vocab, seed=seed, varies=seed % 2 == 0)
        return run_workload(work, drafter)

    exercises = ["ended by a grammar", *(["accepted_tokens"] if has_drafts else [])]
    totals.run_batch(name, seeds, run, exercises, enough=ENOUGH if seeds is SHORT else None)


@pytest.mark.parametrize(
    ("name", "keeps_all_logits"),
    [
        ("disturbed", False),
        ("roomy", True),
        pytest.param("disturbed", True, marks=pytest.mark.long),
        pytest.param("roomy", False, marks=pytest.mark.long),
    ],
)
def test_requests_with_and_without_grammars_share_cuda_graphs_correctly(
    name: str, keeps_all_logits: bool, totals: WorkloadTotals, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)

    def run(seed: int) -> WorkloadOutcome:
        work = make_workload(FLAVOURS[name], 5000 + seed, has_grammars=True)
        config = replace(work.config, num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
        return run_workload(replace(work, config=config, keeps_all_logits=keeps_all_logits))

    totals.run_batch(f"{name}, graphs", range(4), run, ["ended by a grammar", "graph_steps"])
