"""Index of the resumable boundaries on disk, in eviction order."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from ...errors import CacheIntegrityError
from ..identifiers import BlockKey
from .copies import EntryName


class DiskIndex:
    """Entries on disk by key, ordered by last use. The least recently used entry without successors is evicted first.

    Args:
        block_bytes, entry_bytes: Size in bytes of one KV block in a file, and of an entry without its blocks.
        limit: Maximum size of all entries together, in bytes.
    """

    def __init__(self, block_bytes: int, entry_bytes: int, limit: int) -> None:
        self._block_bytes = block_bytes
        self._entry_bytes = entry_bytes
        self._limit = limit
        self._entries: OrderedDict[int, EntryName] = OrderedDict()
        self._num_after: dict[int, int] = {}  # by key: number of entries that directly follow it; absent if 0
        self.num_bytes = 0
        """Size of all entries together, in bytes."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    @property
    def num_free_bytes(self) -> int:
        """Number of bytes that known entries leave free; entries of other servers may already use some of them."""
        return max(self._limit - self.num_bytes, 0)

    def bytes_of(self, name: EntryName) -> int:
        """Return the size of an entry in bytes."""
        return self._entry_bytes + name.num_blocks * self._block_bytes

    def add(self, name: EntryName) -> None:
        """Record that an entry is on disk; if it is already recorded, count it as just used."""
        if name.key in self._entries:
            self.use([name])
            return
        self._entries[name.key] = name
        self.num_bytes += self.bytes_of(name)
        self._num_after[name.anchor] = self._num_after.get(name.anchor, 0) + 1

    def remove(self, name: EntryName) -> None:
        """Record that an entry is no longer on disk; do nothing if it is unknown."""
        if self._entries.get(name.key) != name:
            return
        del self._entries[name.key]
        self.num_bytes -= self.bytes_of(name)
        self._num_after[name.anchor] -= 1
        if not self._num_after[name.anchor]:
            del self._num_after[name.anchor]

    def use(self, names: Iterable[EntryName]) -> None:
        """Count entries as just used."""
        for name in names:
            if name.key in self._entries:
                self._entries.move_to_end(name.key)

    def make_room(self, name: EntryName, kept: Iterable[int]) -> list[EntryName] | None:
        """Remove entries until `name` fits and return them; return None and change nothing if it cannot fit.

        Args:
            kept: Keys of entries that must not be removed.
        """
        most, stay = self._limit - self.bytes_of(name), set(kept)
        leaving: list[EntryName] = []
        while self.num_bytes > most:
            found = self._first_that_may_leave(stay)
            if found is None:
                for entry in reversed(leaving):
                    self.add(entry)
                    self._entries.move_to_end(entry.key, last=False)
                return None
            self.remove(found)
            leaving.append(found)
        return leaving

    def anchor_of(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of blocks up to the deepest entry on disk before the end of a text; 0 if there is none."""
        return next((depth for depth in range(len(keys) - 1, 0, -1) if keys[depth - 1] in self._entries), 0)

    def chain(self, keys: Sequence[BlockKey], num_known: int) -> list[EntryName]:
        """Return the entries to read, in text order, for the deepest boundary that can be read; empty if there is none.

        Args:
            keys: Keys of the text's blocks.
            num_known: Number of leading blocks that are already on the host and need not be read.
        """
        for depth in range(len(keys), 0, -1):
            if keys[depth - 1] in self._entries and (found := self._chain_to(keys, depth, num_known)):
                return found
        return []

    def trim(self) -> list[EntryName]:
        """Remove entries until their total size is at most the limit; return the removed entries."""
        leaving = []
        while self.num_bytes > self._limit and (found := self._first_that_may_leave(())) is not None:
            self.remove(found)
            leaving.append(found)
        return leaving

    def close(self) -> None:
        """Forget all entries, and lower the limit so that no entry fits any more."""
        self.clear()
        self._limit = -1

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self._num_after.clear()
        self.num_bytes = 0

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless the counts match the entries. O(n)."""
        num_bytes = sum(map(self.bytes_of, self._entries.values()))
        num_after: dict[int, int] = {}
        for name in self._entries.values():
            num_after[name.anchor] = num_after.get(name.anchor, 0) + 1
        if (num_bytes, num_after) != (self.num_bytes, self._num_after):
            raise CacheIntegrityError(
                f"the entries have {num_bytes} bytes and successors {num_after}, but {self.num_bytes} and "
                f"{self._num_after} are counted"
            )

    def _first_that_may_leave(self, stay: Container[int]) -> EntryName | None:
        names = self._entries.values()
        return next((name for name in names if name.key not in self._num_after and name.key not in stay), None)

    def _chain_to(self, keys: Sequence[BlockKey], depth: int, num_known: int) -> list[EntryName]:
        found: list[EntryName] = []
        while True:
            name = self._entries.get(keys[depth - 1])
            before = depth - (0 if name is None else name.num_blocks)
            if name is None or name.depth != depth or not 0 <= before < depth:
                return []
            found.append(name)
            if before <= num_known:
                return found[::-1]
            depth = before
