"""A router's record of one replica's cache: reported and expected boundaries, and blocks of prompts sent to it."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from .identifiers import BlockKey


class RecentKeys:
    """Set of up to `max_keys` keys; when it is full, the least recently added keys are dropped.

    Raises:
        ValueError: If `max_keys` is below 1.
    """

    def __init__(self, max_keys: int) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, found {max_keys}")
        self._max_keys = max_keys
        self._keys: dict[BlockKey, None] = {}  # least recently added first

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, keys: Iterable[BlockKey]) -> None:
        """Add keys as the newest, even if they are present; then drop the oldest keys beyond `max_keys`."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self._max_keys:
            del self._keys[next(iter(self._keys))]

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Remove keys; ignore unknown keys."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        """Remove all keys."""
        self._keys.clear()


class ReplicaKeys:
    """Block keys that a router expects in one replica's cache.

    *Resumable* boundaries have a state, as reported by the replica: prefill can start at them. *Expected* boundaries
    will have a state when the requests in flight are prefilled. *Seen* blocks belong to prompts that were sent to the
    replica. Their KV is probably cached: when the next prompt diverges from them, the replica caches a state at that
    position.

    `resumed` holds the boundaries from which a prompt has resumed. A resumable boundary in `resumed` is assumed to be
    shared by several conversations; any other is the newest boundary of one conversation.
    """

    def __init__(self, max_keys: int) -> None:
        self.resumable = RecentKeys(max_keys)
        self.seen = RecentKeys(max_keys)
        self.resumed = RecentKeys(max_keys)
        self._expected: Counter[BlockKey] = Counter()

    def resumable_depth(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading blocks that probably need no prefill for a prompt with these keys."""
        return max(_deepest(keys, self.resumable), _deepest(keys, self._expected))

    def seen_depth(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of a prompt with these keys were sent to this replica before."""
        return _deepest(keys, self.seen)

    def expect(self, keys: Iterable[BlockKey]) -> None:
        """Add boundaries at which a request is expected to cache states."""
        self._expected.update(keys)

    def stop_expecting(self, keys: Iterable[BlockKey]) -> None:
        """Undo one `expect` call after its request has ended; boundaries with a state have been reported by then."""
        for key in keys:
            self._expected[key] -= 1
            if self._expected[key] <= 0:
                del self._expected[key]

    def flush(self) -> None:
        """Clear everything but the expected boundaries, which requests in flight will still cache."""
        self.resumable.clear()
        self.seen.clear()
        self.resumed.clear()


def _deepest(keys: Sequence[BlockKey], known: Container[BlockKey]) -> int:
    return next((depth for depth in range(len(keys), 0, -1) if keys[depth - 1] in known), 0)
