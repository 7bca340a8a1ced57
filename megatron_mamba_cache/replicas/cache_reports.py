"""Tells a coordinator which boundaries the cache of one replica can resume from, and under which salt."""

from typing import Protocol

from ..mcore.context import MambaCacheContext
from ..policy.boundary_journal import BoundaryChanges, BoundaryJournal
from .salts import KeySalt


class ReportTarget(Protocol):
    """Where reports go."""

    def report_keys(self, changes: BoundaryChanges, salt: KeySalt | None) -> None:
        """Pass changes on; `salt` is None while it is the one reported last."""


class CacheReports:
    """Watches the slot pool of a context's present memory and reports net changes when it is told to."""

    def __init__(self, context: MambaCacheContext, target: ReportTarget) -> None:
        self._context = context
        self._target = target
        self._journal = BoundaryJournal()
        self._salt: KeySalt | None = None  # as reported last
        if context.is_tensor_state_allocated:
            self.watch()

    def watch(self) -> None:
        """Watch memory that has been allocated anew."""
        self._context.cache.slots.observe(self._journal)

    def void(self) -> None:
        """Note that the memory has gone, and all that was cached in it."""
        self._journal.flushed()

    def send(self) -> None:
        """Report what has changed since the last time, if anything has."""
        context = self._context
        if not context.is_tensor_state_allocated:
            changes = self._journal.take(lambda _: None)
            if changes:
                self._target.report_keys(changes, None)
            return
        changes = self._journal.take(context.cache.kv.key_of)
        salt = self._present_salt()
        if changes or salt != self._salt:
            self._target.report_keys(changes, salt if salt != self._salt else None)
            self._salt = salt

    def _present_salt(self) -> KeySalt | None:
        cache = self._context.cache
        if not cache.enabled:
            return None
        identity = cache.identity
        return KeySalt(identity.fingerprint, identity.weights_version, cache.epoch, cache.block_size)
