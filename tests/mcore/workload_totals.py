"""Totals of the random workloads of a test module."""

from collections import Counter
from collections.abc import Callable, Iterable

from tests.mcore.engine_runs import OracleTally
from tests.mcore.random_workloads import WorkloadOutcome


class WorkloadTotals:
    """Counters and the oracle's tally, summed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.tally = OracleTally()

    def run_batch(
        self,
        name: str,
        seeds: Iterable[int],
        run: Callable[[int], WorkloadOutcome],
        exercises: Iterable[str],
        *,
        enough: int | None = None,
    ) -> None:
        """Run a workload of each seed, sum the results, and assert that every counter of `exercises` is positive.

        Args:
            enough: Of the seeds, if nothing of `exercises` is left by then; None: all are run.
        """
        counts: Counter[str] = Counter()
        for number, seed in enumerate(seeds):
            if enough is not None and number >= enough and all(counts[counter] for counter in exercises):
                break
            try:
                outcome = run(seed)
            except Exception as error:
                error.add_note(f"in workload {name!r}, seed {seed}")
                raise
            counts.update(outcome.seen)
            self.tally.add(outcome.tally)
        self.counts.update(counts)
        never = [counter for counter in exercises if not counts[counter]]
        assert not never, f"the workloads of {name!r} no longer exercise {never}"

    def report(self) -> None:
        """Print the totals, and assert that few comparisons were stopped by the oracle's margin."""
        print(f"\n{self.tally.num_compared} tokens compared, {self.tally.num_stopped} stopped by the margin")
        print(", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())))
        self.tally.assert_few_stops()
