"""Time launches inside CUDA graphs, and the plain copies that bound them."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median

import torch
from torch import Tensor

GRAPH_MS = 12.0
NUM_REPLAYS = 15
MOST_COPIED = 3 * 2**27  # bytes that a measured plain copy reads; larger ones run at two thirds of the speed in graphs
MEMCPY_NOTE = (
    "The memcpy of more than 384 MiB is the one of 384 MiB, scaled by bytes: larger ones slow down in graphs and are "
    "no ceiling."
)

Launch = Callable[[], object]


def launch_us(launches: Sequence[Launch], expected_us: float) -> float:
    """Return the median time of a launch in a graph that repeats `launches`, in turn, for about GRAPH_MS."""
    graph, count = _captured(launches, expected_us)
    return median(_replay_ms(graph) for _ in range(NUM_REPLAYS + 3)) * 1000 / count


def interleaved_us(variants: Sequence[Sequence[Launch]], expected_us: float, num_rounds: int) -> list[float]:
    """Return `launch_us` of each variant, with graphs replayed in turn, so that drift affects all equally."""
    graphs = [_captured(launches, expected_us) for launches in variants]
    rounds = [[_replay_ms(graph) for graph, _ in graphs] for _ in range(num_rounds + 3)][3:]
    times = zip(*rounds, strict=True)
    return [median(ms) * 1000 / count for ms, (_, count) in zip(times, graphs, strict=True)]


def memcpy_us(memory: Tensor, num_bytes: int) -> float:
    """Return the time of a plain copy that reads and writes `num_bytes` each: the limit for any memory-bound kernel.

    A copy of more than MOST_COPIED is not measured but scaled from one of MOST_COPIED: memcpy nodes of graphs slow down
    beyond it, and a slow copy is not a limit.

    Args:
        memory: As for `memcpys`.
    """
    copied = min(max(num_bytes, 256), MOST_COPIED)
    count = min(256, max(1, memory.nbytes // 2 // copied))
    return launch_us(memcpys(memory, copied, count), max(2.0, copied / 2e6)) * num_bytes / copied


def memcpys(memory: Tensor, num_bytes: int, count: int) -> list[Launch]:
    """Return `count` plain copies of `num_bytes`, each between different addresses, cycling through all of `memory`.

    Args:
        memory: Contiguous; its contents are overwritten.
        num_bytes: Rounded down to a multiple of 256.

    Raises:
        ValueError: If `memory` is shorter than two copies.
    """
    memory = memory.view(-1).view(torch.uint8)
    half, copied = memory.numel() // 2, num_bytes // 256 * 256
    if half < copied:
        raise ValueError(f"need memory of at least {2 * copied} bytes to copy {copied}, found {memory.numel()}")

    def memcpy(start: int) -> Launch:
        return lambda: memory[half + start :][:copied].copy_(memory[start:][:copied])

    return [memcpy(start) for start in islice(cycle(range(0, half - copied + 1, copied)), count)]


def _captured(launches: Sequence[Launch], expected_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of the launches, in turn, for about GRAPH_MS, and their number."""
    count = min(256, max(4, round(GRAPH_MS * 1000 / expected_us)))
    for launch in launches[:2]:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in islice(cycle(launches), count):
            launch()
    return graph, count


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
