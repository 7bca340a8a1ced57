"""Make megatron-core's dynamic inference run on a machine without CUDA; change nothing where CUDA is available.

megatron-core asks `torch.cuda` for the current device, times steps with CUDA events, marks ranges for the profiler and
reads memory statistics; each gets its nearest equivalent on a CPU.
"""

import time
from collections import defaultdict
from typing import Any

import torch


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


def install() -> None:
    """Patch `torch.cuda` and megatron-core's engine for the CPU, once; do nothing where CUDA is available."""
    if torch.cuda.is_available() or torch.cuda.Event is WallClockEvent:
        return
    from megatron.core.inference.engines import dynamic_engine

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Event = WallClockEvent  # type: ignore[misc,assignment]
    torch.cuda.synchronize = _ignore
    torch.cuda.memory_stats = lambda *_, **__: defaultdict(int)  # type: ignore[assignment,return-value]
    torch.cuda.nvtx.range_push = dynamic_engine.range_push = _ignore  # type: ignore[assignment]
    torch.cuda.nvtx.range_pop = dynamic_engine.range_pop = _ignore  # type: ignore[assignment]


def _ignore(*_: Any, **__: Any) -> None:
    """Stand in for a call that has no meaning on a CPU."""
