"""Record which boundaries prompts can start from, and how they change, for the router between replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .identifiers import BlockId, BlockKey


class CachedTexts(Protocol):
    """KV blocks that can be reused only together with a state."""

    def is_end(self, block: BlockId) -> bool:
        """Return whether no block is cached after this one."""

    def prune(self, block: BlockId) -> int:
        """Free the block and its ancestors that no state or request needs; return how many became free."""


class NoTexts:
    """`CachedTexts` for a slot pool without KV blocks."""

    def is_end(self, block: BlockId) -> bool:
        return True

    def prune(self, block: BlockId) -> int:
        return 0


class StateSaver:
    """Save states to a lower tier before they are evicted. This base class saves none."""

    def saves(self, block: BlockId) -> bool:
        """Start to save the state of the block that is evicted next; return whether to evict other states first.

        If so, it is not asked again until `SlotPool.stop_saving`: a state that comes up again leaves, and is lost.
        """
        return False

    def dropped(self, block: BlockId) -> None:
        """Note that the block's state is gone."""

    def flushed(self) -> None:
        """Note that all states are gone."""


class StateObserver:
    """Observer of the blocks that get or lose a cached state. This base class does nothing.

    A subclass must neither raise nor change the pool.
    """

    def published(self, block: BlockId) -> None:
        """Note that the state at the end of the block can now be found."""

    def dropped(self, block: BlockId) -> None:
        """Note that the block's state is gone."""

    def flushed(self) -> None:
        """Note that all states are gone."""


@dataclass(frozen=True, slots=True)
class BoundaryChanges:
    """Net changes of the resumable boundaries, given by the keys of the blocks that end there; all keys share one salt.

    Args:
        were_flushed: True if everything reported earlier is cancelled; `dropped` is then empty.
    """

    published: tuple[BlockKey, ...] = ()
    dropped: tuple[BlockKey, ...] = ()
    were_flushed: bool = False

    def __bool__(self) -> bool:
        return self.were_flushed or bool(self.published or self.dropped)


class BoundaryJournal(StateObserver):
    """Collect a slot pool's changes until they are taken; a boundary that came and went is not reported.

    Hits can happen exactly at blocks with a state, because no block leaves before its children. The journal holds one
    entry for each state of the pool and one for each boundary still to be reported as dropped.
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
        """Return the changes since the last call and forget them; `key_of` returns the current key of a block."""
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
