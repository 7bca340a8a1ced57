"""Let megatron-core's dynamic inference run without CUDA; no effect if CUDA is available.

megatron-core uses `torch.cuda` for the current device, the timing of steps, profiler ranges and memory statistics. Each
of these calls is replaced by its nearest CPU equivalent.
"""

import time
from collections import defaultdict
from typing import Any

import torch


class WallClockEvent:
    """Replacement for `torch.cuda.Event` that reads the wall clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time = 0.0

    def record(self, stream: object = None) -> None:
        """Record the current time."""
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: the step's tokens have already been read when its end is recorded."""

    def elapsed_time(self, end: "WallClockEvent") -> float:
        """Return the time in milliseconds between this event and `end`."""
        return (end._time - self._time) * 1e3


def install() -> None:
    """Patch `torch.cuda` and megatron-core's engine for the CPU once; do nothing if CUDA is available."""
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
    """Do nothing; replaces a call that has no CPU equivalent."""
