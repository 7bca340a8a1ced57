"""Where ops launch their Triton kernels."""

import triton
from torch import Tensor

# Read once: Triton binds a kernel to the interpreter or to the compiler when the kernel's module is imported.
INTERPRETED: bool = triton.knobs.runtime.interpret


def launches_kernel(tensor: Tensor) -> bool:
    """Return whether an op on `tensor` launches its kernel; otherwise it computes with its torch twin."""
    return tensor.is_cuda or INTERPRETED
