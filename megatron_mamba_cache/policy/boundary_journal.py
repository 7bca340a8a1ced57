"""Journal of the boundaries that prompts can start from, which the router between replicas reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .identifiers import BlockId, BlockKey


class CachedTexts(Protocol):
    """Interface of the KV blocks, which can be reused only together with a state, for the slot pool."""

    def is_end(self, block: BlockId) -> bool:
        """Return whether no block is cached after this one."""

    def prune(self, block: BlockId) -> int:
        """Free the block and each ancestor that no state or request needs; return how many became free."""


class NoTexts:
    """`CachedTexts` for a slot pool without KV blocks."""

    def is_end(self, block: BlockId) -> bool:
        return True

    def prune(self, block: BlockId) -> int:
        return 0


class StateSaver:
    """Saves states to a lower tier before they are evicted. This base class saves nothing."""

    def saves(self, block: BlockId) -> bool:
        """Start saving the state to be evicted next; return whether to evict other states before it.

        After True, it is not called again for this block until `SlotPool.stop_saving`. If the block is chosen for
        eviction again before that, its state is evicted without being saved.
        """
        return False

    def dropped(self, block: BlockId) -> None:
        """Note that the block's state is gone."""

    def flushed(self) -> None:
        """Note that all states are gone."""


class StateObserver:
    """Observer that is notified when blocks get or lose a cached state. This base class does nothing.

    A subclass must neither raise nor change the pool.
    """

    def published(self, block: BlockId) -> None:
        """Handle the publication of the state at the end of the block."""

    def dropped(self, block: BlockId) -> None:
        """Note that the block's state is gone."""

    def flushed(self) -> None:
        """Note that all states are gone."""


@dataclass(frozen=True, slots=True)
class BoundaryChanges:
    """Net changes of the resumable boundaries, as keys of the blocks that end there; all keys have one salt.

    Args:
        were_flushed: True if all boundaries reported earlier are gone; `dropped` is then empty.
    """

    published: tuple[BlockKey, ...] = ()
    dropped: tuple[BlockKey, ...] = ()
    were_flushed: bool = False

    def __bool__(self) -> bool:
        return self.were_flushed or bool(self.published or self.dropped)


class BoundaryJournal(StateObserver):
    """Collects a slot pool's changes until they are taken; a boundary added and dropped meanwhile is omitted.

    Prompts can resume exactly at blocks with a state, because a block is never evicted before its children. The journal
    holds one entry per state in the pool, and one per dropped boundary that is not reported yet.
    """

    def __init__(self) -> None:
        self._new: dict[BlockId, None] = {}  # published since the last `take`, oldest first
        self._reported: dict[BlockId, BlockKey] = {}
        self._gone: list[BlockKey] = []
        self._were_flushed = False

    def published(self, block: BlockId) -> None:
        self._new[block] = None

    def dropped(self, block: BlockId) -> None:
        if block in self._new:
            del self._new[block]
        elif block in self._reported:
            self._gone.append(self._reported.pop(block))

    def flushed(self) -> None:
        self._new.clear()
        self._reported.clear()
        self._gone.clear()
        self._were_flushed = True

    def take(self, key_of: Callable[[BlockId], BlockKey | None]) -> BoundaryChanges:
        """Return and clear the changes since the last call; `key_of` returns a block's current key."""
        published = []
        for block in self._new:
            key = key_of(block)
            if key is not None:
                self._reported[block] = key
                published.append(key)
        changes = BoundaryChanges(tuple(published), tuple(self._gone), self._were_flushed)
        self._new.clear()
        self._gone.clear()
        self._were_flushed = False
        return changes
