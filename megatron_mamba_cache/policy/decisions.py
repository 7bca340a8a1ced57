"""A hash of a rank's decisions and a record of the newest, to find the first one on which ranks disagree."""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_REMEMBERED = 4096
_PIECE_BITS = 62
_NUM_PIECES = 4


class DecisionKind(Enum):
    """The kinds of decisions, and the facts of each."""

    ADMIT = "admission (checksum of the prompt, tokens skipped, live slot, state restored from, KV blocks)"
    GROW = "new KV blocks"
    SCHEDULE = "tokens of the step (computed before, scheduled, those fed to decoding)"
    RESERVE = "reserved states (position and slot of each)"
    WINDOW = "draft window (slots, accepted column)"
    KEEP = "accepted tokens (whether they end the request, tokens)"
    PUBLISH = "published KV blocks"
    CHECKPOINT = "decode checkpoint published by an align copy (KV block)"
    PAUSE = "pause"
    PREEMPT = "request evicted"
    EVICT = "evictions so far (KV blocks, states)"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about a request, or about the pools (request -1), and its facts."""

    step: int
    kind: DecisionKind
    request_id: int
    facts: tuple[int, ...]

    def __str__(self) -> str:
        whose = "pools" if self.request_id < 0 else f"request {self.request_id}"
        return f"step {self.step}, {whose}, {self.kind.value}: {list(self.facts)}"


@dataclass(frozen=True, slots=True)
class RecentDecisions:
    """The newest decisions of a rank; `first` counts those before them."""

    first: int
    decisions: tuple[Decision, ...]


class DecisionLog:
    """A running hash of all decisions, and the newest of them."""

    def __init__(self) -> None:
        self.step = 0
        self._hash = hashlib.sha256()
        self._recent: deque[Decision] = deque(maxlen=_REMEMBERED)
        self._num_noted = 0

    @property
    def num_noted(self) -> int:
        """Decisions so far."""
        return self._num_noted

    def note(self, kind: DecisionKind, request_id: int, *facts: int) -> None:
        """Record a decision of the current step."""
        decision = Decision(self.step, kind, request_id, facts)
        self._hash.update(repr((self.step, kind.name, request_id, facts)).encode())
        self._recent.append(decision)
        self._num_noted += 1

    def fingerprint(self) -> list[int]:
        """Return the hash of all decisions so far, as integers from 0 to 2**62 - 1."""
        whole = int.from_bytes(self._hash.digest(), "big")
        return [whole >> (_PIECE_BITS * piece) & (2**_PIECE_BITS - 1) for piece in range(_NUM_PIECES)]

    def recent(self) -> RecentDecisions:
        """Return the newest decisions."""
        return RecentDecisions(self._num_noted - len(self._recent), tuple(self._recent))


def first_difference(ranks: Sequence[RecentDecisions]) -> str:
    """Describe the first decision that differs between ranks, and what each of them decided.

    Args:
        ranks: The newest decisions of each rank, in order; the ranks' hashes differ.
    """
    first = max(recent.first for recent in ranks)
    end = max(recent.first + len(recent.decisions) for recent in ranks)
    for number in range(first, end):
        decided = [_at(recent, number) for recent in ranks]
        if any(decision != decided[0] for decision in decided):
            each = "; ".join(f"rank {rank}: {decision or 'nothing'}" for rank, decision in enumerate(decided))
            return f"decision {number} is the first that differs: {each}"
    return f"the first decision that differs is one of the {first} that are no longer remembered"


def _at(recent: RecentDecisions, number: int) -> Decision | None:
    index = number - recent.first
    return recent.decisions[index] if index < len(recent.decisions) else None
