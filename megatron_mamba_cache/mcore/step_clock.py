"""Step times by the host's clock: a GPU event would wait for the step that runs ahead."""

import time
from typing import Any


class WallClockEvent:
    """A stand-in for `torch.cuda.Event` that reads the wall clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time = 0.0

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: a step's tokens have been read when its end is recorded."""

    def elapsed_time(self, end: "WallClockEvent") -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._time - self._time) * 1e3
