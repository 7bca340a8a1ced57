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
    """Return the number of available bytes of memory, limited by the host and by the container's cgroup."""
    found = []
    for line in _MEMORY_INFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    with suppress(OSError):  # no cgroup v2 limit is readable
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int(_CGROUP_USE.read_text(encoding="ascii")))
    return min(found, default=2**62)
