"""Names and format of the disk tier's entry files, and functions to write, read, list and remove them.

An entry file contains a header, one cached state, KV blocks in text order, and the SHA-256 digest of all these bytes.
It is written under a temporary name and renamed when it is complete.
"""

import contextlib
import hashlib
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..policy.tiers.copies import EntryName

_MAGIC = b"mmcache1"
_HEADER = struct.Struct("<8s32s32s32sIIQQ")
_DIGEST_BYTES = 32
_KEY_BYTES = 32
_SUFFIX = ".boundary"
_UNFINISHED = ".unfinished"
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})-([0-9]{1,9})-([0-9]{1,9})\.boundary")


class BrokenEntryError(Exception):
    """Raised if an entry file is corrupt or its content does not match its name."""


@dataclass(frozen=True, slots=True)
class EntryForm:
    """Format shared by all entry files in a directory.

    Args:
        identity: Digest of everything except the tokens that determines the stored bytes, such as weights and dtypes.
        state_bytes, block_bytes: Sizes of a state and a KV block in bytes.
    """

    identity: bytes
    state_bytes: int
    block_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Size of an entry file without its KV blocks, in bytes."""
        return _HEADER.size + self.state_bytes + _DIGEST_BYTES

    def size_of(self, name: EntryName) -> int:
        """Return the size of an entry's whole file in bytes."""
        return self.entry_bytes + name.num_blocks * self.block_bytes

    def header(self, name: EntryName) -> bytes:
        """Return the header of an entry's file, as bytes."""
        key, anchor = (number.to_bytes(_KEY_BYTES, "big") for number in (name.key, name.anchor))
        sizes = (name.depth, name.num_blocks, self.state_bytes, self.block_bytes)
        return _HEADER.pack(_MAGIC, self.identity, key, anchor, *sizes)


def file_name(name: EntryName) -> str:
    """Return the file name for an entry."""
    return f"{name.key:064x}-{name.anchor:064x}-{name.depth}-{name.num_blocks}{_SUFFIX}"


def entry_name(text: str) -> EntryName | None:
    """Parse a file name and return its entry; None if the name is not that of an entry file."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    name = EntryName(int(found[1], 16), int(found[2], 16), int(found[3]), int(found[4]))
    return name if name.key and 0 < name.num_blocks <= name.depth and file_name(name) == text else None


def write_entry(
    directory: Path, name: EntryName, form: EntryForm, state: memoryview, blocks: Iterable[memoryview]
) -> None:
    """Write an entry's file atomically.

    Raises:
        OSError: If the file cannot be written; the partial file is removed.
    """
    unfinished = directory / f"{name.key:064x}.{os.getpid()}{_UNFINISHED}"
    digest = hashlib.sha256()
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
            for piece in (memoryview(form.header(name)), state, *blocks):
                digest.update(piece)
                _write_all(file.fileno(), piece)
            _write_all(file.fileno(), memoryview(digest.digest()))
        os.replace(unfinished, directory / file_name(name))
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_entry(
    directory: Path, name: EntryName, form: EntryForm, state: memoryview | None, blocks: Mapping[int, memoryview]
) -> None:
    """Read an entry's file into the given buffers and verify its digest.

    Args:
        state: Buffer for the state; None if only blocks are needed.
        blocks: Buffers for KV blocks, keyed by block index in the text; the file's other blocks are only verified.

    Raises:
        BrokenEntryError: If the file is corrupt or does not match its name; the contents of the buffers are then
            undefined.
        OSError: If the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(directory / file_name(name), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != form.size_of(name):
            raise BrokenEntryError(f"{file.name} must have {form.size_of(name)} bytes, but has another size")
        header = memoryview(bytearray(_HEADER.size))
        spare = memoryview(bytearray(max(form.state_bytes if state is None else 0, form.block_bytes)))
        first = name.depth - name.num_blocks
        targets = [header, spare[: form.state_bytes] if state is None else state]
        targets += [blocks.get(first + index, spare[: form.block_bytes]) for index in range(name.num_blocks)]
        for target in targets:
            _read_all(file.fileno(), target)
            digest.update(target)
        found = memoryview(bytearray(_DIGEST_BYTES))
        _read_all(file.fileno(), found)
    if bytes(header) != form.header(name) or bytes(found) != digest.digest():
        raise BrokenEntryError(f"{directory / file_name(name)} is corrupt: its header or digest does not match")


def entries_in(directory: Path, form: EntryForm, unfinished_before: float) -> list[EntryName]:
    """Return the entries in a directory, oldest first; remove files that are not entries of this format.

    Args:
        unfinished_before: Time in seconds since the epoch. Unfinished files that were modified later are kept, because
            another server may be writing them.
    """
    found: list[tuple[int, str, EntryName]] = []
    with os.scandir(directory) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # another server has removed the file
                known = file.stat(follow_symlinks=False)
                name = entry_name(file.name)
                if name is not None and file.is_file(follow_symlinks=False) and known.st_size == form.size_of(name):
                    found.append((known.st_mtime_ns, file.name, name))
                elif not file.is_dir(follow_symlinks=False) and not (
                    file.name.endswith(_UNFINISHED) and known.st_mtime >= unfinished_before
                ):
                    os.unlink(file.path)
    return [name for _, _, name in sorted(found)]


def remove_entries(directory: Path, names: Sequence[EntryName]) -> None:
    """Remove the files of these entries; ignore files that do not exist."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (directory / file_name(name)).unlink()


def _write_all(file: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(file, piece) :]


def _read_all(file: int, target: memoryview) -> None:
    while len(target):
        count = os.readv(file, [target])
        if not count:
            raise BrokenEntryError("the entry file ended before all of its content was read")
        target = target[count:]
