"""The secret of a coordinator on loopback, readable only by processes of the same user.

A client needs only the address, as with Megatron. A replica gets other clients' prompts, so it must know the secret.
"""

import hashlib
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .host_identity import host_identity

_NUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class JoiningSecret:
    """A secret in a file of this user's temporary folder."""

    path: Path
    value: bytes

    @classmethod
    def create(cls, port: int) -> Self:
        """Draw a secret and write it for the replicas, replacing that of an earlier coordinator on the port.

        Raises:
            PermissionError: If the folder belongs to another user or is open to others.
        """
        made = cls(_path_of(port), secrets.token_bytes(_NUM_BYTES))
        draft = made.path.with_name(f"{made.path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(made.value)
        os.replace(draft, made.path)
        return made

    @classmethod
    def read(cls, port: int) -> Self:
        """Return the secret of the coordinator on a port of this host.

        Raises:
            ConnectionError: If there is none.
            PermissionError: As `create`.
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
        """Delete the file, unless another coordinator has replaced it."""
        with suppress(OSError):
            if self.path.read_bytes() == self.value:
                self.path.unlink()


def _path_of(port: int) -> Path:
    folder = Path(tempfile.gettempdir()) / f"mamba-cache-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone; remove it, or set TMPDIR to another")
    host = hashlib.blake2b(host_identity().encode(), digest_size=8).hexdigest()
    return folder / f"coordinator-{host}-{port}"
