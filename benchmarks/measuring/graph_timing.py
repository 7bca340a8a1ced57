"""Time kernel launches and plain copies inside CUDA graphs."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median

import torch
from torch import Tensor

GRAPH_MS = 12.0
NUM_REPLAYS = 15
MOST_COPIED = 3 * 2**27  # maximum bytes read by a measured copy; larger copies run at two thirds of the speed in graphs
MEMCPY_NOTE = (
    "The memcpy of more than 384 MiB is the one of 384 MiB, scaled by bytes: larger ones slow down in graphs and are "
    "no ceiling."
)

Launch = Callable[[], object]


def launch_us(launches: Sequence[Launch], expected_us: float) -> float:
    """Return the median time in microseconds of one launch in a CUDA graph that cycles through `launches`.

    The graph runs for about GRAPH_MS, estimated from `expected_us` per launch.
    """
    graph, count = _captured(launches, expected_us)
    return median(_replay_ms(graph) for _ in range(NUM_REPLAYS + 3)) * 1000 / count


def interleaved_us(variants: Sequence[Sequence[Launch]], expected_us: float, num_rounds: int) -> list[float]:
    """Return `launch_us` of each variant; graphs are replayed in turn, so that drift affects all of them equally."""
    graphs = [_captured(launches, expected_us) for launches in variants]
    rounds = [[_replay_ms(graph) for graph, _ in graphs] for _ in range(num_rounds + 3)][3:]
    times = zip(*rounds, strict=True)
    return [median(ms) * 1000 / count for ms, (_, count) in zip(times, graphs, strict=True)]


def memcpy_us(memory: Tensor, num_bytes: int) -> float:
    """Return the time in microseconds of a plain copy that reads `num_bytes` and writes `num_bytes`.

    No memory-bound kernel can be faster. Copies of more than MOST_COPIED bytes are slow in CUDA graphs, so their time
    is extrapolated from a copy of MOST_COPIED.

    Args:
        memory: As for `memcpys`.
    """
    copied = min(max(num_bytes, 256), MOST_COPIED)
    count = min(256, max(1, memory.nbytes // 2 // copied))
    return launch_us(memcpys(memory, copied, count), max(2.0, copied / 2e6)) * num_bytes / copied


def memcpys(memory: Tensor, num_bytes: int, count: int) -> list[Launch]:
    """Return `count` plain copies of `num_bytes` between different addresses, cycling through all of `memory`.

    Args:
        memory: Contiguous tensor; its contents are overwritten.
        num_bytes: Bytes per copy, rounded down to a multiple of 256.

    Raises:
        ValueError: If `memory` is too small for one copy.
    """
    memory = memory.view(-1).view(torch.uint8)
    half, copied = memory.numel() // 2, num_bytes // 256 * 256
    if half < copied:
        raise ValueError(f"memory must have at least {2 * copied} bytes to copy {copied} bytes, found {memory.numel()}")

    def memcpy(start: int) -> Launch:
        return lambda: memory[half + start :][:copied].copy_(memory[start:][:copied])

    return [memcpy(start) for start in islice(cycle(range(0, half - copied + 1, copied)), count)]


def _captured(launches: Sequence[Launch], expected_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture a graph of about GRAPH_MS that cycles through the launches; return it and its number of launches."""
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
