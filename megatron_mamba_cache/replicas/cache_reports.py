"""Report the prefixes that a replica has cached, and the salt of their block keys, to the coordinator."""

from typing import TYPE_CHECKING

from ..mcore.context import MambaCacheContext
from ..policy.boundary_journal import BoundaryJournal
from .prompt_keys import KeySalt

if TYPE_CHECKING:
    from .replica_link import ReplicaLink


class CacheReports:
    """Reports to the coordinator which prefixes a replica has cached or evicted since the last report."""

    def __init__(self, context: MambaCacheContext, link: "ReplicaLink") -> None:
        self._context = context
        self._link = link
        self._journal = BoundaryJournal()
        self._salt: KeySalt | None = None  # as last reported
        if context.is_tensor_state_allocated:
            self.watch()

    def watch(self) -> None:
        """Start recording changes of the cache; call after the context has allocated its memory."""
        self._context.cache.slots.observe(self._journal)

    def note_freed(self) -> None:
        """Record that the context has freed its memory, and all cached prefixes with it."""
        self._journal.flushed()

    def send(self) -> None:
        """Send the changes since the last report; do nothing if there are none."""
        context = self._context
        if not context.is_tensor_state_allocated:
            changes = self._journal.take(lambda _: None)
            if changes:
                self._link.report_keys(changes, None)
            return
        changes = self._journal.take(context.cache.kv.key_of)
        salt = self._present_salt()
        if changes or salt != self._salt:
            self._link.report_keys(changes, salt if salt != self._salt else None)
            self._salt = salt

    def _present_salt(self) -> KeySalt | None:
        cache = self._context.cache
        if not cache.enabled:
            return None
        identity = cache.identity
        return KeySalt(identity.fingerprint, identity.weights_version, cache.epoch, cache.block_size)


class NoReports:
    """Null object for `CacheReports` and `ProgressReports` when there is no coordinator."""

    def send(self, *_: object) -> None:
        """Do nothing."""

    note_freed = watch = send_state = send
