"""Run the shared expert on a second stream, concurrently with routing or with the routed experts' GEMMs."""

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
"""Maximum number of tokens for which a concurrent GEMM does not slow down routing."""
_MOST_TOKENS = 1024


def takes_shared_gemm(x: Tensor, weight: Tensor, activation: Activation) -> bool:
    """Return True if `shared_gemm` is faster than a dense GEMM for `x` [tokens, inputs]."""
    is_between = MOST_TOKENS_OVERLAPPING_ROUTING < len(x) <= _MOST_TOKENS
    is_gated = activation == "gated_silu"
    return is_between and takes_long_tiles(x, weight[None], len(x), is_gathered=False, is_gated=is_gated)


def shared_gemm(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    """Multiply all tokens by the shared expert's weights, and apply the activation.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        weight: [outputs, inputs], contiguous; for `gated_silu` [2 * outputs, inputs], gates first.

    Returns:
        [tokens, outputs] in the dtype of `x`.

    Raises:
        ValueError: For the same errors as `grouped_gemm`.

    Reference: `grouped_gemm_ref`. CUDA-graph safe after one eager run with the same number of tokens: later runs
    have no host sync and one launch.
    """
    return grouped_gemm(x, weight[None], _order_of_one(len(x), x.device), activation=activation)


@cache
def _order_of_one(num_tokens: int, device: torch.device) -> ExpertOrder:
    """Return the order and row tiles for tokens that all use one expert; cached, because CUDA graphs keep reading it.

    The host computes it, because `compiling_ahead` only compiles kernels, which would leave it undefined.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    return ExpertOrder(tokens, tokens[:, None], starts.to(device), tile_rows_ref(starts, num_tokens).to(device))


class OverlappedExpert:
    """Computation of the shared expert, which runs on a second stream inside CUDA graphs.

    With few tokens, the shared expert is limited by reading its weights. It then overlaps with routing, because the
    small routing kernels leave the memory bandwidth idle. Routing is launched first so that its programs do not wait
    for those of larger kernels. The routed GEMMs fill the GPU, so the second stream has high priority. With more
    tokens, the shared expert's programs occupy whole multiprocessors and would delay routing. It is then launched after
    routing, and uses the multiprocessors that the routed GEMMs leave idle. In eager mode, a second stream costs more
    host time than it saves, so the current stream is used.

    Args:
        begin: Called by the constructor. It may launch work that does not slow down routing, and returns a function
            that computes the output [tokens, hidden].
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
        """Launch the computation; if `after_queued`, it starts after all work queued on the current stream."""
        if after_queued and self._stream is not None and self._inputs is not None:
            self._inputs.record()
            self._stream.wait_event(self._inputs)
        with torch.cuda.stream(self._stream):
            self._output = self._compute()

    def output(self) -> Tensor:
        """Make the current stream wait for the output, and return it; call `launch` first."""
        assert self._output is not None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._output
