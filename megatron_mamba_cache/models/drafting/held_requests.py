"""Manage the requests for which a draft model has memory: schedule them, and drop some to make room."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import CacheIntegrityError
from ...mcore.context import MambaCacheContext
from ...policy.admission import Refusal
from ...policy.boundaries import prefill_chunk_end
from ...policy.request_settings import RequestSpec
from ...policy.requests import Candidate, RunningRequest, StateCursor
from ...speculation.drafter import DraftRequest


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request for which the draft model holds memory.

    Args:
        running: The request in the draft model, which treats all verified text as a growing prompt. Its live state
            covers verified tokens only.
        text: [max_sequence_length] tokens: the prompt, which is a view of this array, then the draft tokens of the
            current call.
        last_requested: Number of the last round (call to the drafter) in which drafts were requested for this request.
    """

    running: RunningRequest
    text: npt.NDArray[np.int64]
    last_requested: int

    def branch(self, drafts: Sequence[int]) -> RunningRequest:
        """Return a temporary request that processes the last token of `drafts` in one forward pass.

        It starts from the live state for the first draft token, otherwise from the state in the draft slot, and
        writes its state to the draft slot. It owns no memory, and later text overwrites its keys and values.
        """
        running, at = self.running, self.running.length + len(drafts)
        self.text[at - 1] = drafts[-1]
        return RunningRequest(
            spec=replace(running.spec, prompt=self.text[:at]),
            chain=running.chain,
            epoch=running.epoch,
            age=running.age,
            cursor=StateCursor(running.cursor.draft_slots[0]),
            block_ids=running.block_ids,
            num_shared_blocks=running.num_shared_blocks,
            computed=at - 1,
            scheduled=1,
            source_slot=running.cursor.live_slot if len(drafts) == 1 else None,
        )


