"""What changes about the boundaries that prompts can start from, noted for whoever routes prompts between replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .identifiers import BlockId, BlockKey


class StateObserver(Protocol):
    """Hears of each block that gets or loses a cached state; it must neither raise nor change the pool."""

    def published(self, block: BlockId) -> None:
        """The state at the end of the block has become findable."""

    def dropped(self, block: BlockId) -> None:
        """The block's state has gone."""

    def flushed(self) -> None:
        """All states have gone."""


class NobodyObserves:
    """Takes the place of an observer where prompts are not routed."""

    def published(self, block: BlockId) -> None:
        """Do nothing."""

    def dropped(self, block: BlockId) -> None:
        """Do nothing."""

    def flushed(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class BoundaryChanges:
    """Net changes of the resumable boundaries, by the keys of the blocks that they end; keys are of one salt.

    Args:
        were_flushed: Everything reported before is void; `dropped` is empty then.
    """

    published: tuple[BlockKey, ...] = ()
    dropped: tuple[BlockKey, ...] = ()
    were_flushed: bool = False

    def __bool__(self) -> bool:
        return self.were_flushed or bool(self.published or self.dropped)


class BoundaryJournal:
    """Collects what a slot pool tells until it is taken; a boundary that comes and goes in between leaves no trace.

    A hit needs the state at a boundary and every KV block before it. No block leaves before its children, and a state
    leaves with its block, so that the keys of blocks with a state say all about where hits happen. The journal holds at
    most one entry for each state of the pool and one for each boundary that is to be reported as gone.
    """

    def __init__(self) -> None:
        self._new: dict[BlockId, None] = {}  # published and not taken yet, oldest first
        self._reported: dict[BlockId, BlockKey] = {}
        self._gone: list[BlockKey] = []
        self._were_flushed = False

    def published(self, block: BlockId) -> None:
        """Note a state that has become findable."""
        self._new[block] = None

    def dropped(self, block: BlockId) -> None:
        """Note a state that has gone."""
        if block in self._new:
            del self._new[block]
        elif block in self._reported:
            self._gone.append(self._reported.pop(block))

    def flushed(self) -> None:
        """Note that all states have gone."""
        self._new.clear()
        self._reported.clear()
        self._gone.clear()
        self._were_flushed = True

    def take(self, key_of: Callable[[BlockId], BlockKey | None]) -> BoundaryChanges:
        """Return the changes since the last call and forget them.

        Args:
            key_of: Of the KV block pool, as it is now; a block without a key is left out.
        """
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
