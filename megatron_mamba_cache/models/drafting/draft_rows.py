"""The rows of a draft model: which requests are drafted next, and which rows are dropped to make room."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import CacheIntegrityError
from ...mcore.context import MambaCacheContext
from ...policy.admission import Refusal
from ...policy.boundaries import prefill_chunk_end
from ...policy.request_settings import RequestSpec
from ...policy.requests import RunningRequest, StateCursor
from ...speculation.drafter import DraftRequest


@dataclass(slots=True, eq=False)
class DraftRow:
    """A request that the draft model holds memory for.

    Args:
        row: To the draft model all text is a growing prompt. Its live state holds only verified tokens.
        text: [max_sequence_length] tokens: the row's prompt is a view of its start, followed by the round's drafts.
        last_requested: The last round in which drafts were requested for it.
    """

    row: RunningRequest
    text: npt.NDArray[np.int64]
    last_requested: int

    def branch(self, drafts: Sequence[int]) -> RunningRequest:
        """Return a row that computes the last of `drafts`, for one forward; it owns nothing.

        It starts from the live state, or from the branch before it, and writes only to the draft slot; its KV follows
        that of the text, which later overwrites it.
        """
        row, at = self.row, self.row.length + len(drafts)
        self.text[at - 1] = drafts[-1]
        return RunningRequest(
            spec=replace(row.spec, prompt=self.text[:at]),
            chain=row.chain,
            epoch=row.epoch,
            age=row.age,
            cursor=StateCursor(row.cursor.draft_slots[0]),
            block_ids=row.block_ids,
            num_shared_blocks=row.num_shared_blocks,
            computed=at - 1,
            scheduled=1,
            source_slot=row.cursor.live_slot if len(drafts) == 1 else None,
        )


class DraftRows:
    """The draft model's rows, by request.

    A request is admitted when drafts are first wanted for it, and stays until it is forgotten or dropped to make room.
    If a round cannot serve all draft requests, those that have waited longest come first, and among them the shortest.

    Args:
        context: The draft model's own context; it has exactly these rows.
    """

    def __init__(self, context: MambaCacheContext) -> None:
        self._context = context
        self._held: dict[int, DraftRow] = {}
        self._waits_since: dict[int, int] = {}  # request id -> round
        self._round = 0

    def schedule(self, requests: Sequence[DraftRequest]) -> list[DraftRow]:
        """Begin a round: schedule the new text of the given requests, within the step's token budget."""
        self._round += 1
        budget = self._context.cache_config.max_tokens
        for request in requests:
            self._waits_since.setdefault(request.row.request_id, self._round)
            if held := self._held.get(request.row.request_id):
                held.last_requested = self._round
        scheduled = []
        for request in sorted(requests, key=self._turn):
            held = self._schedule(request.row, budget) if budget else None
            if held is not None:
                budget -= held.row.scheduled
                scheduled.append(held)
        return scheduled

    def settle(self, served: Sequence[DraftRow]) -> None:
        """Publish and count what the forward of the scheduled rows computed."""
        self._context.runner.publish_prompts()
        for held in served:
            self._context.cache.advance(held.row, held.row.scheduled)
            self._waits_since[held.row.request_id] = self._round + 1

    def room_for_drafts(self, held: DraftRow, num_drafts: int) -> int:
        """Take a slot and blocks for drafts, and return how many drafts, at least 1, the row has room for.

        The last draft is not fed to the model, so a single draft takes no room.
        """
        row = held.row
        num_drafts = min(num_drafts, len(held.text) - row.length + 1)
        if num_drafts == 1:
            return 1
        self._grow(row, row.length + num_drafts - 1)
        num_drafts = min(num_drafts, self._capacity(row) - row.length + 1)
        return num_drafts if num_drafts > 1 and self._context.cache.take_draft_slot(row) else 1

    def end_round(self, served: Sequence[DraftRow]) -> None:
        """Return the slots that `room_for_drafts` took."""
        for held in served:
            self._context.cache.return_draft_slots(held.row)

    def abort_round(self, request_ids: Collection[int]) -> None:
        """Drop what is held for the requests of a failed round, and wait for the device."""
        try:
            self._context.runner.drop_failed_step()
        finally:
            self.drop(request_ids)

    def drop(self, request_ids: Collection[int]) -> None:
        """Drop what is held for these requests; what they published stays findable."""
        try:
            self._context.drop_rows(request_ids)
        finally:
            rows = self._context.rows
            self._held = {request_id: held for request_id, held in self._held.items() if held.row in rows}

    def drop_all(self) -> None:
        """Drop what is held for every request."""
        self.drop(set(self._held))

    def forget(self, request_id: int) -> None:
        """Drop everything about a request; do nothing if it is unknown."""
        self._waits_since.pop(request_id, None)
        if request_id in self._held:
            self.drop({request_id})

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless rows, blocks and slots agree, and no draft slot outlives a round."""
        self._context.check_integrity()
        held, rows = [draft.row.request_id for draft in self._held.values()], self._context.rows
        if sorted(held) != sorted(row.request_id for row in rows):
            raise CacheIntegrityError(f"requests {sorted(held)} are held, the context has {rows}")
        if any(row.cursor.draft_slots or row.scheduled for row in rows):
            raise CacheIntegrityError("a row keeps draft slots or scheduled tokens between rounds")

    def _turn(self, request: DraftRequest) -> tuple[int, int, int]:
        request_id = request.row.request_id
        held = self._held.get(request_id)
        return self._waits_since[request_id], request.row.length - (held.row.computed if held else 0), request_id

    def _schedule(self, target: RunningRequest, budget: int) -> DraftRow | None:
        """Schedule a request of the target model; None if its text is already computed, or there is no room for it."""
        held = self._held.get(target.request_id)
        if held is not None and not held.row.length <= target.length <= len(held.text):
            self.drop({target.request_id})
            held = None
        if held is None:
            return self._admit(target, budget)
        row = held.row
        if row.length < target.length:
            held.text[row.length : target.length] = target.tokens(row.length, target.length)
            self._context.cache.lengthen_prompt(row, held.text[: target.length])
        if row.computed == row.length:
            return None
        if not self._find_blocks(row, row.length):
            self.drop({target.request_id})
            return None
        rules = self._context.cache.rules
        chunk_end = prefill_chunk_end(
            start=row.computed,
            prompt_len=row.length,
            budget=budget,
            block_size=self._context.cache.block_size,
            align=rules.align_prefill_chunks,
        )
        self._context.cache.schedule_chunk(row, chunk_end)
        return held

    def _admit(self, target: RunningRequest, budget: int) -> DraftRow | None:
        context, length = self._context, target.length
        max_len = context.cache_config.max_sequence_length
        if length > min(max_len, context.max_blocks_of_a_request * context.cache.block_size):
            return None
        text = np.empty(max_len, np.int64)
        text[:length] = target.tokens(0, length)
        candidate = context.candidate(
            RequestSpec(target.request_id, text[:length], max_len, target.spec.sampling, target.spec.tenant)
        )
        row = context.admit(candidate, budget)
        while row in (Refusal.NO_ROW, Refusal.NO_BLOCKS, Refusal.NO_SLOT) and self._drop_idle():
            row = context.admit(candidate, budget)
        if isinstance(row, Refusal):
            return None
        self._held[target.request_id] = held = DraftRow(row, text, self._round)
        return held

    def _find_blocks(self, row: RunningRequest, num_tokens: int) -> bool:
        """Give the row blocks for `num_tokens`, dropping idle rows if needed; return whether it has enough."""
        self._grow(row, num_tokens)
        while self._capacity(row) < num_tokens and self._drop_idle():
            self._grow(row, num_tokens)
        return self._capacity(row) >= num_tokens

    def _grow(self, row: RunningRequest, num_tokens: int) -> None:
        cache = self._context.cache
        while self._capacity(row) < num_tokens and cache.kv.num_available:
            cache.grow(row)

    def _capacity(self, row: RunningRequest) -> int:
        return len(row.block_ids) * self._context.cache.block_size

    def _drop_idle(self) -> bool:
        """Drop the row whose drafts were requested longest ago; return False if all were requested in this round."""
        idle = [held for held in self._held.values() if held.last_requested < self._round]
        if not idle:
            return False
        oldest = min(idle, key=lambda held: (held.last_requested, held.row.request_id))
        self.drop({oldest.row.request_id})
        return True
