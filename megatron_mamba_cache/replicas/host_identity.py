"""Which processes share a loopback interface."""

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """Return a text that is the same in two processes only if both reach each other over loopback.

    A host's name alone does not tell: containers may share it, or share the host's kernel but not its network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux, or a sandbox that hides them
        boot = network = ""
    return "/".join((socket.gethostname(), boot, network))
