"""Overlap the shared expert with routing or with the routed GEMMs."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..activations import Activation
from ..overlap import side_stream
from .gemm_tiles import takes_long_tiles, tile_rows_ref
from .grouped_gemm import grouped_gemm
from .reference_experts import ExpertOrder

MOST_TOKENS_OVERLAPPING_ROUTING = 256
"""Most tokens for which overlap with any GEMM does not slow routing."""
_MOST_TOKENS = 1024


def takes_shared_gemm(x: Tensor, weight: Tensor, activation: Activation) -> bool:
    """Return True if `shared_gemm` is faster for these tokens [tokens, inputs]."""
    is_between = MOST_TOKENS_OVERLAPPING_ROUTING < len(x) <= _MOST_TOKENS
    is_gated = activation == "gated_silu"
    return is_between and takes_long_tiles(x, weight[None], len(x), is_gathered=False, is_gated=is_gated)


def shared_gemm(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    """Return the activated GEMM of all tokens with an expert's weights.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        weight: [outputs, inputs], contiguous; [2 * outputs, inputs] for `gated_silu`: gates first.

    Returns:
        [tokens, outputs] in x's dtype.

    Raises:
        ValueError: As `grouped_gemm`.

    Reference: `grouped_gemm_ref`. CUDA-graph safe once it has run for as many tokens: no host sync, one launch.
    """
    return grouped_gemm(x, weight[None], _order_of_one(len(x), x.device), activation=activation)


@cache
def _order_of_one(num_tokens: int, device: torch.device) -> ExpertOrder:
    """Return the order of tokens that all chose one expert, with its tiles; cached, since graphs read it.

    Computed on the host: the cache must not depend on a kernel, which `compiling_ahead` would not launch.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    return ExpertOrder(tokens, tokens[:, None], starts.to(device), tile_rows_ref(starts, num_tokens).to(device))


class OverlappedExpert:
    """The shared expert's output, computed on a second stream inside graphs.

    For few tokens the time is that of reading its weights: it is launched while the others are routed, by small kernels
    that leave the memory idle. The routing is launched first, or its programs would wait for the larger kernels'. The
    routed GEMMs fill the card, so the shared expert's stream has high priority. With more tokens its programs take
    whole multiprocessors and would delay routing: they are launched after it, and use what the GEMMs leave idle.
    Without a graph, a second stream costs the host more than it gains.

    Args:
        begin: Called at once: launches what leaves room for routing, if anything, and returns a function that computes
            the rest, [tokens, hidden].
    """

    def __init__(self, begin: Callable[[], Callable[[], Tensor]], device: torch.device) -> None:
        self._inputs: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._output: Tensor | None = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._stream, self._inputs = side_stream(device), torch.cuda.Event()
            self._inputs.record()
            self._stream.wait_event(self._inputs)
        with torch.cuda.stream(self._stream):
            self._compute = begin()

    def launch(self, *, after_queued: bool) -> None:
        """Launch the rest; `after_queued` waits for all work queued on the current stream."""
        if after_queued and self._stream is not None and self._inputs is not None:
            self._inputs.record()
            self._stream.wait_event(self._inputs)
        with torch.cuda.stream(self._stream):
            self._output = self._compute()

    def output(self) -> Tensor:
        """Return the result, for the current stream; call `launch` first."""
        assert self._output is not None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._output
