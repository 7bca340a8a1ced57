"""States with a TTL, measured in request timestamps: until then their priority does not fall."""

from heapq import heappop, heappush

from .identifiers import BlockId


class HeldStates:
    """The held states by the KV block that they end, and the newest time."""

    def __init__(self) -> None:
        self._now = 0
        self.until: dict[BlockId, int] = {}
        """When each held state is held no longer; changed here only."""
        self._ends: list[tuple[int, BlockId]] = []  # a heap; an entry is looked at again when its time comes
        self._next_look: dict[BlockId, int] = {}  # the earliest entry of each block in the heap

    def hold(self, block: BlockId, until: int) -> bool:
        """Hold a state until a time, or as long as it is held already; return whether it was not held before."""
        if until <= self._now:
            return False
        was_held = block in self.until
        self.until[block] = max(until, self.until.get(block, 0))
        self._look_at(block, until)
        return not was_held

    def release(self, block: BlockId) -> None:
        """Forget a state; nothing happens if it is not held."""
        self.until.pop(block, None)

    def pass_time(self, now: int) -> list[BlockId]:
        """Set the time, unless a later one is known; return the blocks whose states are no longer held."""
        self._now = max(now, self._now)
        over = []
        while self._ends and self._ends[0][0] <= self._now:
            time, block = heappop(self._ends)
            if self._next_look.get(block) == time:
                del self._next_look[block]
            until = self.until.get(block)
            if until is not None and until <= self._now:
                del self.until[block]
                over.append(block)
            elif until is not None:
                self._look_at(block, until)
        return over

    def clear(self) -> None:
        """Forget all states; the time stays."""
        self.until.clear()
        self._ends.clear()
        self._next_look.clear()

    def _look_at(self, block: BlockId, time: int) -> None:
        """Enter a block in the heap, unless it is looked at by then."""
        if time < self._next_look.get(block, time + 1):
            self._next_look[block] = time
            heappush(self._ends, (time, block))
