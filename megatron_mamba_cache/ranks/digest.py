"""Check every few steps that all ranks of a model made the same decisions.

Decisions are read from the requests after a step is planned and after it is finished, so a disabled check costs
nothing. Ranks are compared before the forward pass, because its collectives would not match if decisions differ. They
are also compared in steps without requests, because another rank may have requests. The check does not detect a rank
that never steps because no request was added to it: the other ranks wait for it until the process group's timeout.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from ..errors import CacheIntegrityError
from ..policy.kept_tokens import StepTokens
from ..policy.prefix_cache import PrefixCache
from ..policy.requests import RunningRequest
from ..policy.running_requests import RunningRequests
from .group import Ranks

_REMEMBERED = 4096
_PIECE_BITS = 62
_NUM_PIECES = 4


class DecisionKind(Enum):
    """Kinds of decisions; each value is a description for error messages, with the decision's facts in parentheses."""

    ADMIT = "admission (checksum of the prompt, tokens skipped, live slot, state restored from, KV blocks)"
    GROW = "new KV blocks"
    SCHEDULE = "scheduled tokens (number computed before, number scheduled, ids fed to decode)"
    RESERVE = "reserved states (position and slot of each)"
    WINDOW = "draft window (slots, accepted column)"
    KEEP = "accepted tokens (1 if they end the request, token ids)"
    PUBLISH = "published KV blocks"
    CHECKPOINT = "decode checkpoint published by an align copy (KV block)"
    PAUSE = "pause"
    PREEMPT = "request evicted"
    EVICT = "evictions so far (KV blocks, states)"


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision in a step, about a request or, with request id -1, about the memory pools."""

    step: int
    kind: DecisionKind
    request_id: int
    facts: tuple[int, ...]

    def __str__(self) -> str:
        whose = "pools" if self.request_id < 0 else f"request {self.request_id}"
        return f"step {self.step}, {whose}, {self.kind.value}: {list(self.facts)}"


@dataclass(frozen=True, slots=True)
class RecentDecisions:
    """Newest decisions on a rank; `first` is the index of the oldest of them among all decisions on the rank."""

    first: int
    decisions: tuple[Decision, ...]


class DecisionLog:
    """Log of a rank's decisions: a running hash of all of them, and a list of the newest."""

    def __init__(self) -> None:
        self.step = 0
        self._hash = hashlib.sha256()
        self._recent: deque[Decision] = deque(maxlen=_REMEMBERED)
        self.num_noted = 0
        """Number of decisions recorded so far."""

    def note(self, kind: DecisionKind, request_id: int, *facts: int) -> None:
        """Record a decision in the current step."""
        decision = Decision(self.step, kind, request_id, facts)
        self._hash.update(repr((self.step, kind.name, request_id, facts)).encode())
        self._recent.append(decision)
        self.num_noted += 1

    def fingerprint(self) -> list[int]:
        """Return the hash of all decisions so far, as four integers between 0 and 2**62 - 1."""
        whole = int.from_bytes(self._hash.digest(), "big")
        return [whole >> (_PIECE_BITS * piece) & (2**_PIECE_BITS - 1) for piece in range(_NUM_PIECES)]

    def recent(self) -> RecentDecisions:
        """Return the newest decisions on this rank, at most 4,096."""
        return RecentDecisions(self.num_noted - len(self._recent), tuple(self._recent))


def first_difference(ranks: Sequence[RecentDecisions]) -> str:
    """Describe, for an error message, the first decision that differs between ranks, as each rank made it."""
    first = max(recent.first for recent in ranks)
    end = max(recent.first + len(recent.decisions) for recent in ranks)
    for number in range(first, end):
        decided = [_at(recent, number) for recent in ranks]
        if any(decision != decided[0] for decision in decided):
            each = "; ".join(f"rank {rank}: {decision or 'nothing'}" for rank, decision in enumerate(decided))
            return f"decision {number} is the first that differs: {each}"
    return f"the first decision that differs is among the first {first}, which the log no longer contains"


def _at(recent: RecentDecisions, number: int) -> Decision | None:
    index = number - recent.first
    return recent.decisions[index] if index < len(recent.decisions) else None


class NoDigest:
    """Null object that replaces `RankDigest` when the check is disabled."""

    def note_plan(self, *_: object) -> None:
        """Do nothing."""

    note_idle_step = note_outcome = note_plan


@dataclass(slots=True)
class _NotedRequest:
    """Facts about a running request that have been recorded; later, only changes to them are recorded."""

    request: RunningRequest
    num_blocks: int
    num_published: int
    newest_checkpoint: int | None = None


