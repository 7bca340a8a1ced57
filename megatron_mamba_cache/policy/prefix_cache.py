"""The prefix cache: it admits requests, publishes what they compute, and releases what they hold.

Every public method either completes or raises without side effects, unless its docstring says otherwise. The order of
calls for a request is admit → publish → advance → (schedule_chunk or schedule_decode → publish → advance, grow in
between) → release. For an overlapped step, call reserve_ahead instead of schedule_decode, before the previous step is
published. After a failed step, release the request, because its live state may be corrupt.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import CacheIntegrityError
from ..metrics import CacheCounters
from .admission import (
    AdmissionPlan,
    AdmissionRules,
    PromptView,
    Refusal,
    branch_points,
    has_room,
    plan_admission,
    reason_for_no_hit,
)
from .block_hashing import BlockKeyChain, CacheSalt
from .boundaries import select_boundaries
from .draft_states import DraftStates
from .pools import CachePools, check_requests_and_pools
from .request_settings import RequestSpec
from .requests import Candidate, RunningRequest
from .slot_owners import SlotOwner
from .state_reservations import StateReservations
from .tiers.cache_tiers import Tiers
from .tiers.restores import WaitingPrompt


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Identity of the model and weights that computed the cached contents; part of every key."""

    fingerprint: str
    weights_version: str


