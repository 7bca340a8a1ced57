"""The flags of the tiers below the device, against this machine. Imports neither torch nor megatron."""

import os
from argparse import Namespace
from pathlib import Path

from ..config import argument_of
from ..errors import HostBudgetError
from ..tiers.host_budget import available_bytes
from .usage_error import UsageError


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