class RankDigest:
    """Records a rank's decisions and compares their hash with the hashes of the other ranks.

    Args:
        every: Number of steps from one comparison to the next.
    """

    def __init__(self, ranks: Ranks, every: int) -> None:
        self._ranks = ranks
        self._every = every
        self._noted: dict[int, _NotedRequest] = {}
        self._evictions = (0, 0)
        self.log = DecisionLog()

    def note_plan(self, requests: RunningRequests, step_requests: Sequence[RunningRequest]) -> None:
        """Record the plan of a step; every `every` steps, compare the decisions with those of the other ranks.

        Raises:
            CacheIntegrityError: On all ranks, if their decisions differ; the message describes the first difference.
        """
        self.log.step += 1
        self._noted = {request.request_id: self._noted_of(request) for request in requests}
        for request in step_requests:
            self._note_request(request)
        self._note_evictions(requests.cache)
        self._compare_if_due()

    def note_idle_step(self) -> None:
        """Count a step in which this rank has no request; compare and raise like `note_plan`."""
        self.log.step += 1
        self._compare_if_due()

    def note_outcome(
        self, requests: RunningRequests, step_requests: Sequence[RunningRequest], kept: StepTokens
    ) -> None:
        """Record the outcome of a finished step for each of its requests.

        Args:
            requests: Requests that still run after the step.
            step_requests: Requests of the step.
            kept: Accepted tokens of `step_requests`, in the same order.
        """
        note, staying, ended = self.log.note, set(map(id, requests)), set(kept.ended)
        for index, (request, tokens) in enumerate(zip(step_requests, kept.tokens, strict=True)):
            note(DecisionKind.KEEP, request.request_id, int(index in ended), *tokens)
            if id(request) in staying:
                self._note_publishes(request)
            elif index not in ended:
                note(DecisionKind.PREEMPT, request.request_id)
            if request.is_paused:
                note(DecisionKind.PAUSE, request.request_id)
        self._note_evictions(requests.cache)

    def _noted_of(self, request: RunningRequest) -> "_NotedRequest":
        noted = self._noted.get(request.request_id)
        if noted is None or noted.request is not request:  # a new request, or one admitted again after an eviction
            source = -1 if request.source_slot is None else request.source_slot
            start = crc32(request.spec.prompt.tobytes()), request.computed, request.cursor.live_slot, source
            self.log.note(DecisionKind.ADMIT, request.request_id, *start, *request.block_ids)
            return _NotedRequest(request, len(request.block_ids), request.num_published_blocks)
        return noted

    def _note_request(self, request: RunningRequest) -> None:
        note, request_id, noted = self.log.note, request.request_id, self._noted[request.request_id]
        if len(request.block_ids) > noted.num_blocks:
            note(DecisionKind.GROW, request_id, *request.block_ids[noted.num_blocks :])
            noted.num_blocks = len(request.block_ids)
        fed = () if request.is_prefilling else map(int, request.inputs)
        note(DecisionKind.SCHEDULE, request_id, request.computed, request.scheduled, *fed)
        if request.reserved:
            numbers = (number for state in request.reserved for number in (state.position, state.slot))
            note(DecisionKind.RESERVE, request_id, *numbers)
        if request.cursor.draft_slots:
            note(DecisionKind.WINDOW, request_id, *request.cursor.draft_slots, request.cursor.accepted - 1)

    def _note_publishes(self, request: RunningRequest) -> None:
        noted = self._noted[request.request_id]
        if request.num_published_blocks > noted.num_published:
            blocks = request.block_ids[noted.num_published : request.num_published_blocks]
            noted.num_published = request.num_published_blocks
            self.log.note(DecisionKind.PUBLISH, request.request_id, *blocks)
        if request.checkpoint is not None and request.checkpoint != noted.newest_checkpoint:
            noted.newest_checkpoint = request.checkpoint
            self.log.note(DecisionKind.CHECKPOINT, request.request_id, request.checkpoint)

    def _note_evictions(self, cache: PrefixCache) -> None:
        evictions = cache.slots.num_blocks_evicted, cache.slots.num_evicted
        if evictions != self._evictions:
            self._evictions = evictions
            self.log.note(DecisionKind.EVICT, -1, *evictions)

    def _compare_if_due(self) -> None:
        if self.log.step % self._every:
            return
        mine = self.log.fingerprint()
        # The minimum and maximum over the ranks are equal only if all ranks have the same value.
        least = self._ranks.least([*mine, *(-piece for piece in mine)])
        lowest, highest = least[: len(mine)], [-piece for piece in least[len(mine) :]]
        if lowest != highest:
            raise CacheIntegrityError(
                f"the ranks of the model disagree; {first_difference(self._ranks.gather(self.log.recent()))}. "
                "Add requests in the same order on all ranks"
            )


Digest = NoDigest | RankDigest


def digest_of(ranks: Ranks, every: int) -> Digest:
    """Return a digest that compares the ranks every `every` steps; if `every` is 0, one that does nothing."""
    return RankDigest(ranks, every) if every else NoDigest()
