"""API keys from flags and from files of one key a line."""

import re
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from ..server.tenants import ApiKeys
from .usage_error import UsageError

_NAMED = re.compile(r"([A-Za-z0-9._-]{1,64}):\s+(\S.*)")


@dataclass(frozen=True, slots=True)
class _KeyFile:
    keys: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # by key


def api_keys_of(arguments: Namespace) -> ApiKeys:
    """Return the keys of all flags.

    Raises:
        UsageError: If a file cannot be read or has no key, or a key is not valid.
    """
    users = _read("--api-key-file", arguments.api_key_file)
    admins = _read("--admin-api-key-file", arguments.admin_api_key_file)
    try:
        return ApiKeys(
            [*arguments.api_key, *users.keys], [*arguments.admin_api_key, *admins.keys], users.names | admins.names
        )
    except ValueError as error:
        raise UsageError(f"--api-key: {error}") from error


def _read(flag: str, path: str | None) -> _KeyFile:
    """Return the keys of a file whose lines are KEY or NAME: KEY; none without a file."""
    found = _KeyFile()
    if path is None:
        return found
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    for line in filter(None, map(str.strip, lines)):
        named = _NAMED.fullmatch(line)
        key = line if named is None else named[2]
        found.keys.append(key)
        if named is not None:
            found.names[key] = named[1]
    if not found.keys:
        raise UsageError(f"{flag} {path}: it has no key; write one a line")
    return found
