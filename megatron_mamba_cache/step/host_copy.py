"""What the device found, on its way to the host."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor as it is at this place of the stream; the device may overwrite it behind."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", copy=True, non_blocking=True)  # into pinned memory
        self._arrival = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrival is not None:
            self._arrival.record(stream_of(tensor))

    @property
    def is_of_gpu(self) -> bool:
        """Whether there is anything to wait for."""
        return self._arrival is not None

    def wait(self) -> list[list[int]]:
        """Wait for it, and return its lines."""
        if self._arrival is not None:
            self._arrival.synchronize()
        lines: list[list[int]] = self._copy.tolist()
        return lines


def stream_of(tensor: Tensor) -> torch.cuda.Stream:
    """Return the current stream of a CUDA tensor's device, which torch finds by number without a dozen calls."""
    return torch.cuda.current_stream(tensor.get_device())
