"""Random workloads in fp32: tokens match the oracle with caching, chunking, pauses and evictions."""

from collections.abc import Iterator

import pytest
import torch

from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, WorkloadOutcome, make_workload, run_workload
from tests.mcore.workload_totals import WorkloadTotals
from tests.recurrences.toy import on_cpu

# Two to ten seeds of each flavour by default; a GPU takes many times as long for models this small.
SHORT, LONG = range(10), range(2, 19 if torch.cuda.is_available() else 38)
ENOUGH = 2
SEEDS = [
    pytest.param("dense", False, SHORT, id="short"),
    pytest.param("dense", False, LONG, id="long", marks=pytest.mark.slow),
    pytest.param("experts", False, range(1), id="experts"),
    pytest.param("experts", False, range(1, 3), id="experts-more", marks=pytest.mark.long),
    pytest.param("experts", False, range(3, 38), id="experts-long", marks=pytest.mark.slow),
    pytest.param("dense", True, range(1), id="replayed"),
    pytest.param("dense", True, range(1, 38), id="replayed-long", marks=pytest.mark.slow),
    pytest.param("experts", True, range(38, 39), id="replayed-experts", marks=pytest.mark.long),
    pytest.param("toy", False, range(1), id="toy", marks=on_cpu),
    pytest.param("toy", False, range(1, len(SHORT)), id="toy-more", marks=[on_cpu, pytest.mark.long]),
    pytest.param("toy", False, range(len(SHORT), 38), id="toy-long", marks=[on_cpu, pytest.mark.slow]),
    pytest.param("gated delta", False, range(1), id="gated-delta"),
    pytest.param("gated delta", False, range(1, len(SHORT)), id="gated-delta-more", marks=pytest.mark.long),
    pytest.param("gated delta", False, range(len(SHORT), 38), id="gated-delta-long", marks=pytest.mark.slow),
    pytest.param("gated delta", True, range(38, 39), id="replayed-gated-delta"),
    pytest.param("gated delta", True, range(41, 48), id="replayed-gated-delta-more", marks=pytest.mark.long),
    pytest.param("gated delta", True, range(48, 76), id="replayed-gated-delta-long", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.mark.parametrize(("form", "replays", "seeds"), SEEDS)
@pytest.mark.parametrize("name", FLAVOURS)
def test_random_requests_match_the_oracle_and_leak_no_memory(
    name: str, form: str, replays: bool, seeds: range, totals: WorkloadTotals
) -> None:
    flavour, models = FLAVOURS[name], MODEL_FORMS[form]

    def run(seed: int) -> WorkloadOutcome:
        return run_workload(make_workload(flavour, seed, models=models, replays=replays))

    # A few seeds do not exercise all that a flavour is for.
    exercises = flavour.exercises if form == "dense" and not (replays and len(seeds) < len(SHORT)) else ()
    totals.run_batch(name, seeds, run, exercises, enough=ENOUGH if seeds is SHORT else None)
