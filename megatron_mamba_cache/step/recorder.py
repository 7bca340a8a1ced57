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
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay of a recording, which computes it again in place.

    Args:
        begin: Launches what the computation does before `split`; nothing if it does not split.
        finish: Called next: runs the host's preparation and launches the rest.
    """

    begin: Callable[[], None]
    finish: Callable[[], None]

    def __call__(self) -> None:
        """Run `begin`, then `finish`."""
        self.begin()
        self.finish()


class Recorder(Protocol):
    """Record computations that are replayed one after another."""

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        """Run a computation once; return its results and a replay that computes them again, in place.

        Args:
            prepare: Host work of each replay, before the part of `compute` after `split`, or before all of it.
        """

    def split(self) -> None:
        """Mark, once per computation, where the part starts that depends on the host's preparation."""

    def num_bytes(self) -> int:
        """Return the device memory that all recordings hold."""


class CudaRecorder:
    """Record CUDA graphs that share one memory pool.

    The device computes a recording's first graph while the host prepares for the second one, and launches that.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Side streams of layers have this priority too; see `OverlappedExpert`.
        self._stream = torch.cuda.Stream(priority=-1)
        self._parts: list[torch.cuda.CUDAGraph] = []  # graphs of the current recording

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        """Compute once, which compiles and allocates workspaces, then capture on the same stream."""
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
    """Collect garbage now and not during the body, where freeing an earlier graph would abort the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
