"""GPU time and host time of consecutive engine steps, measured with torch's profiler."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

from megatron_mamba_cache.step.buffers import HostCopy

_WAITS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cudaMemcpyAsync",  # copies to pageable memory block the host; a step reads its tokens with such a copy
)


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Times of consecutive engine steps, in seconds.

    Args:
        wall_s: Wall time inside the steps.
        busy_s: Time in which the GPU ran at least one kernel or copy.
        waiting_s: Time that the host spent in calls that wait for the GPU.
    """

    num_steps: int
    wall_s: float
    busy_s: float
    waiting_s: float

    @property
    def idle_share(self) -> float:
        """Fraction of the time inside the steps in which the GPU was idle."""
        return max(0.0, 1 - self.busy_s / self.wall_s)

    @property
    def host_s(self) -> float:
        """Mean seconds per step in which the host did not wait for the GPU."""
        return (self.wall_s - self.waiting_s) / self.num_steps


@contextmanager
def noted_waits() -> Iterator[list[float]]:
    """Context manager that yields a list of the seconds that each step waits for the GPU's results; empty on a CPU."""
    seconds: list[float] = []
    wait = HostCopy.wait

    def timed_wait(reading: HostCopy) -> list[list[int]]:
        began = time.perf_counter()
        lines = wait(reading)
        if reading.is_of_gpu:
            seconds.append(time.perf_counter() - began)
        return lines

    HostCopy.wait = timed_wait  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        HostCopy.wait = wait  # type: ignore[method-assign]


def gpu_seconds(run: Callable[[], object], times: int) -> float:
    """Return the mean GPU time of `run` in seconds, if it is launched `times` times back to back."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


class GpuTimer:
    """Profiles some consecutive steps, starting in the middle of a load.

    The profiler slows down launches, so the measured host and idle times are upper bounds.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._step_times: list[float] = []
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities)
        self._is_running = False
        self._result: GpuTime | None = None

    def wants_to_start(self, share_over: float) -> bool:
        """Return True if profiling should start now, that is, if half of the load is over."""
        return not self._is_running and self._result is None and share_over >= 0.5

    def start(self) -> None:
        """Start profiling."""
        torch.cuda.synchronize()
        self._profile.start()
        self._is_running = True

    def add_step(self, seconds: float) -> bool:
        """Record a step; return True if profiling should stop."""
        if self._is_running:
            self._step_times.append(seconds)
        return self._is_running and len(self._step_times) == self._num_steps

    def stop(self) -> None:
        """Stop profiling and read the events."""
        torch.cuda.synchronize()
        self._profile.stop()
        self._is_running = False
        events = list(self._profile.events())
        if self._step_times:
            self._result = GpuTime(len(self._step_times), sum(self._step_times), busy_s(events), waiting_s(events))

    def result(self) -> GpuTime | None:
        """Return the times of the profiled steps, and stop profiling if it is active; None if no step was profiled."""
        if self._is_running:
            self.stop()
        return self._result


class NoGpuTimer:
    """Timer with the interface of `GpuTimer` that does nothing, for machines without a GPU."""

    def wants_to_start(self, share_over: float) -> bool:
        """Return False."""
        return False

    def start(self) -> None:
        """Do nothing."""

    def add_step(self, seconds: float) -> bool:
        """Return False."""
        return False

    def stop(self) -> None:
        """Do nothing."""

    def result(self) -> None:
        """Return None."""


def gpu_timer(num_steps: int) -> GpuTimer | NoGpuTimer:
    """Return a `GpuTimer` if this machine has a GPU, otherwise a `NoGpuTimer`."""
    return GpuTimer(num_steps) if torch.cuda.is_available() else NoGpuTimer()


def busy_s(events: Iterable[Any]) -> float:
    """Return the seconds in which at least one of the profiled kernels and copies ran."""
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    return covered(ranges) / 1e6


def waiting_s(events: Iterable[Any]) -> float:
    """Return the seconds that the host spent in profiled calls that wait for the GPU."""
    waits = (event for event in events if event.device_type == DeviceType.CPU and event.name in _WAITS)
    return sum(event.time_range.end - event.time_range.start for event in waits) / 1e6


def covered(ranges: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of ranges; they must be sorted by their start."""
    total, reached = 0.0, float("-inf")
    for start, end in ranges:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
