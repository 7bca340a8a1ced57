"""Whether all ranks of a model have decided the same, looked at every few steps.

Decisions are read off the rows once a step is planned and once it is finished, so that nothing of it is in the way
where it is switched off. Ranks are compared before the forward, whose collectives would not match.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import CacheIntegrityError
from ..policy.decisions import DecisionKind, DecisionLog, first_difference
from ..policy.requests import KeptTokens, RunningRequest
from .ranks import Ranks
from .step_reader import StepReader


class NoDigest:
    """Looks at nothing."""

    def note_plan(self, context: StepReader) -> None:
        """Do nothing."""

    def note_outcome(self, context: StepReader, rows: Sequence[RunningRequest], kept: Sequence[KeptTokens]) -> None:
        """Do nothing."""


class RankDigest:
    """Keeps a rank's decisions and compares them with the others'.

    Args:
        every: Steps between two comparisons.
    """

    def __init__(self, ranks: Ranks, every: int) -> None:
        self._ranks = ranks
        self._every = every
        self._num_blocks: dict[int, int] = {}  # request id -> KV blocks that are noted
        self._num_published: dict[int, int] = {}
        self._evictions = (0, 0)
        self.log = DecisionLog()

    def note_plan(self, context: StepReader) -> None:
        """Note what a step that is laid out will compute, and compare if it is time.

        Raises:
            CacheIntegrityError: On all ranks, if they have decided differently; it names the first such decision.
        """
        self.log.step += 1
        for row in context.step.rows:
            self._note_row(row)
        self._note_evictions(context)
        if self.log.step % self._every == 0:
            self._compare()

    def note_outcome(self, context: StepReader, rows: Sequence[RunningRequest], kept: Sequence[KeptTokens]) -> None:
        """Note what became of the rows of a step, once it is finished."""
        note, staying = self.log.note, {row.request_id for row in context.rows}
        for row, new in zip(rows, kept, strict=True):
            note(DecisionKind.KEEP, row.request_id, int(new.ends), *new.tokens)
            if row.request_id not in staying:
                if not new.ends:
                    note(DecisionKind.PREEMPT, row.request_id)
                self._forget(row.request_id)
                continue
            published = self._num_published.get(row.request_id, 0)
            if row.num_published_blocks > published:
                note(DecisionKind.PUBLISH, row.request_id, *row.block_ids[published : row.num_published_blocks])
                self._num_published[row.request_id] = row.num_published_blocks
                if row.checkpoint is not None:
                    note(DecisionKind.CHECKPOINT, row.request_id, row.checkpoint)
            if row.is_paused:
                note(DecisionKind.PAUSE, row.request_id)
        self._note_evictions(context)

    def _note_row(self, row: RunningRequest) -> None:
        note, request_id = self.log.note, row.request_id
        if request_id not in self._num_blocks:
            source = -1 if row.source_slot is None else row.source_slot
            note(DecisionKind.ADMIT, request_id, row.computed, row.live_slot, source, *row.block_ids)
            self._num_published[request_id] = row.num_published_blocks
        elif len(row.block_ids) > self._num_blocks[request_id]:
            note(DecisionKind.GROW, request_id, *row.block_ids[self._num_blocks[request_id] :])
        self._num_blocks[request_id] = len(row.block_ids)
        note(DecisionKind.SCHEDULE, request_id, row.computed, row.scheduled, *row.drafts)
        if row.reserved:
            places = (number for state in row.reserved for number in (state.position, state.slot))
            note(DecisionKind.RESERVE, request_id, *places)
        if row.draft_slots:
            note(DecisionKind.WINDOW, request_id, *row.draft_slots, row.accepted - 1)

    def _note_evictions(self, context: StepReader) -> None:
        evictions = context.memory.blocks.pool.num_evicted, context.memory.slots.num_evicted
        if evictions != self._evictions:
            self._evictions = evictions
            self.log.note(DecisionKind.EVICT, -1, *evictions)

    def _forget(self, request_id: int) -> None:
        self._num_blocks.pop(request_id, None)
        self._num_published.pop(request_id, None)

    def _compare(self) -> None:
        mine = self.log.fingerprint()
        # The least of a number and of its negative are one number's only if all ranks have the same.
        least = self._ranks.least([*mine, *(-piece for piece in mine)])
        lowest, highest = least[: len(mine)], [-piece for piece in least[len(mine) :]]
        if lowest != highest:
            raise CacheIntegrityError(
                f"the ranks of the model have parted; {first_difference(self._ranks.gather(self.log.recent()))}. "
                "Requests must come in the same order to all of them"
            )


Digest = NoDigest | RankDigest


def digest_of(context: Any) -> Digest:
    """Return what the settings of a context ask for."""
    every = context.cache_config.rank_digest_steps
    return RankDigest(context.ranks, every) if every else NoDigest()
