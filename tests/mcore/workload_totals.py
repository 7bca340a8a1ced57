"""What all random workloads of a test module came to."""

from collections import Counter

from tests.mcore.engine_runs import OracleTally


class WorkloadTotals:
    """Counters and the oracle's tally, summed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.tally = OracleTally()

    def report(self) -> None:
        """Print the totals, and assert that few comparisons were stopped by the oracle's margin."""
        print(f"\n{self.tally.num_compared} tokens compared, {self.tally.num_stopped} stopped by the margin")
        print(", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())))
        self.tally.assert_few_stops()