class PrefixCache:
    """Admits requests with their longest cached prefix, caches what they compute, and releases what they hold.

    Args:
        draft_states: Allocator of slots or buffers for the drafts of running requests.
        checkpoints: Boundaries at which decode caches states: "all", "none", or only each request's newest ("rolling").
        epoch: Number of flushes so far. It is part of the keys, so entries from earlier epochs are never found.
        tiers: Host and disk tiers; None for no tiers.
    """

    def __init__(
        self,
        pools: CachePools,
        rules: AdmissionRules,
        identity: CacheIdentity,
        counters: CacheCounters,
        *,
        draft_states: DraftStates,
        checkpoints: Literal["rolling", "all", "none"] = "rolling",
        enabled: bool = True,
        epoch: int = 0,
        tiers: Tiers | None = None,
    ) -> None:
        self.pools = pools
        self.kv, self.slots = pools.kv, pools.slots
        self.rules = rules
        self.block_size = rules.boundaries.block_size
        self.counters = counters
        self.enabled = enabled
        self.epoch = epoch
        self.tiers = tiers or Tiers()
        self.identity = identity
        self.draft_states = draft_states
        self._keeps_decode_states = enabled and checkpoints != "none"
        self._reservations = StateReservations(
            self.kv, self.slots, counters, self.block_size, is_rolling=checkpoints == "rolling"
        )
        self._num_admitted = 0

    def plan(self, candidate: Candidate, budget: int, *, follows_prompts: bool = False) -> AdmissionPlan | Refusal:
        """Return a plan to admit a candidate within `budget` tokens, or why it must wait; the pools do not change.

        Args:
            follows_prompts: As in `AdmissionRules.chunk_end`.
        """
        if self.tiers.awaits(candidate.spec.request_id):
            candidate.awaited_copy = True
            return Refusal.WAITS_FOR_COPY
        return plan_admission(
            self._view(candidate),
            self.pools,
            budget=budget,
            reserved_keys=self._reservations.keys,
            rules=self.rules,
            follows_prompts=follows_prompts,
        )

    def prefetch(self, candidates: Iterable[Candidate]) -> None:
        """Start to restore the prefixes of the next queued requests from lower tiers."""
        self.tiers.prefetch(self._waiting_prompts(candidates))

    def branches(self, candidate: Candidate, others: Iterable[Candidate]) -> tuple[int, ...]:
        """Return the boundaries in a candidate's prompt at which other texts are expected to diverge.

        These are the boundaries at which waiting requests diverge, the last boundary before each breakpoint and, after
        an interruption, the last boundaries in the original prompt.
        """
        if not self.enabled:
            return ()
        spec = candidate.spec
        parting = branch_points(self._view(candidate), map(self._view, others), self.block_size)
        positions = [index.position for index in spec.breakpoints]
        if spec.num_replayed:
            prompt_end = spec.prompt_len - spec.num_replayed
            positions += [prompt_end - 1, prompt_end]  # a repeat of the prompt must compute its last token
        return (*parting, *(position // self.block_size * self.block_size for position in positions))

    def admit(self, candidate: Candidate, plan: AdmissionPlan, branches: tuple[int, ...] = ()) -> RunningRequest:
        """Apply an admission plan and schedule the request's first prefill chunk.

        Args:
            branches: Boundaries at which to cache a state because other texts diverge there.

        Raises:
            CacheIntegrityError: If a block or state was evicted after the plan was made; nothing is changed then.
        """
        match, block_size = plan.match, self.block_size
        self._check_plan(candidate, plan)
        self.slots.pass_time(candidate.spec.arrived_s)
        source = match.blocks[match.skip_tokens // block_size - 1] if match.skip_tokens else None
        with ExitStack() as undo:
            self.kv.acquire(match.blocks)
            undo.callback(self.kv.release, match.blocks)
            if source is not None:
                self.slots.pin(source)
                undo.callback(self.slots.unpin, source)
            new_blocks = self.kv.allocate(plan.num_new_blocks)
            undo.callback(self.kv.release, new_blocks)
            live_slot = self.slots.take_live()
            undo.callback(self.slots.release_live, live_slot)
            cursor = self.draft_states.begin(live_slot)
            undo.callback(self.draft_states.end, cursor)
            request = RunningRequest(
                spec=candidate.spec,
                chain=candidate.chain,
                epoch=candidate.epoch,
                age=self._num_admitted if candidate.age is None else candidate.age,
                cursor=cursor,
                block_ids=[*match.blocks, *new_blocks],
                num_shared_blocks=len(match.blocks),
                computed=match.skip_tokens,
                num_published_blocks=len(match.blocks),
                source_block=source,
                source_slot=None if source is None else self.slots.slot_of(source),
                branches=branches,
            )
            undo.callback(self._reservations.cancel, request)
            self.schedule_chunk(request, plan.chunk_end)
            self._claim(request)
            self._count_admission(request, candidate)
            undo.pop_all()
        self._num_admitted += 1
        return request

    def schedule_chunk(self, request: RunningRequest, chunk_end: int) -> None:
        """Schedule prefill up to `chunk_end` and reserve slots for the boundary states to be cached."""
        request.schedule(chunk_end - request.computed)
        if not self._publishes(request):
            return
        positions = select_boundaries(
            self.rules.boundaries,
            prompt_len=request.spec.prompt_len,
            start=request.computed,
            end=chunk_end,
            kv_match_end=request.num_shared_blocks * self.block_size,
            branches=request.branches,
        )
        for position in positions:
            self._reservations.reserve_in_prompt(request, position)

    def continue_prefill(self, request: RunningRequest, budget: int, *, follows_prompts: bool = False) -> None:
        """Schedule the request's next prefill chunk of at most `budget` tokens, unless it must wait.

        Args:
            follows_prompts: As in `AdmissionRules.chunk_end`.
        """
        start, prompt_len = request.computed, request.spec.prompt_len
        end = self.rules.chunk_end(start=start, prompt_len=prompt_len, budget=budget, follows_prompts=follows_prompts)
        if end > start:
            self.schedule_chunk(request, end)

    def schedule_decode(self, request: RunningRequest, drafts: Sequence[int] = ()) -> None:
        """Schedule a request's next token and the drafts that fit; reserve a slot if the step may reach a boundary."""
        boundary = (request.computed // self.block_size + 1) * self.block_size
        if not drafts and not request.reserved and boundary > request.computed + 1:  # true in most steps
            request.schedule(1)
            return
        room = self.room_for_drafts(request, len(drafts)) if drafts else 0
        if boundary <= request.computed + 1 + room and self._keeps_decode_states and self._publishes(request):
            self._reservations.reserve_in_decode(request, boundary)  # reserve before drafts take slots
        num_drafts = self.draft_states.widen(request.cursor, room)
        request.schedule(1 + num_drafts, tuple(drafts[:num_drafts]))
        if boundary > request.computed + request.scheduled:
            self._reservations.cancel(request)

    def room_for_drafts(self, request: RunningRequest, num_drafts: int) -> int:
        """Return how many drafts fit in the request's KV blocks; add one block if needed and available."""
        room = len(request.block_ids) * self.block_size - request.computed - 1
        if num_drafts > room and self.kv.num_available:
            self.grow(request)
            room += self.block_size
        return min(num_drafts, room)

    def publish(self, request: RunningRequest, num_tokens: int) -> None:
        """Let other requests find the blocks and states that the step writes; call this before `advance`.

        Call this in prefill once the forward pass is launched. In decode, first append the kept tokens to the request
        and launch its align copy.

        Args:
            num_tokens: Number of scheduled tokens to publish: all in prefill, the kept tokens in decode.
        """
        end = request.computed + num_tokens
        if self._publishes(request):
            if end // self.block_size > request.num_published_blocks:
                self._publish_blocks(request, end)
            if request.reserved:
                self._reservations.publish(request, end)
            if request.spec.breakpoints and request.is_prefilling:
                self._hold_states(request, end)
        elif request.reserved:
            self._reservations.cancel(request)
        self._unpin_source(request)

    def publish_followed(self, request: RunningRequest) -> None:
        """Publish what decode steps have computed, while the next step of the request is running.

        A reservation for a boundary after the computed tokens stays, because the next step may reach it.
        """
        end = request.computed
        if end // self.block_size > request.num_published_blocks and self._publishes(request):
            self._publish_blocks(request, end)
        if request.reserved and request.reserved[0].position <= end:
            if self._publishes(request):
                self._reservations.publish(request, end)
            else:
                self._reservations.cancel(request)

    def abort(self, request: RunningRequest) -> None:
        """Cancel the request's reservations and unpin its source state, for a step that will not be published."""
        self._reservations.cancel(request)
        self._unpin_source(request)
        request.schedule(0)

    def advance(self, request: RunningRequest, num_tokens: int) -> None:
        """Count `num_tokens` scheduled tokens as computed: all tokens in prefill, the kept tokens in decode."""
        if request.is_prefilling:
            self.counters.prefill_tokens_computed += num_tokens
            self.draft_states.accept(request.cursor, 1)
        else:
            self.counters.decode_tokens_computed += request.scheduled
            self.counters.count_drafts(len(request.drafts), num_tokens - 1)
            self.draft_states.accept(request.cursor, num_tokens)
        request.advance(num_tokens)

    def grow(self, request: RunningRequest) -> None:
        """Give the request one more KV block, or raise `CacheCapacityError` and change nothing."""
        request.add_blocks(self.kv.allocate(1))

    def at_edges(self, requests: Iterable[RunningRequest]) -> list[RunningRequest]:
        """Return the requests that start or fill a KV block in the next step, if the running step decodes one token."""
        block_size = self.block_size
        return [request for request in requests if (request.computed + 2) % block_size < 2]

    def reserve_ahead(self, requests: Iterable[RunningRequest]) -> None:
        """Reserve blocks and slots for the next step while a step that decodes one token per request is running.

        Raises:
            CacheCapacityError: If too few blocks are available.
        """
        edges = self.at_edges(requests)
        for request in edges:  # reserve blocks first: states are optional, but may take the memory
            if request.computed + 1 == len(request.block_ids) * self.block_size:
                self.grow(request)
        for request in edges if self._keeps_decode_states else ():
            if (request.computed + 2) % self.block_size == 0 and self._publishes(request):  # it fills a block
                self._reservations.reserve_in_decode(request, request.computed + 2)

    def can_follow(self, requests: Sequence[RunningRequest]) -> bool:
        """Return whether `reserve_followed` has enough blocks, and states allow as many drafts in the next step."""
        if self.draft_states.is_limited and not all(
            self.draft_states.most_drafts(request.computed + 1, 2 * len(request.drafts)) == 2 * len(request.drafts)
            for request in requests
        ):
            return False
        return len(requests) <= (room := self.kv.num_available) or len(self._short(requests)) <= room

    def reserve_followed(self, requests: Sequence[RunningRequest]) -> None:
        """Reserve blocks and slots for the next step while one runs; the next step has as many drafts.

        Whatever the running step accepts, a block holds both steps' tokens of a request, so they reach one boundary.

        Raises:
            CacheCapacityError: If too few blocks are available.
        """
        size = self.block_size
        near = [one for one in requests if (one.computed + one.scheduled - 1) % size + one.scheduled >= size - 1]
        for request in self._short(near):
            self.grow(request)
        for request in near if self._keeps_decode_states else ():
            end, width = request.computed + request.scheduled, request.scheduled
            # A boundary up to `end` belongs to the running step.
            if end % size + width >= size and not request.reserved and self._publishes(request):
                self._reservations.reserve_in_decode(request, (end // size + 1) * size)

    def _short(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return the requests whose blocks may not hold their next step, with as many drafts as the running step."""
        size = self.block_size
        return [one for one in requests if one.computed + 2 * one.scheduled > len(one.block_ids) * size]

    def lengthen_prompt(self, request: RunningRequest, prompt: npt.NDArray[np.int64]) -> None:
        """Replace the prompt by a longer one that starts with it; the request prefills the rest."""
        request.lengthen_prompt(prompt)
        if self.enabled:
            request.extend_keys(len(prompt))

    def release(self, request: RunningRequest) -> None:
        """Release everything that the request holds; published blocks and states stay cached. Safe to retry."""
        self.abort(request)
        self.slots.touch_path(request.block_ids, request.first_generated)
        self.draft_states.end(request.cursor)
        if (owner := self.slots.owner_of_running(request.cursor.live_slot)) is not SlotOwner.LIVE:
            raise CacheIntegrityError(f"slot {request.cursor.live_slot} must be live, but is {owner.value}")
        self.keep_below(request)
        self.kv.release(request.block_ids)
        request.release_blocks()
        self.slots.release_live(request.cursor.live_slot)

    def keep_below(self, request: RunningRequest) -> None:
        """Start to copy the request's last published states and their KV to lower tiers."""
        if self._publishes(request):
            self.tiers.write_last(request.block_ids, request.first_generated)

    def flush(self, weights_version: str | None = None, epoch: int | None = None) -> None:
        """Drop everything cached; running requests publish nothing until they are prefilled again.

        Args:
            epoch: New epoch, which must be greater than the current epoch; None to increment the current epoch.
        """
        self.epoch = self.epoch + 1 if epoch is None else epoch
        if weights_version is not None:
            self.identity = CacheIdentity(self.identity.fingerprint, weights_version)
        self._reservations.keys.clear()  # these keys belong to the old epoch
        self.tiers.flushed()
        self.slots.flush()  # before the blocks: a pinned state must be unmapped before its block
        self.kv.flush()

    def check_integrity(self, requests: Sequence[RunningRequest]) -> None:
        """Raise `CacheIntegrityError` unless pools and requests agree on every block and slot."""
        check_requests_and_pools(requests, self.pools, self.tiers.blocks_held(), self.tiers.slots_reserved())
        self.tiers.check_integrity()
        self.draft_states.check_integrity([request.cursor for request in requests])

    def root_of(self, tenant: str) -> bytes:
        """Return the root digest of a tenant's key chains in the current epoch."""
        identity = self.identity
        return CacheSalt(identity.fingerprint, identity.weights_version, self.epoch, tenant).root()

    def _view(self, candidate: Candidate) -> PromptView:
        if candidate.epoch != self.epoch:
            candidate.begin_epoch(self._keys_of(candidate.spec), self.epoch)
        spec = candidate.spec
        return PromptView(candidate.chain.keys[: spec.prompt_len // self.block_size], spec.prompt_len, spec.may_skip)

    def _waiting_prompts(self, candidates: Iterable[Candidate]) -> Iterator[WaitingPrompt]:
        for candidate in candidates if self.enabled else ():
            view = self._view(candidate)
            most = (view.prompt_len - 1) // self.block_size if view.may_skip else 0
            yield WaitingPrompt(candidate.spec.request_id, view.keys[:most], -(-view.prompt_len // self.block_size))

    def _keys_of(self, spec: RequestSpec) -> BlockKeyChain:
        chain = BlockKeyChain(self.root_of(spec.tenant), self.block_size)
        if self.enabled:
            chain.extend(spec.prompt)
        return chain

    def _publishes(self, request: RunningRequest) -> bool:
        return self.enabled and request.epoch == self.epoch

    def _check_plan(self, candidate: Candidate, plan: AdmissionPlan) -> None:
        match = plan.match
        for block, key in zip(match.blocks, self._view(candidate).keys, strict=False):
            if self.kv.find(key) != block:
                raise CacheIntegrityError(f"block {block} of an admission plan is no longer cached")
        if match.skip_tokens and self.slots.slot_of(match.blocks[match.skip_tokens // self.block_size - 1]) is None:
            raise CacheIntegrityError(f"the state at token {match.skip_tokens} of an admission plan has been evicted")
        if not has_room(match, plan.num_new_blocks, self.pools, self.block_size):
            raise CacheIntegrityError(
                "the memory that an admission plan needs is no longer free; plan again before admitting"
            )

    def _publish_blocks(self, request: RunningRequest, end: int) -> None:
        num_full = end // self.block_size
        if num_full > len(request.chain.keys):
            request.extend_keys(num_full * self.block_size)
        for index in range(request.num_published_blocks, num_full):
            parent = request.block_ids[index - 1] if index else None
            request.publish_block(self.kv.register(request.block_ids[index], request.chain.keys[index], parent))

    def _hold_states(self, request: RunningRequest, end: int) -> None:
        """Raise the priority of the state before each of the request's breakpoints for `keep_s` seconds."""
        spec, block_size = request.spec, self.block_size
        for position, keep_s in spec.breakpoints:
            index = position // block_size
            if keep_s and spec.arrived_s and 0 < index * block_size <= end:
                self.slots.hold(request.block_ids[index - 1], spec.arrived_s + keep_s)

    def _claim(self, request: RunningRequest) -> None:
        """Release the restore for an admitted request, which now holds the blocks, and count the restored tokens."""
        restored = self.tiers.claim(request.request_id)
        from_disk = min(restored.disk * self.block_size, request.computed)
        from_host = min(restored.host * self.block_size, request.computed - from_disk)
        request.count_restored(from_disk=from_disk, from_host=from_host)

    def _unpin_source(self, request: RunningRequest) -> None:
        if request.source_block is not None:
            self.slots.unpin(request.source_block)
            request.release_source()

    def _count_admission(self, request: RunningRequest, candidate: Candidate) -> None:
        if candidate.age is None:
            awaited_copy = candidate.awaited_copy
            reason = reason_for_no_hit(request, self.block_size, enabled=self.enabled, awaited_copy=awaited_copy)
            self.counters.count_without_hit(reason)
        self.counters.requests_admitted += 1
        self.counters.prompt_tokens_matched += request.num_shared_blocks * self.block_size
        self.counters.prompt_tokens_skipped += request.computed
        self.counters.prompt_tokens_from_host += request.from_host
        self.counters.prompt_tokens_from_disk += request.from_disk
        self.counters.states_restored += request.source_slot is not None
