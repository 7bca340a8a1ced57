"""The shared expert of a layer, computed beside the routing of the others or beside their products."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


class BesideExperts:
    """The shared expert's product, which in a graph runs beside the layer's other kernels.

    Few tokens take the time of reading its weights: it is launched while the others are routed, by small kernels that
    leave the memory idle. The routing is launched first, as its programs would wait for the larger kernels' otherwise.
    The routed experts' products fill the card, so it has their priority: its programs are the next ones to begin, not
    those that come last. With more tokens it would hold the routing up, and is launched beside the products: they leave
    it some multiprocessors, and it leaves them all others. Without a graph, another stream costs the host more than it
    gains.

    Args:
        compute: Returns [tokens, hidden] from what has been computed so far.
    """

    def __init__(self, compute: Callable[[], Tensor], device: torch.device) -> None:
        self._compute = compute
        self._device = device
        self._inputs: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._output: Tensor | None = None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._inputs = torch.cuda.Event()
            self._inputs.record()

    @property
    def has_stream(self) -> bool:
        """Whether it runs on a stream of its own."""
        return self._inputs is not None

    def launch(self) -> None:
        """Begin to compute, as soon as what there was when this object was made has been computed."""
        self._launch(priority=-1)

    def launch_behind(self) -> None:
        """Begin to compute once all that the current stream has been given by now has ended."""
        if self._inputs is not None:
            self._inputs.record()
        self._launch(priority=0)

    def _launch(self, priority: int) -> None:
        if self._inputs is None:
            self._output = self._compute()
            return
        self._stream = _stream_beside(self._device, priority)
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
    """Return the device's stream of a priority for what runs beside a layer's main part; that has -1 in a graph."""
    return torch.cuda.Stream(device, priority=priority)
