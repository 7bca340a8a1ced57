"""Records computations into CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[], tuple[Tensor, ...]]
Replay = Callable[[], None]


class Recorder(Protocol):
    """Records computations that are replayed one after another."""

    def record(self, compute: Compute) -> tuple[tuple[Tensor, ...], Replay]:
        """Run a computation once; return its results and a replay that computes them again, in place."""

    def num_bytes(self) -> int:
        """Return the device memory that all recordings hold."""


class CudaRecorder:
    """Records into CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # What a layer launches beside its main part, on a stream of the usual priority, gives way to the main part.
        self._stream = torch.cuda.Stream(priority=-1)

    def record(self, compute: Compute) -> tuple[tuple[Tensor, ...], Replay]:
        """Compute once, which compiles and allocates workspaces, then capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            results = compute()
        return results, graph.replay

    def num_bytes(self) -> int:
        """Return the bytes that torch has reserved for the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self._pool)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage before the block instead of in it: freeing an earlier engine's graph would end a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
