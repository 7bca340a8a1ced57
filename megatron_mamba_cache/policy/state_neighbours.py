"""Callbacks of the slot pool: KV blocks, lower tier."""

from typing import Protocol

from .identifiers import BlockId


class CachedTexts(Protocol):
    """What follows a state, and what is of use only with it: the KV blocks."""

    def is_end(self, block: BlockId) -> bool:
        """Return whether no block is cached after this one."""

    def prune(self, block: BlockId) -> int:
        """Forget the block, whose state is gone, and those before it, as far as no state or request needs them.

        Returns:
            How many blocks have become free.
        """


class StateSaver(Protocol):
    """Saves states elsewhere before they are lost; is notified of every state that goes."""

    def saves(self, block: BlockId) -> bool:
        """Begin to save the block's state, which is next to be evicted; return whether others should leave before it.

        If so, it is not asked again until `SlotPool.stop_saving`: a state that comes up again leaves, and is lost.
        """

    def dropped(self, block: BlockId) -> None:
        """The block's state is gone."""

    def flushed(self) -> None:
        """All states are gone."""


class NoSaver:
    """Lets evicted states go."""

    def saves(self, block: BlockId) -> bool:
        """Return False."""
        return False

    def dropped(self, block: BlockId) -> None:
        """Do nothing."""

    def flushed(self) -> None:
        """Do nothing."""


class NoTexts:
    """For a slot pool without a KV block pool."""

    def is_end(self, block: BlockId) -> bool:
        """Return True: nothing is known to follow."""
        return True

    def prune(self, block: BlockId) -> int:
        """Do nothing."""
        return 0
