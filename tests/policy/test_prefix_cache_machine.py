"""The prefix cache, compared with a model that records the last write to every block and slot.

The KV at a position and the state after it depend on all tokens up to that position, so the model stores these tokens
instead. A request that reads other tokens has been given the wrong memory. A draft is written like any other token, and
its data stays if the draft is rejected. If blocks and slots share slabs, a write to one overwrites the other kind in
its slab. Live and draft states may have separate slots, as with quantized cached states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_mamba_cache.policy.admission import AdmissionPlan, Refusal
from megatron_mamba_cache.policy.align import plan_align_copy
from megatron_mamba_cache.policy.block_growth import grow_requests
from megatron_mamba_cache.policy.block_hashing import block_keys
from megatron_mamba_cache.policy.boundaries import select_boundaries
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey, SlotId
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.request_settings import RequestSpec
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.policy.slabs import SlabSpace
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from tests.policy.small_cache import BLOCK, candidate_of, frozen, new_spec, small_cache

MAX_ROWS = 3
NUM_BLOCKS = 9  # where they do not share slabs with the slots
MAX_LEN = 24  # six blocks: a lone request always fits
MOST_DRAFTS = BLOCK - 1

SLABS = [None, None, (4, 2, 1), (6, 3, 2), (7, 2, 1), (10, 1, 2)]
"""Slabs, and the blocks and slots per slab.

A lone request always fits, even with each of its draft states alone in a slab; in the four slabs it never gets drafts.
"""

Checkpoints = Literal["rolling", "all", "none"]
Slabs = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens and the scope in which they are valid."""

    tenant: str
    epoch: int
    tokens: tuple[int, ...]

    def upto(self, position: int) -> "Text":
        assert position <= len(self.tokens)
        return Text(self.tenant, self.epoch, self.tokens[:position])


def sequence_of(request: RunningRequest) -> Text:
    return Text(request.spec.tenant, request.epoch, (*request.spec.prompt.tolist(), *request.generated))


def fed_to(request: RunningRequest) -> Text:
    """Return the tokens of a request after its step: its known tokens and its drafts."""
    known = sequence_of(request)
    return Text(known.tenant, known.epoch, (*known.tokens, *request.drafts))


