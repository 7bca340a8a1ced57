"""GPU and host times of a window of steps, by torch's profiler."""

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
    "cudaMemcpyAsync",  # waits for a copy to pageable memory to be over, which a step's reading of its tokens is
)


@dataclass(frozen=True, slots=True)
class GpuTime:
    """A window of steps, in seconds.

    Args:
        wall_s: Time inside the steps, from call to return.
        busy_s: Time in which the GPU ran a kernel or a copy, overlapping ones counted once.
        waiting_s: Time that the host spent in calls that wait for the GPU.
    """

    num_steps: int
    wall_s: float
    busy_s: float
    waiting_s: float

    @property
    def idle_share(self) -> float:
        """Share of the time inside steps in which the GPU was idle."""
        return max(0.0, 1 - self.busy_s / self.wall_s)

    @property
    def host_s(self) -> float:
        """Seconds of a step in which the host did not wait for the GPU."""
        return (self.wall_s - self.waiting_s) / self.num_steps


@contextmanager
def noted_waits() -> Iterator[list[float]]:
    """Record, inside the block, each step's seconds of waiting for the GPU's results; none on a CPU."""
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
    """Return the mean GPU seconds of `run`, launched `times` times back to back."""
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


class GpuTimer:
    """Profiles a window of steps, starting in the middle of a load.

    The profiler slows down launches, so host and idle times are upper bounds.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._step_times: list[float] = []
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profile = torch.profiler.profile(activities=activities)
        self._is_running = False
        self._result: GpuTime | None = None

    def wants_to_start(self, share_over: float) -> bool:
        """Return True if the window begins now: half of the load is over."""
        return not self._is_running and self._result is None and share_over >= 0.5

    def start(self) -> None:
        """Begin the window."""
        torch.cuda.synchronize()
        self._profile.start()
        self._is_running = True

    def add_step(self, seconds: float) -> bool:
        """Record a step; return True if the window should end."""
        if self._is_running:
            self._step_times.append(seconds)
        return self._is_running and len(self._step_times) == self._num_steps

    def stop(self) -> None:
        """End the window and read it."""
        torch.cuda.synchronize()
        self._profile.stop()
        self._is_running = False
        events = list(self._profile.events())
        if self._step_times:
            self._result = GpuTime(len(self._step_times), sum(self._step_times), busy_s(events), waiting_s(events))

    def result(self) -> GpuTime | None:
        """Return the times of the window, ending it if it is still open; None if it has no step."""
        if self._is_running:
            self.stop()
        return self._result


class NoGpuTimer:
    """Stands in for `GpuTimer` without a GPU."""

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
    """Return a timer for this machine."""
    return GpuTimer(num_steps) if torch.cuda.is_available() else NoGpuTimer()


def busy_s(events: Iterable[Any]) -> float:
    """Return the seconds that the profiled kernels and copies cover together."""
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    return covered(ranges) / 1e6


def waiting_s(events: Iterable[Any]) -> float:
    """Return the seconds of the profiled calls in which the host waits."""
    waits = (event for event in events if event.device_type == DeviceType.CPU and event.name in _WAITS)
    return sum(event.time_range.end - event.time_range.start for event in waits) / 1e6


def covered(ranges: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of ranges that are sorted by their start."""
    total, reached = 0.0, float("-inf")
    for start, end in ranges:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
