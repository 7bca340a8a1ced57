"""Directory of the disk tier, which several servers may share.

An entry is a file with one cached state and the KV blocks since the previous cached state. The generation is the number
of flushes of the cache.

    DIR/<identity>/generation          current generation, as decimal text
    DIR/<identity>/lock                lock file, locked in shared mode by each server that uses the directory
    DIR/<identity>/<generation>/<rank of ranks>/   entries

The keys of entries depend on the generation, so entries of earlier generations are never found. Directories have the
mode 0700.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CacheError
from ..policy.tiers.copies import EntryName
from .entry_files import EntryForm, entries_in

_UNFINISHED_S = 600.0
_IDENTITY_DIGITS = 64


class CacheDirectory:
    """One rank's directory of entries on disk, and the generation file, which all ranks and servers share.

    Args:
        base: Value of the setting `disk_cache_dir`; the directory is created if it does not exist.
        form: Format of the entries; its `identity` names the subdirectory for this model and its weights.
        part: Name of this rank's subdirectory, unique among the ranks of the model.

    Raises:
        CacheError: If the directory cannot be created or written.
    """

    def __init__(self, base: Path, form: EntryForm, part: str) -> None:
        self.form = form
        self._base = base
        self._part = part
        self._home = base / form.identity.hex()
        with _explained(base):
            for directory in (base, self._home):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self.generation = self.known_generation()

    @property
    def entries(self) -> Path:
        """Path of the directory with this rank's entries of the current generation."""
        return self._home / str(self.generation) / self._part

    def open(self, generation: int) -> list[EntryName]:
        """Switch to a generation, remove all earlier generations, and return the entries on disk, oldest first.

        The generation is first written to disk and synced, so earlier generations are never used again, even after a
        crash.

        Raises:
            CacheError: If the directory cannot be written.
        """
        with _explained(self._base):
            self._set_generation(generation)
            self.entries.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(self.entries.parent, 0o700)
            for number, found in self._generations().items():
                if number < generation:
                    shutil.rmtree(found, ignore_errors=True)
            return entries_in(self.entries, self.form, time.time() - _UNFINISHED_S)

    def next_generation(self) -> int:
        """Return a number that is greater than every generation used so far."""
        with _explained(self._base):
            return max(self.generation, self.known_generation()) + 1

    def shared_entries(self) -> list[EntryName]:
        """Return the entries on disk that any server has written, oldest first; empty if they cannot be listed."""
        with contextlib.suppress(OSError):
            return entries_in(self.entries, self.form, time.time() - _UNFINISHED_S)
        return []

    def changed_at(self) -> int | None:
        """Return the modification time of `entries` in nanoseconds; None if it cannot be read."""
        with contextlib.suppress(OSError):
            return os.stat(self.entries).st_mtime_ns
        return None

    def remove_unused(self, limit: int) -> None:
        """Remove subdirectories of other models or weights until the whole directory fits in `limit` bytes.

        The least recently used subdirectories are removed first. Subdirectories that a server is using are kept, so
        the directory may remain larger than the limit.
        """
        with contextlib.suppress(OSError):
            others = [found for found in self._base.iterdir() if found != self._home and _is_identity(found.name)]
            sizes = {found: _bytes_in(found) for found in others}
            total = sum(sizes.values()) + _bytes_in(self._home)
            for found in sorted(others, key=_last_use):
                if total <= limit:
                    return
                if _is_unused(found):
                    shutil.rmtree(found, ignore_errors=True)
                    total -= sizes[found]

    def close(self) -> None:
        """Release this server's lock. Once no server holds the lock, other servers may remove the subdirectory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def known_generation(self) -> int:
        """Return the latest generation that any server has used; 0 if there is none.

        If the file `generation` is missing or invalid, the number is taken from the names of subdirectories.
        """
        with _explained(self._base):
            used = list(self._generations())
            with contextlib.suppress(FileNotFoundError, ValueError):
                used.append(int((self._home / "generation").read_text(encoding="ascii")))
        return max(used, default=0)

    def _generations(self) -> dict[int, Path]:
        """Return the path of each generation's subdirectory, keyed by generation."""
        return {int(found.name): found for found in self._home.iterdir() if found.name.isdecimal()}

    def _set_generation(self, generation: int) -> None:
        """Write a generation to disk and sync it, unless a later generation is stored."""
        file = self._home / "generation"
        with _opened(self._home / "generation.lock", os.O_RDWR | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists() or self.known_generation() <= generation:
                new = self._home / f"generation.{os.getpid()}"
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as text:
                    text.write(str(generation))
                    text.flush()
                    os.fsync(text.fileno())
                os.replace(new, file)
                with _opened(self._home, os.O_RDONLY) as home:
                    os.fsync(home)
            os.utime(self._home)
        self.generation = generation


@contextmanager
def _explained(base: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(f"cannot use --disk-cache-dir {base}: {error.strerror or error}") from error


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_identity(name: str) -> bool:
    return len(name) == _IDENTITY_DIGITS and set(name) <= set("0123456789abcdef")


def _is_unused(home: Path) -> bool:
    with contextlib.suppress(OSError), _opened(home / "lock", os.O_RDWR) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _last_use(home: Path) -> float:
    try:
        return home.stat().st_mtime
    except OSError:
        return 0.0


def _bytes_in(home: Path) -> int:
    total = 0
    for folder, _, files in os.walk(home):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, file)).st_size
    return total
