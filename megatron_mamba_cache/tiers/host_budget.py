"""Find the host's available memory and the number of processes that share it."""

import os
from contextlib import suppress
from pathlib import Path

_MEMORY_INFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USE = Path("/sys/fs/cgroup/memory.current")


def processes_of_host() -> int:
    """Return the number of processes that torchrun has started on this host; 1 without torchrun."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def available_bytes() -> int:
    """Return the host's available memory in bytes, or that of the container's cgroup if it is smaller."""
    found = []
    for line in _MEMORY_INFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    with suppress(OSError):  # there is no readable cgroup v2 limit
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int(_CGROUP_USE.read_text(encoding="ascii")))
    return min(found, default=2**62)