@dataclass(slots=True)
class Memory:
    """Last write to each token of a block and to each slot; None for garbage.

    If live and draft states have separate slots, these are -1, -2, ...
    """

    slabs: Slabs | None
    kv: dict[tuple[BlockId, int], Text | None] = field(default_factory=dict)
    states: dict[SlotId, Text | None] = field(default_factory=dict)
    windows: dict[SlotId, dict[int, Text]] = field(default_factory=dict)  # conv windows by their offset in the slot
    published_states: set[Text] = field(default_factory=set)
    sequences: dict[BlockKey, Text] = field(default_factory=dict)  # tokens that each key covers

    def write_kv(self, block: BlockId, offset: int, text: Text | None) -> None:
        """Write a token's KV; this overwrites the states in the same slab."""
        self.kv[block, offset] = text
        if self.slabs:
            _, blocks_per_slab, slots_per_slab = self.slabs
            first = block // blocks_per_slab * slots_per_slab
            for slot in map(SlotId, range(first, first + slots_per_slab)):
                self.states[slot], self.windows[slot] = None, {}

    def write_state(self, slot: SlotId, text: Text | None, windows: dict[int, Text]) -> None:
        """Write a state and its conv windows; this overwrites the KV blocks in the same slab."""
        self.states[slot], self.windows[slot] = text, windows
        if self.slabs and slot >= 0:
            _, blocks_per_slab, slots_per_slab = self.slabs
            first = slot // slots_per_slab * blocks_per_slab
            for block in range(first, first + blocks_per_slab):
                self.kv.update({(BlockId(block), offset): None for offset in range(BLOCK)})


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests arrive, run in steps, pause, are evicted, aborted and flushed, in pools that are always too small."""

    tokens = st.sampled_from([1, 1, 1, 1, 2])
    tenants = st.sampled_from(["", "", "", "", "blue"])
    budgets = st.sampled_from([1, 3, 4, 6, 9, 64, 64])
    drafts = st.lists(tokens, max_size=MOST_DRAFTS)

    def __init__(self) -> None:
        super().__init__()
        self.cache = small_cache()
        self.memory = Memory(None)
        self.requests: list[RunningRequest] = []
        self.texts: list[tuple[int, ...]] = [(1,) * 13]
        self.num_requests = 0
        self.checkpoints: Checkpoints = "rolling"
        self.newest: dict[int, BlockId] = {}  # each request's newest decode checkpoint
        self.unmatched: set[BlockId] = set()  # rolling checkpoints that no prompt has matched

    @initialize(
        slabs=st.sampled_from(SLABS),
        num_slots=st.integers(MAX_ROWS, MAX_ROWS + 6),
        stride=st.sampled_from([None, None, 1, 2]),
        align=st.booleans(),
        checkpoints=st.sampled_from(["rolling", "rolling", "all", "none"]),
        eviction=st.sampled_from(["lru", "cost"]),
        is_apart=st.sampled_from([False, False, True]),
    )
    def build(
        self,
        slabs: Slabs | None,
        num_slots: int,
        stride: int | None,
        align: bool,
        checkpoints: Checkpoints,
        eviction: str,
        is_apart: bool,
    ) -> None:
        self.checkpoints = checkpoints
        self.memory = Memory(slabs)
        self.cache = small_cache(
            NUM_BLOCKS,
            num_slots,
            slabs=slabs,
            stride=stride,
            align=align,
            checkpoints=checkpoints,
            max_requests=MAX_ROWS,
            eviction=eviction,
            num_running=MAX_ROWS * (1 + MOST_DRAFTS) if is_apart else None,
        )

    # Admission.

    @precondition(lambda self: len(self.requests) < MAX_ROWS)
    @rule(
        data=st.data(),
        tail=st.lists(tokens, max_size=6),
        tenant=tenants,
        may_skip=st.sampled_from([True, True, True, False]),
        budget=budgets,
    )
    def admit(self, data: st.DataObject, tail: list[int], tenant: str, may_skip: bool, budget: int) -> None:
        running = [sequence_of(request).tokens for request in self.requests]
        text = data.draw(st.sampled_from([*self.texts, *running, *running]))
        longest = min(len(text), MAX_LEN - 1 - len(tail))
        prefix = text[: max(longest - data.draw(st.sampled_from([0, 0, 1, 2, 5, 9])), 0)]
        prompt = (*prefix, *tail) or (1,)
        spec = new_spec(self.num_requests, prompt, max_len=MAX_LEN, tenant=tenant, may_skip=may_skip)
        candidate = candidate_of(self.cache, spec)
        before = frozen(self.cache)
        plan = self.cache.plan(candidate, budget)
        assert frozen(self.cache) == before
        self._check_outcome(spec, plan, budget)
        if isinstance(plan, AdmissionPlan):
            request = self.cache.admit(candidate, plan)
            self.unmatched.discard(request.source_block)
            self._note_prompt_boundaries(request)
            self.num_requests += 1
            self.requests.append(request)
            self._check_admission(request, plan)

    def _check_outcome(self, spec: RequestSpec, plan: AdmissionPlan | Refusal, budget: int) -> None:
        sequence = Text(spec.tenant, self.cache.epoch, tuple(spec.prompt.tolist()))
        blocks, skip = self._best_match(sequence, spec.may_skip)
        waits = spec.may_skip and any(
            request.is_prefilling
            and skip < state.position < spec.prompt_len
            and request.epoch == self.cache.epoch
            and sequence_of(request).upto(state.position) == sequence.upto(state.position)
            for request in self.requests
            for state in request.reserved
        )
        assert (plan is Refusal.WAITS_FOR_PREFIX) == waits
        num_new = -(-spec.prompt_len // BLOCK) - len(blocks)
        source = blocks[skip // BLOCK - 1] if skip else None
        assert plan is not Refusal.NO_BLOCKS or not self._has_room(num_new, blocks, source)
        assert plan is not Refusal.NO_TOKENS or budget < 1
        slots = self.cache.slots
        is_full = not slots.num_available and (slots.num_slots == MAX_ROWS or self.memory.slabs is not None)
        in_step = slots.num_reserved or any(map(slots.is_pinned, slots.cached_blocks()))
        assert plan is not Refusal.NO_SLOT or in_step or is_full
        assert self.requests or plan not in {Refusal.NO_BLOCKS, Refusal.NO_SLOT}, (
            "a prompt that fits is refused for ever"
        )
        if isinstance(plan, AdmissionPlan):
            assert list(plan.match.blocks) == blocks
            assert plan.match.skip_tokens in {skip, 0}
            wanted = num_new if not self.requests else 0  # blocks that have priority over the matched state
            assert plan.match.skip_tokens == skip or not self._has_room(wanted, blocks, source)
            assert self._has_room(num_new, blocks, source if plan.match.skip_tokens else None)
            assert plan.match.skip_tokens < plan.chunk_end <= min(spec.prompt_len, plan.match.skip_tokens + budget)

    def _has_room(self, num_new: int, blocks: Sequence[BlockId], source: BlockId | None) -> bool:
        """Return True if a live slot and new blocks can be allocated without evicting the matched entries."""
        slot = None if source is None or self.cache.slots.is_pinned(source) else self.cache.slots.slot_of(source)
        kept = [block for block in blocks if not self.cache.kv.num_refs(block)]
        return self.cache.pools.fits(num_new, 0, kept, [] if slot is None else [slot])

    def _address(self, slot: SlotId) -> SlotId:
        """Return the location of a live or draft state in the memory."""
        return slot if self.cache.slots.shares_slots else SlotId(-1 - slot)

    def _best_match(self, sequence: Text, may_skip: bool) -> tuple[list[BlockId], int]:
        """Return the longest match among the registered blocks, and the position of its deepest usable state."""
        registered = {self.memory.sequences[key]: block for block, key in self._registered()}
        blocks, skip = [], 0
        for end in range(BLOCK, len(sequence.tokens) + 1, BLOCK):
            if sequence.upto(end) not in registered:
                break
            blocks.append(registered[sequence.upto(end)])
            if may_skip and end < len(sequence.tokens) and self.cache.slots.slot_of(blocks[-1]) is not None:
                skip = end
        return blocks, skip

    def _check_admission(self, request: RunningRequest, plan: AdmissionPlan) -> None:
        sequence, skip = sequence_of(request), plan.match.skip_tokens
        assert request.computed == skip
        if skip:
            assert sequence.upto(skip) in self.memory.published_states
            assert request.source_slot is not None and self.memory.states[request.source_slot] == sequence.upto(skip)
            assert self.memory.windows[request.source_slot] == {0: sequence.upto(skip)}
        else:
            assert request.source_slot is None
        self.memory.write_state(self._address(request.cursor.live_slot), None, {})
        self._check_kv(request, len(plan.match.blocks) * BLOCK)

    def _note_prompt_boundaries(self, request: RunningRequest) -> None:
        """Remove from `unmatched` the states at boundaries that the request's prefill chunk reaches."""
        if request.epoch != self.cache.epoch:
            return
        positions = select_boundaries(
            self.cache.rules.boundaries,
            prompt_len=request.spec.prompt_len,
            start=request.computed,
            end=request.computed + request.scheduled,
            kv_match_end=request.num_shared_blocks * BLOCK,
        )
        self.unmatched -= {self.cache.kv.find(request.chain.keys[position // BLOCK - 1]) for position in positions}

    def _check_kv(self, request: RunningRequest, end: int) -> None:
        sequence = fed_to(request)
        for position in range(end):
            block, offset = request.block_ids[position // BLOCK], position % BLOCK
            assert self.memory.kv[block, offset] == sequence.upto(position + 1)

    # One step.

    @precondition(lambda self: any(not request.scheduled and not request.is_paused for request in self.requests))
    @rule(data=st.data(), budget=budgets, drafts=drafts)
    def schedule(self, data: st.DataObject, budget: int, drafts: list[int]) -> None:
        requests = [request for request in self.requests if not request.scheduled and not request.is_paused]
        self._schedule(data.draw(st.sampled_from(requests)), budget, drafts)

    def _schedule(self, request: RunningRequest, budget: int, drafts: list[int]) -> None:
        if request.is_prefilling:
            self.cache.schedule_chunk(request, min(request.computed + budget, request.spec.prompt_len))
            self._note_prompt_boundaries(request)
        else:
            self._schedule_decode(request, drafts[: MAX_LEN - request.length - 1])
        self._forget_lost_states()

    def _schedule_decode(self, request: RunningRequest, drafts: list[int]) -> None:
        counters, slots = self.cache.counters, self.cache.slots
        num_skipped, held = counters.states_skipped_no_room, list(request.cursor.draft_slots)
        self.cache.schedule_decode(request, drafts)
        given = len(request.drafts)
        assert request.drafts == tuple(drafts[:given]) and request.scheduled == 1 + given
        assert request.cursor.draft_slots[: len(held)] == held and len(request.cursor.draft_slots) == max(
            len(held), given
        )
        boundary = (request.computed // BLOCK + 1) * BLOCK
        reserves = self.checkpoints != "none" and request.epoch == self.cache.epoch
        wanted = [boundary] if reserves and boundary <= request.computed + request.scheduled else []
        if given < len(drafts):
            to_come, checkpoints = MAX_ROWS - slots.num_live, slots.num_live * (self.checkpoints != "none")
            checkpoints *= slots.shares_slots
            # If only the missing drafts would have reached a boundary, a slot was reserved for it and then cancelled.
            returned = reserves and not wanted and boundary <= request.computed + 1 + len(drafts)
            spare = slots.num_available_to_run - to_come - checkpoints - returned
            fills_blocks = request.computed + request.scheduled == len(request.block_ids) * BLOCK
            assert spare <= 0 or (fills_blocks and not self.cache.kv.num_available)
        if counters.states_skipped_no_room > num_skipped:
            assert reserves and not slots.num_available
            wanted = []
        assert [state.position for state in request.reserved] == wanted

    @precondition(lambda self: self.requests)
    @rule(
        num_steps=st.integers(1, 8),
        budget=budgets,
        token=tokens,
        odd_one=st.integers(0, 8),
        capacity=st.sampled_from([0, 2, 4, NUM_BLOCKS]),
        drafts=drafts,
        cut=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def run_steps(
        self, num_steps: int, budget: int, token: int, odd_one: int, capacity: int, drafts: list[int], cut: int
    ) -> None:
        """Run all requests that are not paused; each samples `token`, except the request with index `odd_one`.

        If drafts are accepted, up to `cut` of the last tokens are not kept, as after a stop string, and the request
        ends.
        """
        for _ in range(num_steps):
            step = [request for request in self.requests if not request.is_paused]
            for request in step:
                if not request.scheduled:
                    self._schedule(request, budget, drafts)
            self._run(step, [3 - token if index == odd_one else token for index in range(len(step))], cut)
            self._grow(capacity)
            if not self.requests:
                break
            self.pools_and_requests_agree()
            self.whatever_can_be_found_was_written()
            self.live_states_are_where_their_requests_look_for_them()

    def _run(self, step: Sequence[RunningRequest], sampled: Sequence[int], cut: int) -> None:
        self._forward(step)
        for request in step:
            if request.is_prefilling:
                self._publish(request, request.scheduled)
        accepted = [self._num_accepted(request, token) for request, token in zip(step, sampled, strict=True)]
        for request, num_accepted in zip(step, accepted, strict=True):
            self._align_copy(request, num_accepted)
        ended = []
        for request, token, num_accepted in zip(step, sampled, accepted, strict=True):
            num_kept = max(num_accepted - cut, 1)
            if request.samples_this_step:
                request.generated += [token] * num_kept
            if request.is_prefilling:
                self.cache.advance(request, request.scheduled)
            else:
                self._publish(request, num_kept)
                self.cache.advance(request, num_kept)
            assert (request.scheduled, request.drafts, len(request.cursor.draft_slots)) == (
                0,
                (),
                request.cursor.accepted - 1,
            )
            if request.length >= MAX_LEN or num_kept < num_accepted:
                ended.append(request)
        for request in ended:
            self._leave(request)

    def _num_accepted(self, request: RunningRequest, token: int) -> int:
        wrong = [index for index, draft in enumerate(request.drafts) if draft != token]
        return 1 + (wrong[0] if wrong else len(request.drafts))

    def _align_copy(self, request: RunningRequest, num_accepted: int) -> None:
        """Copy the state at a boundary that a decode step reached, as the device does."""
        if request.is_prefilling or not request.reserved:
            return
        (reserved,) = request.reserved
        copy = plan_align_copy(request.computed, request.scheduled, len(request.drafts), num_accepted, 0, BLOCK)
        if copy is None:
            self.memory.write_state(reserved.slot, None, {})
            return
        assert (copy.destination_column + 1) * BLOCK == reserved.position
        columns = [self._address(slot) for slot in (request.cursor.live_slot, *request.cursor.draft_slots)]
        window = {0: self.memory.windows[columns[0]][copy.shift]}
        self.memory.write_state(reserved.slot, self.memory.states[columns[copy.source_column]], window)

    def _publish(self, request: RunningRequest, num_tokens: int) -> None:
        """Publish a request; check which boundaries can be found and which checkpoint was retired."""
        end, is_current = request.computed + num_tokens, request.epoch == self.cache.epoch
        reached = [state.position for state in request.reserved if state.position <= end]
        self._forget_lost_states()
        before = set(self.cache.slots.cached_blocks())
        if is_current:
            self._note_keys(request, end)
            self.memory.published_states.update(sequence_of(request).upto(position) for position in reached)
        self.cache.publish(request, num_tokens)
        after = set(self.cache.slots.cached_blocks())
        assert not request.reserved and request.source_block is None
        retired = set()
        if is_current:
            for index in range(end // BLOCK):
                assert self.cache.kv.find(request.chain.keys[index]) == request.block_ids[index]
            blocks = {request.block_ids[position // BLOCK - 1] for position in reached}
            assert blocks <= after
            self.unmatched -= blocks & before  # two requests have reached the same boundary
            if not request.is_prefilling and after - before:
                retired = {self.newest.get(request.request_id)} & self.unmatched
                self._note_checkpoint(request, after - before)
        else:
            assert after == before
        assert before - after == retired, "a state that others may want is gone"
        assert after - before <= {request.block_ids[position // BLOCK - 1] for position in reached}
        self._forget_lost_states()

    def _note_checkpoint(self, request: RunningRequest, published: set[BlockId]) -> None:
        (self.newest[request.request_id],) = published
        if self.checkpoints == "rolling":
            self.unmatched |= published

    def _forget_lost_states(self) -> None:
        self.unmatched &= set(self.cache.slots.cached_blocks())

    def _grow(self, capacity: int) -> None:
        outcome = grow_requests(self.requests, self.cache, capacity)
        for request in outcome.evicted:
            self.requests.remove(request)
            self.texts.append(sequence_of(request).tokens)
        paused = {block for request in self.requests if request.is_paused for block in request.block_ids}
        assert len(paused) <= capacity and all(request.is_paused for request in outcome.paused)
        assert not self.requests or not all(request.is_paused for request in self.requests)

    def _forward(self, step: Sequence[RunningRequest]) -> None:
        """Read every request's state, then write KV and states, as the model's kernels do."""
        written = [slot for request in step for slot in self._written_slots(request)]
        assert len(set(written)) == len(written)
        for request in step:
            self._check_initial_state(request, set(written) - set(self._columns(request)))
        for request in step:
            self._write_kv(request)
        for request in step:
            self._check_kv(request, request.computed + request.scheduled)
            self._write_states(request)

    def _columns(self, request: RunningRequest) -> list[SlotId]:
        """Return the slots that the request's step writes: only the live slot in prefill."""
        slots = (
            [request.cursor.live_slot]
            if request.is_prefilling
            else [request.cursor.live_slot, *request.cursor.draft_slots]
        )
        return [self._address(slot) for slot in slots]

    def _written_slots(self, request: RunningRequest) -> list[SlotId]:
        return [*self._columns(request), *(state.slot for state in request.reserved)]

    def _check_initial_state(self, request: RunningRequest, written_by_others: set[SlotId]) -> None:
        if request.source_slot is not None:
            slot, window_slot, offset = request.source_slot, request.source_slot, 0
        else:
            slot, window_slot, offset = (
                self._address(request.cursor.state_slot),
                self._address(request.cursor.live_slot),
                request.cursor.accepted - 1,
            )
        assert slot not in written_by_others
        if request.computed:
            assert self.memory.states[slot] == sequence_of(request).upto(request.computed)
            assert self.memory.windows[window_slot][offset] == sequence_of(request).upto(request.computed)

    def _write_kv(self, request: RunningRequest) -> None:
        for position in range(request.computed, request.computed + request.scheduled):
            if position // BLOCK < request.num_shared_blocks:
                continue
            block = request.block_ids[position // BLOCK]
            assert self.cache.kv.key_of(block) is None, "a findable block is written"
            assert self.cache.kv.num_refs(block) == 1, "a shared block is written"
            self.memory.write_kv(block, position % BLOCK, fed_to(request).upto(position + 1))

    def _write_states(self, request: RunningRequest) -> None:
        fed, start, end = fed_to(request), request.computed, request.computed + request.scheduled
        assert all(start < state.position <= end and state.position % BLOCK == 0 for state in request.reserved)
        if request.is_prefilling:
            self.memory.write_state(self._address(request.cursor.live_slot), fed.upto(end), {0: fed.upto(end)})
            for state in request.reserved:
                self.memory.write_state(state.slot, fed.upto(state.position), {0: fed.upto(state.position)})
            return
        after = [fed.upto(position + 1) for position in range(start, end)]
        for column, text in zip(self._columns(request), after, strict=False):
            self.memory.write_state(column, text, {})
        self.memory.windows[self._address(request.cursor.live_slot)] = dict(enumerate(after))

    def _note_keys(self, request: RunningRequest, end: int) -> None:
        sequence = sequence_of(request).upto(end)
        keys = block_keys(self.cache.root_of(sequence.tenant), sequence.tokens, BLOCK)
        for index, key in enumerate(keys):
            self.memory.sequences[key] = sequence.upto((index + 1) * BLOCK)

    # Leaving.

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: any(request.scheduled for request in self.requests))
    @rule(data=st.data(), is_forward_run=st.booleans())
    def abort(self, data: st.DataObject, is_forward_run: bool) -> None:
        """Abort one request, or a whole step after its forward pass; drop requests with overwritten live states."""
        step = [request for request in self.requests if request.scheduled]
        if is_forward_run:
            self._forward(step)
        else:
            step = [data.draw(st.sampled_from(step))]
        for request in step:
            loses_state = is_forward_run or request.source_slot is not None
            self.cache.abort(request)
            assert (request.reserved, request.scheduled, request.drafts, request.source_block) == ([], 0, (), None)
            if loses_state:
                self._leave(request)

    def _leave(self, request: RunningRequest) -> None:
        self.texts.append(sequence_of(request).tokens)
        self.cache.release(request)
        self.requests.remove(request)

    # What else happens to a cache.

    @precondition(lambda self: self.num_requests % 7 == 6)  # flush rarely: a cache that is always flushed never hits
    @rule(weights_version=st.sampled_from([None, "1"]))
    def flush(self, weights_version: str | None) -> None:
        self.num_requests += 1
        self.cache.flush(weights_version)
        self.unmatched.clear()
        assert not list(self._registered())

    @precondition(lambda self: self.num_requests % 4 == 3)
    @rule(share=st.sampled_from([0.3, 0.6, 1.0]))
    def press_on_blocks(self, share: float) -> None:
        blocks = self.cache.kv.allocate(round(share * self.cache.kv.num_available))
        for block in blocks:
            for offset in range(BLOCK):
                self.memory.write_kv(block, offset, None)
        self.cache.kv.release(blocks)

    @precondition(lambda self: self.num_requests % 4 == 1)
    @rule(share=st.sampled_from([0.3, 0.6, 1.0]))
    def press_on_slots(self, share: float) -> None:
        slots = self.cache.slots.reserve(round(share * self.cache.slots.num_available))
        for slot in slots:
            self.memory.write_state(slot, None, {})
            self.cache.slots.cancel(slot)

    @invariant()
    def pools_and_requests_agree(self) -> None:
        self.cache.check_integrity(self.requests)

    @invariant()
    def whatever_can_be_found_was_written(self) -> None:
        for block, key in self._registered():
            sequence = self.memory.sequences[key]
            assert sequence.epoch == self.cache.epoch
            for offset in range(BLOCK):
                end = len(sequence.tokens) - BLOCK + offset + 1
                assert self.memory.kv[block, offset] == sequence.upto(end)
            slot = self.cache.slots.slot_of(block)
            if slot is not None:
                assert self.memory.states[slot] == sequence
                assert self.memory.windows[slot] == {0: sequence}

    @invariant()
    def live_states_are_where_their_requests_look_for_them(self) -> None:
        for request in self.requests:
            self._check_initial_state(request, set())

    @invariant()
    def drafts_leave_a_slot_to_each_request_that_may_come(self) -> None:
        slots = self.cache.slots
        most = slots.num_slots - MAX_ROWS if slots.shares_slots else MAX_ROWS * MOST_DRAFTS
        assert slots.count_by_owner()["draft"] <= most

    @invariant()
    def reserved_slots_are_not_findable(self) -> None:
        findable = {self.cache.slots.slot_of(block) for block in self.cache.slots.cached_blocks()}
        for request in self.requests:
            for state in request.reserved:
                assert self.cache.slots.owner_of(state.slot) is SlotOwner.RESERVED and state.slot not in findable
            for owner, slots in (
                (SlotOwner.LIVE, [request.cursor.live_slot]),
                (SlotOwner.DRAFT, request.cursor.draft_slots),
            ):
                assert all(self.cache.slots.owner_of_running(slot) is owner for slot in slots)
                assert not findable & {self._address(slot) for slot in slots}

    def _registered(self) -> list[tuple[BlockId, BlockKey]]:
        keys = ((BlockId(block), self.cache.kv.key_of(BlockId(block))) for block in range(self.cache.kv.num_blocks))
        return [(block, key) for block, key in keys if key is not None]

    def teardown(self) -> None:
        for request in self.requests:
            self.cache.release(request)
        self.cache.check_integrity([])
        owners = self.cache.slots.count_by_owner()
        assert (owners["live"], owners["reserved"], owners["draft"]) == (0, 0, 0)
        assert self.cache.kv.num_available == self.cache.kv.num_blocks
        check_that_a_flushed_cache_is_empty(self.cache)


def check_that_a_flushed_cache_is_empty(cache: PrefixCache) -> None:
    cache.flush()
    assert cache.kv.num_free == cache.kv.num_blocks
    assert cache.slots.count_by_owner()["free"] == cache.slots.num_slots
    if isinstance(cache.pools.space, SlabSpace):
        assert cache.pools.space.count_slabs() == {"unused": cache.pools.space.num_slabs, "kv_blocks": 0, "states": 0}


TestPrefixCacheAgainstModel = PrefixCacheMachine.TestCase
TestPrefixCacheAgainstModel.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