class HeldRequests:
    """Requests, by id, for which a draft model holds memory.

    A request is admitted when drafts are first requested for it, and stays until it is forgotten or dropped to make
    room. If a round cannot serve all requests, those that have waited longest have priority, and among these the
    requests with the least new text.
    """

    def __init__(self, context: MambaCacheContext) -> None:
        self._context = context
        self._held: dict[int, HeldRequest] = {}
        self._waits_since: dict[int, int] = {}  # request id -> number of the round in which it began to wait
        self._round = 0

    def schedule(self, requests: Sequence[DraftRequest]) -> list[HeldRequest]:
        """Start a round: schedule new text within the token budget of a forward pass; return the scheduled requests."""
        self._round += 1
        budget = self._context.cache_config.max_tokens
        for request in requests:
            self._waits_since.setdefault(request.running.request_id, self._round)
            if held := self._held.get(request.running.request_id):
                held.last_requested = self._round
        scheduled = []
        for request in sorted(requests, key=self._turn):
            held = self._schedule(request.running, budget) if budget else None
            if held is not None:
                budget -= held.running.scheduled
                scheduled.append(held)
        return scheduled

    def publish(self, served: Sequence[HeldRequest]) -> None:
        """Publish the blocks and states of the forward pass to the prefix cache, and mark its tokens as computed."""
        self._context.runner.publish_prompts()
        for held in served:
            self._context.cache.advance(held.running, held.running.scheduled)
            self._waits_since[held.running.request_id] = self._round + 1

    def room_for_drafts(self, held: HeldRequest, num_drafts: int) -> int:
        """Allocate a slot and blocks for a request's draft tokens; return how many of the tokens fit, at least 1.

        The model does not process the last draft token, so a draft of one token needs no memory.
        """
        running = held.running
        num_drafts = min(num_drafts, len(held.text) - running.length + 1)
        if num_drafts == 1:
            return 1
        self._grow(running, running.length + num_drafts - 1)
        num_drafts = min(num_drafts, self._capacity(running) - running.length + 1)
        return num_drafts if num_drafts > 1 and self._context.cache.draft_states.widen(running.cursor, 1) else 1

    def end_round(self, served: Sequence[HeldRequest]) -> None:
        """Free the slots that `room_for_drafts` allocated."""
        for held in served:
            self._context.cache.draft_states.trim(held.running.cursor)

    def abort_round(self, request_ids: Collection[int]) -> None:
        """Free the memory of the requests in a failed round, after synchronizing with the device."""
        try:
            self._context.runner.drop_failed_step()
        finally:
            self.drop(request_ids)

    def drop(self, request_ids: Collection[int]) -> None:
        """Free the memory held for these requests. Their published blocks and states stay cached."""
        try:
            self._context.drop_requests(request_ids)
        finally:
            running = self._context.running_requests
            self._held = {request_id: held for request_id, held in self._held.items() if held.running in running}

    def drop_all(self) -> None:
        """Free the memory held for all requests."""
        self.drop(set(self._held))

    def forget(self, request_id: int) -> None:
        """Remove a request and free its memory; ignore an unknown request."""
        self._waits_since.pop(request_id, None)
        if request_id in self._held:
            self.drop({request_id})

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` if requests, blocks and slots are inconsistent, or a draft slot was not freed."""
        self._context.check_integrity()
        held, running = [draft.running.request_id for draft in self._held.values()], self._context.running_requests
        if sorted(held) != sorted(request.request_id for request in running):
            raise CacheIntegrityError(f"the drafter holds requests {sorted(held)}, but its cache runs {running}")
        if any(request.cursor.draft_slots or request.scheduled for request in running):
            raise CacheIntegrityError("a request has draft slots or scheduled tokens after the end of a round")

    def _turn(self, request: DraftRequest) -> tuple[int, int, int]:
        request_id = request.running.request_id
        held = self._held.get(request_id)
        return (
            self._waits_since[request_id],
            request.running.length - (held.running.computed if held else 0),
            request_id,
        )

    def _schedule(self, target: RunningRequest, budget: int) -> HeldRequest | None:
        """Schedule a request's new text within `budget`; return None if there is no new text or no memory for it."""
        held = self._held.get(target.request_id)
        if held is not None and not held.running.length <= target.length <= len(held.text):
            self.drop({target.request_id})
            held = None
        if held is None:
            return self._admit(target, budget)
        running = held.running
        if running.length < target.length:
            held.text[running.length : target.length] = target.tokens(running.length, target.length)
            self._context.cache.lengthen_prompt(running, held.text[: target.length])
        if running.computed == running.length:
            return None
        if not self._find_blocks(running, running.length):
            self.drop({target.request_id})
            return None
        chunk_end = prefill_chunk_end(
            start=running.computed,
            prompt_len=running.length,
            budget=budget,
            block_size=self._context.cache.block_size,
            align=self._context.cache.rules.align_prefill_chunks,
        )
        self._context.cache.schedule_chunk(running, chunk_end)
        return held

    def _admit(self, target: RunningRequest, budget: int) -> HeldRequest | None:
        context, length = self._context, target.length
        max_len = context.cache_config.max_sequence_length
        if length > min(max_len, context.max_blocks_per_request * context.cache.block_size):
            return None
        text = np.empty(max_len, np.int64)
        text[:length] = target.tokens(0, length)
        candidate = Candidate(
            RequestSpec(target.request_id, text[:length], max_len, target.spec.sampling, target.spec.tenant)
        )
        running = context.admit(candidate, budget)
        while running in (Refusal.TOO_MANY_REQUESTS, Refusal.NO_BLOCKS, Refusal.NO_SLOT) and self._drop_idle():
            running = context.admit(candidate, budget)
        if isinstance(running, Refusal):
            return None
        self._held[target.request_id] = held = HeldRequest(running, text, self._round)
        return held

    def _find_blocks(self, running: RunningRequest, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens`, dropping idle requests if needed; return False if there are too few."""
        self._grow(running, num_tokens)
        while self._capacity(running) < num_tokens and self._drop_idle():
            self._grow(running, num_tokens)
        return self._capacity(running) >= num_tokens

    def _grow(self, running: RunningRequest, num_tokens: int) -> None:
        cache = self._context.cache
        while self._capacity(running) < num_tokens and cache.kv.num_available:
            cache.grow(running)

    def _capacity(self, running: RunningRequest) -> int:
        return len(running.block_ids) * self._context.cache.block_size

    def _drop_idle(self) -> bool:
        """Drop the request whose drafts were requested longest ago; return False if all requests are in this round."""
        idle = [held for held in self._held.values() if held.last_requested < self._round]
        if not idle:
            return False
        oldest = min(idle, key=lambda held: (held.last_requested, held.running.request_id))
        self.drop({oldest.running.request_id})
        return True
