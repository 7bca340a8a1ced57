"""Random workloads in fp32: whatever is cached, chunked, paused or evicted, the tokens are the oracle's."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.mcore.random_workloads import FLAVOURS, make_workload, run_workload
from tests.mcore.workload_totals import WorkloadTotals

SEEDS_PER_BATCH = 11
# 8 flavours: 440 workloads. A GPU takes many times as long for models this small, and gets a part of them.
BATCHES_PER_FLAVOUR = 2 if torch.cuda.is_available() else 5


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


@pytest.mark.parametrize("batch", range(BATCHES_PER_FLAVOUR))
@pytest.mark.parametrize("name", FLAVOURS)
def test_tokens_are_the_oracles_and_everything_is_returned(name: str, batch: int, totals: WorkloadTotals) -> None:
    counts: Counter[str] = Counter()
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        try:
            outcome = run_workload(make_workload(FLAVOURS[name], seed))
        except Exception as error:
            error.add_note(f"in workload {name!r}, seed {seed}")
            raise
        counts.update(outcome.seen)
        totals.tally.add(outcome.tally)
    totals.counts.update(counts)
    never = [counter for counter in FLAVOURS[name].exercises if not counts[counter]]
    assert not never, f"the workloads of {name!r} no longer exercise {never}"
