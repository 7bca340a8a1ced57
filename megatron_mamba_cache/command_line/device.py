"""Choose the device. Works before torch is imported, because a process cannot leave CUDA once it is in use."""

import os
import sys

from .usage_error import UsageError


def select_device(name: str) -> str:
    """Make this process use "cpu" or "cuda", with "auto" whichever is available; return which it is.

    Raises:
        UsageError: If CUDA is asked for and there is no device, or the CPU is and the process uses CUDA already.
    """
    if name == "cpu":
        _hide_cuda()
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return "cpu"


def _hide_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UsageError("--device cpu: this process uses CUDA already; start a new one")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
