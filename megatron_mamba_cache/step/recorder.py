"""Record computations as CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[], tuple[Tensor, ...]]
Prepare = Callable[[], None]


def nothing() -> None:
    """Do nothing; the default `prepare` of `Recorder.record`."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Callable that repeats a recorded computation in place.

    Args:
        begin: Launches the part of the computation before `split`; does nothing if there was no `split`.
        finish: Runs the host's preparation and launches the rest; called after `begin`.
    """

    begin: Callable[[], None]
    finish: Callable[[], None]

    def __call__(self) -> None:
        """Run `begin`, then `finish`."""
        self.begin()
        self.finish()


class Recorder(Protocol):
    """Interface for recording computations, which are then replayed one after another."""

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        """Run a computation once; return its results and a `Replay` that recomputes them in place.

        Args:
            prepare: Host work in each replay; runs at `split`, or before the whole computation without a `split`.
        """

    def split(self) -> None:
        """Mark the point from which the computation depends on `prepare`; called at most once per computation."""

    def num_bytes(self) -> int:
        """Return the device memory of all recordings, in bytes."""


class CudaRecorder:
    """`Recorder` that captures CUDA graphs in one shared memory pool.

    A computation with a `split` becomes two graphs: the device runs the first while the host prepares the second.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # The side streams of layers have the same priority; see `OverlappedExpert`.
        self._stream = torch.cuda.Stream(priority=-1)
        self._parts: list[torch.cuda.CUDAGraph] = []  # graphs of the current recording

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        """Run the computation once, to compile kernels and allocate workspaces, then capture it on the same stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            self._begin_part()
            try:
                results = compute()
            finally:
                (*before, last), self._parts = self._parts, []
                last.capture_end()

        def begin() -> None:
            for part in before:
                part.replay()

        def finish() -> None:
            prepare()
            last.replay()

        return results, Replay(begin, finish)

    def split(self) -> None:
        """End the current graph and start the next; do nothing outside a capture."""
        if self._parts:
            self._parts[-1].capture_end()
            self._begin_part()

    def _begin_part(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._parts.append(graph)

    def num_bytes(self) -> int:
        """Return the number of bytes that torch has reserved for the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self._pool)


@contextmanager
def without_collections() -> Iterator[None]:
    """Context manager that collects garbage and then disables collection: freeing a graph would abort a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
