"""Random workloads whose steps verify drafts: tokens match the oracle with any drafts."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_mamba_cache.speculation.prompt_lookup import AutoDrafter
from tests.mcore.checked_draft_model import CheckedDraftModel
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.mtp_drafters import CheckedMTPDrafter
from tests.mcore.random_workloads import (
    FLAVOURS,
    MODEL_FORMS,
    WorkloadOutcome,
    make_workload,
    run_workload,
)
from tests.mcore.workload_drafters import make_drafter, make_mtp_drafter
from tests.mcore.workload_totals import WorkloadTotals
from tests.recurrences.toy import on_cpu

# Two to ten seeds of each flavour by default; a GPU takes many times as long for models this small.
SHORT, LONG = range(10), range(2, 19 if torch.cuda.is_available() else 38)
ENOUGH = 2
MTP, MTP_REPLAYED, MTP_LONG = range(80, 82), range(82, 83), range(83, 91)
"""Seeds with which a multi-token prediction head drafts."""
SEEDS = [
    pytest.param("dense", False, SHORT, id="short"),
    pytest.param("dense", False, MTP, id="mtp"),
    pytest.param("dense", True, MTP_REPLAYED, id="mtp-replayed"),
    pytest.param("gated delta", True, MTP_REPLAYED, id="mtp-gated-delta"),
    pytest.param("experts", False, MTP, id="mtp-experts", marks=pytest.mark.long),
    pytest.param("dense", False, MTP_LONG, id="mtp-long", marks=pytest.mark.slow),
    pytest.param("dense", True, MTP_LONG, id="mtp-replayed-long", marks=pytest.mark.slow),
    pytest.param("experts", True, MTP_LONG, id="mtp-experts-long", marks=pytest.mark.slow),
    pytest.param("gated delta", False, MTP_LONG, id="mtp-gated-delta-long", marks=pytest.mark.slow),
    pytest.param("gated delta", True, MTP_LONG, id="mtp-replayed-gated-delta-long", marks=pytest.mark.slow),
    pytest.param("dense", False, LONG, id="long", marks=pytest.mark.slow),
    pytest.param("dense", True, range(2), id="replayed"),
    pytest.param("dense", True, range(2, 38), id="replayed-long", marks=pytest.mark.slow),
    pytest.param("toy", False, range(1), id="toy", marks=on_cpu),
    pytest.param("toy", False, range(1, 38), id="toy-long", marks=[on_cpu, pytest.mark.slow]),
    pytest.param("gated delta", False, range(1), id="gated-delta"),
    pytest.param("gated delta", False, range(1, 4), id="gated-delta-more", marks=pytest.mark.long),
    pytest.param("gated delta", False, range(4, 38), id="gated-delta-long", marks=pytest.mark.slow),
    pytest.param("gated delta", True, range(39, 41), id="replayed-gated-delta"),
    pytest.param("gated delta", True, range(41, 43), id="replayed-gated-delta-more", marks=pytest.mark.long),
    pytest.param("gated delta", True, range(43, 76), id="replayed-gated-delta-long", marks=pytest.mark.slow),
]

FOLLOWED = [
    pytest.param("dense", False, range(6), id="window"),
    pytest.param("dense", True, range(6, 12), id="replayed"),
    pytest.param("gated delta", True, range(12, 16), id="replayed-gated-delta", marks=pytest.mark.long),
    pytest.param("experts", False, range(16, 20), id="experts", marks=pytest.mark.long),
    pytest.param("gated delta", False, range(20, 24), id="gated-delta", marks=pytest.mark.long),
    pytest.param("half", True, range(24, 28), id="half", marks=pytest.mark.long),  # with FlashInfer on a GPU
]

EXERCISES = {
    name: ("draft_tokens", "accepted_tokens", "windows_changed")
    + (() if name == "uncached" else ("decode_states_published",))
    for name in FLAVOURS
}
BY_DEFAULT = ("tight_blocks", "small_steps", "disturbed", "whole_prompts")


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let draft models that want graphs capture them on any machine."""
    capture_without_cuda(monkeypatch)


@pytest.mark.parametrize(("form", "replays", "seeds"), FOLLOWED)
@pytest.mark.parametrize("name", FLAVOURS)
def test_random_workloads_with_drafts_on_the_device_match_the_oracle(
    name: str, form: str, replays: bool, seeds: range, totals: WorkloadTotals
) -> None:
    """Steps are launched with the drafts of a head before the host has read the tokens of the last step."""

    def run(seed: int) -> WorkloadOutcome:
        rng = random.Random(f"followed {name} {seed}")
        work = make_workload(
            FLAVOURS[name],
            2000 + seed,
            rng.randrange(1, 4),
            models=MODEL_FORMS[form],
            replays=replays,
            has_head=True,
            sampled_share=0.4,
        )
        drafter = make_mtp_drafter(rng, work, share=0.0 if form == "half" else 0.3)
        work = replace(work, config=replace(work.config, num_cuda_graphs=3, adaptive_drafts=seed % 2 == 0))
        outcome = run_workload(work, AutoDrafter(drafter) if seed % 4 == 0 else drafter)
        assert not drafter.failures, drafter.failures[:1]
        outcome.seen["followed steps"] = drafter.num_followed
        return outcome

    if form == "half":  # the margin stops more comparisons
        totals = WorkloadTotals()
    totals.run_batch(name, seeds, run, ("accepted_tokens", "followed steps"), enough=ENOUGH)


@pytest.mark.parametrize(("form", "replays", "seeds"), SEEDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in FLAVOURS]
)
def test_random_workloads_with_drafts_match_the_oracle(
    name: str, form: str, replays: bool, seeds: range, totals: WorkloadTotals
) -> None:
    flavour, models = FLAVOURS[name], MODEL_FORMS[form]

    def run(seed: int) -> WorkloadOutcome:
        rng = random.Random(f"drafts {name} {seed}")
        has_head = seed >= MTP.start
        work = make_workload(
            flavour, 1000 + seed, rng.randrange(1, 9), models=models, replays=replays, has_head=has_head
        )
        drafter = make_mtp_drafter(rng, work) if has_head else make_drafter(rng, work)
        if has_head and seed % 2 == 0:
            work = replace(work, config=replace(work.config, num_cuda_graphs=3))
        outcome = run_workload(work, drafter)
        if isinstance(drafter, CheckedMTPDrafter):
            drafter.assert_entries_are_right()
        if isinstance(drafter, CheckedDraftModel):
            drafter.assert_nothing_held()
        return outcome

    has_few = (replays or form != "dense" or seeds.start >= MTP.start) and len(seeds) < len(SHORT)
    exercises = ("draft_tokens",) if has_few else EXERCISES[name]
    totals.run_batch(name, seeds, run, exercises, enough=ENOUGH if seeds is SHORT else None)
