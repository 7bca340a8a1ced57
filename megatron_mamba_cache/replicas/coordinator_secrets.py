"""Secrets of a coordinator: a temporary secret for replicas on one host, or a key file shared by several hosts."""

import hashlib
import os
import secrets
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NUM_BYTES = 32
_MAKE = "(umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True, slots=True)
class JoiningSecret:
    """Secret that a process needs to join a coordinator as a replica, in a file that only its user can read.

    Replicas receive the prompts of all clients, so they must prove that they have the secret. Clients need only the
    coordinator's address, as with Megatron.
    """

    path: Path
    value: bytes

    @classmethod
    def create(cls, port: int) -> Self:
        """Write a new secret for the coordinator on `port`; it replaces the secret of an earlier coordinator.

        Raises:
            PermissionError: If the folder belongs to another user or is accessible to other users.
        """
        made = cls(_path_of(port), secrets.token_bytes(_NUM_BYTES))
        draft = made.path.with_name(f"{made.path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(made.value)
        os.replace(draft, made.path)
        return made

    @classmethod
    def read(cls, port: int) -> Self:
        """Read the secret of the coordinator on `port` of this host.

        Raises:
            ConnectionError: If there is no secret for this port.
            PermissionError: If the folder belongs to another user or is accessible to other users.
        """
        path = _path_of(port)
        try:
            value = path.read_bytes()
        except OSError as error:
            raise ConnectionError(
                f"no coordinator of this user has port {port} ({path}: {error.strerror}); start replicas as the user "
                "and with the TMPDIR of the coordinator, or give all of them a coordinator key file"
            ) from error
        return cls(path, value)

    def remove(self) -> None:
        """Delete the file, unless another coordinator on the same port has overwritten it."""
        with suppress(OSError):
            if self.path.read_bytes() == self.value:
                self.path.unlink()


def _path_of(port: int) -> Path:
    folder = Path(tempfile.gettempdir()) / f"mamba-cache-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not private to this user; remove it, or set TMPDIR to another folder")
    host = hashlib.blake2b(host_identity().encode(), digest_size=8).hexdigest()
    return folder / f"coordinator-{host}-{port}"


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """Return the 32-byte secret in a key file, which contains 64 hexadecimal digits.

    Raises:
        ValueError: If the file cannot be read, does not have this format, or is accessible to other users.
    """
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError(f"cannot read key file {path}: {error.strerror or error}; create one with {_MAKE}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"key file {path} is not text; create one with {_MAKE}") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(f"key file {path} is open to other users (mode {mode & 0o777:03o}); run chmod 600 {path}")
    if len(text) != 2 * _NUM_BYTES or not all(digit in "0123456789abcdefABCDEF" for digit in text):
        raise ValueError(
            f"key file {path} must contain {2 * _NUM_BYTES} hexadecimal digits, found {len(text)} characters; "
            f"create one with {_MAKE}"
        )
    return bytes.fromhex(text)


def host_identity() -> str:
    """Return a string that is equal in two processes only if they share a loopback interface.

    The hostname is not sufficient: containers may have equal hostnames, or share the host's kernel but not its network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux, or a sandbox that hides these files
        boot = network = ""
    return "/".join((socket.gethostname(), boot, network))
