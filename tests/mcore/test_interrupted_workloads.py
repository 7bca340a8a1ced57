"""Random workloads with every setting and interruption: each token and log-prob is the one that fp64 chooses."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import (
    FLAVOURS,
    MODEL_FORMS,
    WITHOUT_REPLAY,
    WorkloadOutcome,
    make_workload,
    run_workload,
    undisturbed,
    with_likely_ends,
)
from tests.mcore.workload_totals import WorkloadTotals
from tests.recurrences.toy import on_cpu

SHORT, ENOUGH = range(8), 2
SEEDS = [pytest.param(SHORT, id="short"), pytest.param(range(8, 40), id="long", marks=pytest.mark.slow)]
ALL = ("suspend", "error", "error", "neighbour", "evict", "flush")
INTERRUPTIONS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "suspend": ("disturbed", ("suspend",), ("suspends",)),
    "failed steps": ("disturbed", ("error",), ("steps_aborted",)),
    "cancelled neighbours": ("disturbed", ("neighbour",), ("neighbours cancelled",)),
    "evictions": ("roomy", ("evict",), ("requests_evicted",)),
    "too few blocks": ("tight_blocks", ALL, ("requests_evicted",)),
    "all, in small chunks": ("small_steps", ALL, ("chunked_steps", "suspends")),
    "all, with tiers": ("disturbed_tiers", ALL, ("states_written_to_host", "suspends")),
}
"""A flavour of workloads, the interruptions of its requests, and the counters that must become positive."""
BY_DEFAULT = {
    ("suspend", False),
    ("suspend", True),
    ("failed steps", True),
    ("cancelled neighbours", False),
    ("evictions", True),
    ("too few blocks", True),
    ("all, with tiers", True),
}
TOYS_BY_DEFAULT = {("evictions", True), ("failed steps", False)}
GATED_DELTA_BY_DEFAULT = {("cancelled neighbours", True), ("too few blocks", False)}
CASES = [
    pytest.param(name, has_drafts, "dense", marks=() if (name, has_drafts) in BY_DEFAULT else pytest.mark.long)
    for name in INTERRUPTIONS
    for has_drafts in (False, True)
]
CASES += [
    pytest.param(
        name,
        has_drafts,
        "toy",
        marks=[on_cpu, *([] if (name, has_drafts) in TOYS_BY_DEFAULT else [pytest.mark.long])],
    )
    for name in INTERRUPTIONS
    for has_drafts in (False, True)
]
CASES += [
    pytest.param(
        name,
        has_drafts,
        "gated delta",
        marks=() if (name, has_drafts) in GATED_DELTA_BY_DEFAULT else pytest.mark.long,
    )
    for name in INTERRUPTIONS
    for has_drafts in (False, True)
]


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("name", "has_drafts", "form"), CASES)
def test_interrupted_replies_match_a_float64_reference(
    name: str, has_drafts: bool, form: str, seeds: range, totals: WorkloadTotals, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)
    flavour, disturbances, exercises = INTERRUPTIONS[name]

    def run(seed: int) -> WorkloadOutcome:
        """Run a workload; every second one has grammars, graphs with overlapped steps, and replayed states."""
        rng = random.Random(f"interrupted {name} {has_drafts} {seed}")
        work = make_workload(
            FLAVOURS[flavour],
            rng.randrange(10**6),
            rng.randrange(1, 5) if has_drafts else 0,
            has_log_probs=True,
            sampled_share=0.4,
            changed_share=0.7,
            has_grammars=seed % 2 == 1,
            models=MODEL_FORMS[form],
            replays=seed % 2 == 1 and form not in WITHOUT_REPLAY,
        )
        work = replace(work, disturbances=disturbances, disturbed_share=0.3, scores_prompts=seed % 2 == 0)
        plain = run_workload(undisturbed(work))
        replies = [plain.run.tokens(request_id) for request_id in range(len(work.arrivals))]
        work = with_likely_ends(work, replies, rng)
        texts = run_workload(undisturbed(work)).texts if has_drafts else {}
        if seed % 2 == 1:
            config = replace(work.config, num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
            work = replace(work, config=config)
        vocab = work.subject.sizes.vocab_size
        drafter = NoisyDrafter(texts, accuracy=0.8, vocab_size=vocab, seed=seed) if has_drafts else None
        return run_workload(work, drafter)

    exercises = (*exercises, "ended by a grammar", *(["accepted_tokens"] if has_drafts else []))
    totals.run_batch(name, seeds, run, exercises, enough=ENOUGH if seeds is SHORT else None)
