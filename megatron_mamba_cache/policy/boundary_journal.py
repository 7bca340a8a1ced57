"""Record which boundaries prompts can resume from, for the router between replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .identifiers import BlockId, BlockKey


class CachedTexts(Protocol):
    """Interface of the KV block pool that the slot pool uses: KV can be reused only together with a state."""

    def is_end(self, block: BlockId) -> bool:
        """Return whether no block is cached after this one."""

    def prune(self, block: BlockId) -> int:
        """Free the block and each ancestor that no state or request needs; return the number of freed blocks."""


class NoTexts:
    """`CachedTexts` for a slot pool without KV blocks."""

    def is_end(self, block: BlockId) -> bool:
        return True

    def prune(self, block: BlockId) -> int:
        return 0


class StateSaver:
    """Saves states to a lower tier before they are evicted. This base class saves nothing."""

    def saves(self, block: BlockId) -> bool:
        """Start to save the block's state, which would be evicted next; return True to evict other states first.

        After True, the pool does not call it again for this block until `SlotPool.stop_saving`. If the state is chosen
        for eviction again before that, it is evicted without waiting for the save.
        """
        return False

    def dropped(self, block: BlockId) -> None:
        """Record that the block's state is no longer cached."""

    def flushed(self) -> None:
        """Record that all states have been dropped."""


class StateObserver:
    """Observer that is notified when blocks get or lose a cached state. This base class does nothing.

    A subclass must neither raise nor change the pool.
    """

    def published(self, block: BlockId) -> None:
        """Record that a state has been cached at the end of the block."""

    def dropped(self, block: BlockId) -> None:
        """Record that the block's state is no longer cached."""

    def flushed(self) -> None:
        """Record that all states have been dropped."""


@dataclass(frozen=True, slots=True)
class BoundaryChanges:
    """Net changes of the set of resumable boundaries, each named by the key of the block that ends there.

    Args:
        were_flushed: True if all boundaries reported earlier have been dropped; `dropped` is then empty.
    """

    published: tuple[BlockKey, ...] = ()
    dropped: tuple[BlockKey, ...] = ()
    were_flushed: bool = False

    def __bool__(self) -> bool:
        return self.were_flushed or bool(self.published or self.dropped)


class BoundaryJournal(StateObserver):
    """Collects the changes of a slot pool's boundaries until `take` is called.

    A boundary that was added and dropped between two calls is not reported. The ancestors of a cached block are also
    cached, so prompts can resume at each block with a state. The journal holds one entry for each state in the pool,
    and one for each dropped boundary that has not been reported.
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
        """Return and clear the changes since the last call; `key_of` returns a block's current key, or None."""
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
