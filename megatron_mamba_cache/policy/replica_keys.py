"""A router's view of one replica's cache: reported and expected boundaries, and the prompts sent there."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from .identifiers import BlockKey


class RecentKeys:
    """Set of at most `max_keys` keys, from which the least recently added are dropped.

    Raises:
        ValueError: If `max_keys` is below 1.
    """

    def __init__(self, max_keys: int) -> None:
        if max_keys < 1:
            raise ValueError(f"need room for at least 1 key, found max_keys={max_keys}")
        self._max_keys = max_keys
        self._keys: dict[BlockKey, None] = {}  # least recently added first

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, keys: Iterable[BlockKey]) -> None:
        """Add keys, or make existing keys the newest; drop the oldest beyond `max_keys`."""
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
    """Block keys of one replica, with three degrees of certainty.

    *Resumable* boundaries have a state, as reported by the replica: prefill can start at them. *Expected* ones will
    have one once the requests in flight are prefilled. *Seen* blocks belong to prompts that were sent there: their KV
    is likely cached, so the next prompt that branches off from them leaves a state where it does.

    `resumed` holds boundaries that a prompt has started from. A resumable boundary outside it is the newest end of a
    conversation; one inside it is where several branch.
    """

    def __init__(self, max_keys: int) -> None:
        self.resumable = RecentKeys(max_keys)
        self.seen = RecentKeys(max_keys)
        self.resumed = RecentKeys(max_keys)
        self._expected: Counter[BlockKey] = Counter()

    def resumable_depth(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks a prompt with these keys can probably skip."""
        return max(_deepest(keys, self.resumable), _deepest(keys, self._expected))

    def seen_depth(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks with these keys were sent to this replica before."""
        return _deepest(keys, self.seen)

    def expect(self, keys: Iterable[BlockKey]) -> None:
        """Add boundaries at which a request is expected to cache states."""
        self._expected.update(keys)

    def stop_expecting(self, keys: Iterable[BlockKey]) -> None:
        """Undo one `expect`: boundaries that were written have been reported by now."""
        for key in keys:
            self._expected[key] -= 1
            if self._expected[key] <= 0:
                del self._expected[key]

    def flush(self) -> None:
        """Forget what is cached; requests in flight will still cache the expected boundaries."""
        self.resumable.clear()
        self.seen.clear()
        self.resumed.clear()


def _deepest(keys: Sequence[BlockKey], known: Container[BlockKey]) -> int:
    return next((depth for depth in range(len(keys), 0, -1) if keys[depth - 1] in known), 0)
