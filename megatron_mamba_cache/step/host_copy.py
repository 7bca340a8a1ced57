"""Results on their way from the device to the host."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor at this point of the stream; the device may overwrite the tensor afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", copy=True, non_blocking=True)  # into pinned memory
        self._arrival = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrival is not None:
            self._arrival.record(stream_of(tensor))

    @property
    def is_of_gpu(self) -> bool:
        """True when the tensor is on a GPU, so that there is something to wait for."""
        return self._arrival is not None

    def wait(self) -> list[list[int]]:
        """Wait for the copy of a table of integers and return its rows."""
        lines: list[list[int]] = self.arrived().tolist()
        return lines

    def arrived(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy


def stream_of(tensor: Tensor) -> torch.cuda.Stream:
    """Return the current stream of a CUDA tensor's device; torch finds it fastest by the device's number."""
    return torch.cuda.current_stream(tensor.get_device())
