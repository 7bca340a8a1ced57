"""Random workloads in fp32: whatever is cached, chunked, paused or evicted, the tokens are the oracle's."""

from collections.abc import Iterator

import pytest
import torch

from tests.mcore.random_workloads import FLAVOURS, make_workload, run_workload
from tests.mcore.workload_totals import WorkloadTotals

SEEDS_PER_BATCH = 19
# 8 flavours: 304 workloads. A GPU takes many times as long for models this small, and gets a part of them.
BATCHES_PER_FLAVOUR = 1 if torch.cuda.is_available() else 2


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.mark.parametrize("batch", range(BATCHES_PER_FLAVOUR))
@pytest.mark.parametrize("name", FLAVOURS)
def test_tokens_are_the_oracles_and_everything_is_returned(name: str, batch: int, totals: WorkloadTotals) -> None:
    seeds = range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH)
    flavour = FLAVOURS[name]
    totals.run_batch(name, seeds, lambda seed: run_workload(make_workload(flavour, seed)), flavour.exercises)
