"""Check the flags of this machine: its device, host memory and directories. Works before torch is imported."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from ..errors import HostBudgetError
from ..tiers.host_budget import available_bytes
from .cache_flags import argument_of
from .usage_error import UsageError


def select_device(name: str) -> str:
    """Make this process use "cpu" or "cuda", with "auto" whichever is available; return which it is.

    Raises:
        UsageError: If CUDA is asked for and there is no device, or the CPU is and the process uses CUDA already.
    """
    if name == "cpu":
        _hide_cuda()  # a process cannot leave CUDA once it is in use
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


def check_tiers(arguments: Namespace) -> None:
    """Raise `UsageError` for a host budget or a directory that this machine cannot give; change nothing.

    The engine looks again once the weights are loaded, and knows then how large a boundary is.
    """
    host_gb = getattr(arguments, argument_of("host_cache_gb"))
    if host_gb is not None and host_gb * 2**30 > available_bytes():
        raise UsageError(str(HostBudgetError(host_gb, available_bytes())))
    directory = getattr(arguments, argument_of("disk_cache_dir"))
    if directory is not None and not _can_be_written(Path(directory)):
        raise UsageError(f"--disk-cache-dir {directory}: cannot be made or written; name a directory that can")


def _can_be_written(directory: Path) -> bool:
    """Return whether entries can be written there: into it, or into the nearest directory above that exists."""
    path = directory.absolute()
    try:
        existing = next(found for found in (path, *path.parents) if os.path.lexists(found))
    except (OSError, ValueError):
        return False
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
