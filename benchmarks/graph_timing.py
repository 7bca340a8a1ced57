"""Time launches inside CUDA graphs, and the plain copies that bound them."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median

import torch
from torch import Tensor

GRAPH_MS = 12.0
NUM_REPLAYS = 15
PIECE_BYTES = 2**29  # memcpy nodes of graphs slow down from 1.6 GiB on

Launch = Callable[[], object]


def launch_us(launches: Sequence[Launch], expected_us: float) -> float:
    """Return the median time of a launch in a graph that repeats `launches`, in turn, for about GRAPH_MS."""
    count = min(256, max(4, round(GRAPH_MS * 1000 / expected_us)))
    for launch in launches[:2]:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in islice(cycle(launches), count):
            launch()
    return median(_replay_ms(graph) for _ in range(NUM_REPLAYS + 3)) * 1000 / count


def memcpys(memory: Tensor, num_bytes: int, count: int) -> list[Launch]:
    """Return `count` plain copies of `num_bytes`, from and to other places of `memory` each, all of it in turn.

    Args:
        memory: Contiguous; what it holds is overwritten.

    Raises:
        ValueError: If `memory` is shorter than two pieces.
    """
    memory = memory.view(-1).view(torch.uint8)
    half = memory.numel() // 2
    num_pieces = -(-num_bytes // PIECE_BYTES)
    piece = num_bytes // num_pieces // 256 * 256
    if half < piece:
        raise ValueError(f"need memory of at least {2 * piece} bytes for copies of {piece}, found {memory.numel()}")
    places = cycle(range(0, half - piece + 1, piece))

    def memcpy(starts: Sequence[int]) -> Launch:
        def copy() -> None:
            for start in starts:
                memory[half + start :][:piece].copy_(memory[start:][:piece])

        return copy

    return [memcpy(list(islice(places, num_pieces))) for _ in range(count)]


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
