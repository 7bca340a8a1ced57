"""Random workloads in fp32: whatever is cached, chunked, paused or evicted, the tokens are the oracle's."""

from collections.abc import Iterator

import pytest
import torch

from tests.mcore.random_workloads import FLAVOURS, make_workload, run_workload
from tests.mcore.workload_totals import WorkloadTotals

# The first ten seeds of each flavour by default; a GPU takes many times as long for models this small.
SHORT, LONG = range(10), range(10, 19 if torch.cuda.is_available() else 38)
SEEDS = [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", FLAVOURS)
def test_tokens_are_the_oracles_and_everything_is_returned(name: str, seeds: range, totals: WorkloadTotals) -> None:
    flavour = FLAVOURS[name]
    totals.run_batch(name, seeds, lambda seed: run_workload(make_workload(flavour, seed)), flavour.exercises)
