"""The shared expert of a layer, computed beside the routing of the others or beside their products."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


class BesideExperts:
    """The shared expert's output, which in a graph is computed beside the layer's other kernels.

    Few tokens take the time of reading its weights: it is launched while the others are routed, by small kernels that
    leave the memory idle. The routing is launched first, as its programs would wait for the larger kernels' otherwise.
    The routed experts' products fill the card, so its stream has their priority: its programs are the next ones to
    begin, not those that come last. Without a graph, another stream costs the host more than it gains.

    Args:
        compute: Returns [tokens, hidden] from what has been computed when this object is made.
        gives_way: Whether the main part's programs begin before those of `compute`.
    """

    def __init__(self, compute: Callable[[], Tensor], device: torch.device, *, gives_way: bool = False) -> None:
        self._compute = compute
        self._inputs: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._output: Tensor | None = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # In a graph the main part has priority -1.
            self._stream, self._inputs = _stream_beside(device, 0 if gives_way else -1), torch.cuda.Event()
            self._inputs.record()

    def launch(self) -> None:
        """Begin to compute."""
        if self._stream is None or self._inputs is None:
            self._output = self._compute()
            return
        self._stream.wait_event(self._inputs)
        with torch.cuda.stream(self._stream):
            self._output = self._compute()

    def output(self) -> Tensor:
        """Return the result, for the current stream; a launch comes first."""
        assert self._output is not None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._output


@cache
def _stream_beside(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Return the device's stream of a priority for what runs beside a layer's main part."""
    return torch.cuda.Stream(device, priority=priority)
