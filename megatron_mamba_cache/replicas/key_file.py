"""The key file that all hosts of a coordinator share: 32 random bytes as 64 hexadecimal digits."""

import os
import stat
from pathlib import Path

_MAKE = "(umask 077; openssl rand -hex 32 > FILE)"
_NUM_BYTES = 32


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """Return the secret of a file.

    Raises:
        ValueError: If the file cannot be read, holds something else, or other users can read or change it.
    """
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError(f"key file {path}: {error.strerror or error}; make one with {_MAKE}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"key file {path} is not text; make one with {_MAKE}") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ValueError(f"key file {path} is open to other users (mode {mode & 0o777:03o}); run chmod 600 {path}")
    if len(text) != 2 * _NUM_BYTES or not all(digit in "0123456789abcdefABCDEF" for digit in text):
        raise ValueError(
            f"key file {path} has {len(text)} characters that are not {2 * _NUM_BYTES} hexadecimal digits; make one "
            f"with {_MAKE}"
        )
    return bytes.fromhex(text)
