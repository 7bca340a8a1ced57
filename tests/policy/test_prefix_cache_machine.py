"""The prefix cache against a model that knows what every block and slot was last written with.

KV of a position and a state after it are a function of the tokens up to there, so the model writes those tokens,
and a reader that finds any others has been given the wrong memory. A draft writes as the token it stands for; one that
is rejected leaves what it wrote behind. Where blocks and slots share slabs, what is written to one overwrites the
others of its slab. Live and draft states may have slots of their own, as where cached states are quantized.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_mamba_cache.policy.admission import AdmissionPlan, Refusal
from megatron_mamba_cache.policy.align import plan_align_copy
from megatron_mamba_cache.policy.block_growth import grow_rows
from megatron_mamba_cache.policy.block_hashing import block_keys
from megatron_mamba_cache.policy.boundaries import select_boundaries
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey, SlotId
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.request_settings import RequestSpec
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.policy.slabs import SlabSpace
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from tests.policy.small_cache import BLOCK, candidate_of, frozen, request, small_cache

MAX_ROWS = 3
NUM_BLOCKS = 9  # where they do not share slabs with the slots
MAX_LEN = 24  # six blocks: a lone row always fits
MOST_DRAFTS = BLOCK - 1

SLABS = [None, None, (4, 2, 1), (6, 3, 2), (7, 2, 1), (10, 1, 2)]
"""How many slabs, and how many blocks and slots fit one.

A lone row always fits, even with each of its draft states alone in a slab; in the four slabs it never gets drafts.
"""

Checkpoints = Literal["rolling", "all", "none"]
Slabs = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens and what they are valid under."""

    tenant: str
    epoch: int
    tokens: tuple[int, ...]

    def upto(self, position: int) -> "Text":
        assert position <= len(self.tokens)
        return Text(self.tenant, self.epoch, self.tokens[:position])


def sequence_of(row: RunningRequest) -> Text:
    return Text(row.spec.tenant, row.epoch, (*row.spec.prompt.tolist(), *row.generated))


def fed_to(row: RunningRequest) -> Text:
    """Return the sequence that the row's step computes: what is known, and its drafts."""
    known = sequence_of(row)
    return Text(known.tenant, known.epoch, (*known.tokens, *row.drafts))


@dataclass(slots=True)
class Memory:
    """What each token of a block and each slot was last written with; None for garbage.

    Slots of live and draft states that are not among the others are -1, -2, ...
    """

    slabs: Slabs | None
    kv: dict[tuple[BlockId, int], Text | None] = field(default_factory=dict)
    states: dict[SlotId, Text | None] = field(default_factory=dict)
    windows: dict[SlotId, dict[int, Text]] = field(default_factory=dict)  # conv windows by their offset in the slot
    published_states: set[Text] = field(default_factory=set)
    sequences: dict[BlockKey, Text] = field(default_factory=dict)  # what each key stands for

    def write_kv(self, block: BlockId, offset: int, text: Text | None) -> None:
        """Write a token's KV over what the slots of the same slab held."""
        self.kv[block, offset] = text
        if self.slabs:
            _, blocks_per_slab, slots_per_slab = self.slabs
            first = block // blocks_per_slab * slots_per_slab
            for slot in map(SlotId, range(first, first + slots_per_slab)):
                self.states[slot], self.windows[slot] = None, {}

    def write_state(self, slot: SlotId, text: Text | None, windows: dict[int, Text]) -> None:
        """Write a state and its conv windows over what the blocks of the same slab held."""
        self.states[slot], self.windows[slot] = text, windows
        if self.slabs and slot >= 0:
            _, blocks_per_slab, slots_per_slab = self.slabs
            first = slot // slots_per_slab * blocks_per_slab
            for block in range(first, first + blocks_per_slab):
                self.kv.update({(BlockId(block), offset): None for offset in range(BLOCK)})


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests come, run in steps, pause, are evicted, aborted and flushed, in pools that are always too small."""

    tokens = st.sampled_from([1, 1, 1, 1, 2])
    tenants = st.sampled_from(["", "", "", "", "blue"])
    budgets = st.sampled_from([1, 3, 4, 6, 9, 64, 64])
    drafts = st.lists(tokens, max_size=MOST_DRAFTS)

    def __init__(self) -> None:
        super().__init__()
        self.cache = small_cache()
        self.memory = Memory(None)
        self.rows: list[RunningRequest] = []
        self.texts: list[tuple[int, ...]] = [(1,) * 13]
        self.num_requests = 0
        self.checkpoints: Checkpoints = "rolling"
        self.newest: dict[int, BlockId] = {}  # each request's newest decode checkpoint
        self.unmatched: set[BlockId] = set()  # rolling checkpoints that no prompt has come upon

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

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(
        data=st.data(),
        tail=st.lists(tokens, max_size=6),
        tenant=tenants,
        may_skip=st.sampled_from([True, True, True, False]),
        budget=budgets,
    )
    def admit(self, data: st.DataObject, tail: list[int], tenant: str, may_skip: bool, budget: int) -> None:
        running = [sequence_of(row).tokens for row in self.rows]
        text = data.draw(st.sampled_from([*self.texts, *running, *running]))
        longest = min(len(text), MAX_LEN - 1 - len(tail))
        prefix = text[: max(longest - data.draw(st.sampled_from([0, 0, 1, 2, 5, 9])), 0)]
        prompt = (*prefix, *tail) or (1,)
        spec = request(self.num_requests, prompt, max_len=MAX_LEN, tenant=tenant, may_skip=may_skip)
        candidate = candidate_of(self.cache, spec)
        before = frozen(self.cache)
        plan = self.cache.plan(candidate, budget)
        assert frozen(self.cache) == before
        self._check_outcome(spec, plan, budget)
        if isinstance(plan, AdmissionPlan):
            row = self.cache.admit(candidate, plan)
            self.unmatched.discard(row.source_block)
            self._note_prompt_boundaries(row)
            self.num_requests += 1
            self.rows.append(row)
            self._check_admission(row, plan)

    def _check_outcome(self, spec: RequestSpec, plan: AdmissionPlan | Refusal, budget: int) -> None:
        sequence = Text(spec.tenant, self.cache.epoch, tuple(spec.prompt.tolist()))
        blocks, skip = self._best_match(sequence, spec.may_skip)
        waits = spec.may_skip and any(
            row.is_prefilling
            and skip < state.position < spec.prompt_len
            and row.epoch == self.cache.epoch
            and sequence_of(row).upto(state.position) == sequence.upto(state.position)
            for row in self.rows
            for state in row.reserved
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
        assert self.rows or plan not in {Refusal.NO_BLOCKS, Refusal.NO_SLOT}, "a prompt that fits is refused for ever"
        if isinstance(plan, AdmissionPlan):
            assert list(plan.match.blocks) == blocks
            assert plan.match.skip_tokens in {skip, 0}
            wanted = num_new if not self.rows else 0  # what the source state gives way to
            assert plan.match.skip_tokens == skip or not self._has_room(wanted, blocks, source)
            assert self._has_room(num_new, blocks, source if plan.match.skip_tokens else None)
            assert plan.match.skip_tokens < plan.chunk_end <= min(spec.prompt_len, plan.match.skip_tokens + budget)

    def _has_room(self, num_new: int, blocks: Sequence[BlockId], source: BlockId | None) -> bool:
        """Return whether a live slot and new blocks fit beside what a match keeps."""
        slot = None if source is None or self.cache.slots.is_pinned(source) else self.cache.slots.slot_of(source)
        kept = [block for block in blocks if not self.cache.kv.num_refs(block)]
        return self.cache.pools.fits(num_new, 0, kept, [] if slot is None else [slot])

    def _place(self, slot: SlotId) -> SlotId:
        """Return where the memory has a live or draft state."""
        return slot if self.cache.slots.shares_slots else SlotId(-1 - slot)

    def _best_match(self, sequence: Text, may_skip: bool) -> tuple[list[BlockId], int]:
        """Search the registered blocks for the longest match and its deepest usable state."""
        registered = {self.memory.sequences[key]: block for block, key in self._registered()}
        blocks, skip = [], 0
        for end in range(BLOCK, len(sequence.tokens) + 1, BLOCK):
            if sequence.upto(end) not in registered:
                break
            blocks.append(registered[sequence.upto(end)])
            if may_skip and end < len(sequence.tokens) and self.cache.slots.slot_of(blocks[-1]) is not None:
                skip = end
        return blocks, skip

    def _check_admission(self, row: RunningRequest, plan: AdmissionPlan) -> None:
        sequence, skip = sequence_of(row), plan.match.skip_tokens
        assert row.computed == skip
        if skip:
            assert sequence.upto(skip) in self.memory.published_states
            assert row.source_slot is not None and self.memory.states[row.source_slot] == sequence.upto(skip)
            assert self.memory.windows[row.source_slot] == {0: sequence.upto(skip)}
        else:
            assert row.source_slot is None
        self.memory.write_state(self._place(row.cursor.live_slot), None, {})
        self._check_kv(row, len(plan.match.blocks) * BLOCK)

    def _note_prompt_boundaries(self, row: RunningRequest) -> None:
        """Mark the states that the row's prefill chunk would reserve, had they not been there."""
        if row.epoch != self.cache.epoch:
            return
        positions = select_boundaries(
            self.cache.rules.boundaries,
            prompt_len=row.spec.prompt_len,
            start=row.computed,
            end=row.computed + row.scheduled,
            kv_match_end=row.num_shared_blocks * BLOCK,
        )
        self.unmatched -= {self.cache.kv.find(row.chain.keys[position // BLOCK - 1]) for position in positions}

    def _check_kv(self, row: RunningRequest, end: int) -> None:
        sequence = fed_to(row)
        for position in range(end):
            block, offset = row.block_ids[position // BLOCK], position % BLOCK
            assert self.memory.kv[block, offset] == sequence.upto(position + 1)

    # One step.

    @precondition(lambda self: any(not row.scheduled and not row.is_paused for row in self.rows))
    @rule(data=st.data(), budget=budgets, drafts=drafts)
    def schedule(self, data: st.DataObject, budget: int, drafts: list[int]) -> None:
        rows = [row for row in self.rows if not row.scheduled and not row.is_paused]
        self._schedule(data.draw(st.sampled_from(rows)), budget, drafts)

    def _schedule(self, row: RunningRequest, budget: int, drafts: list[int]) -> None:
        if row.is_prefilling:
            self.cache.schedule_chunk(row, min(row.computed + budget, row.spec.prompt_len))
            self._note_prompt_boundaries(row)
        else:
            self._schedule_decode(row, drafts[: MAX_LEN - row.length - 1])
        self._forget_lost_states()

    def _schedule_decode(self, row: RunningRequest, drafts: list[int]) -> None:
        counters, slots = self.cache.counters, self.cache.slots
        num_skipped, held = counters.states_skipped_no_room, list(row.cursor.draft_slots)
        self.cache.schedule_decode(row, drafts)
        given = len(row.drafts)
        assert row.drafts == tuple(drafts[:given]) and row.scheduled == 1 + given
        assert row.cursor.draft_slots[: len(held)] == held and len(row.cursor.draft_slots) == max(len(held), given)
        boundary = (row.computed // BLOCK + 1) * BLOCK
        reserves = self.checkpoints != "none" and row.epoch == self.cache.epoch
        wanted = [boundary] if reserves and boundary <= row.computed + row.scheduled else []
        if given < len(drafts):
            to_come, checkpoints = MAX_ROWS - slots.num_live, slots.num_live * (self.checkpoints != "none")
            checkpoints *= slots.shares_slots
            # A boundary that only the missing drafts would have reached had a slot for a moment.
            returned = reserves and not wanted and boundary <= row.computed + 1 + len(drafts)
            spare = slots.num_available_to_run - to_come - checkpoints - returned
            fills_blocks = row.computed + row.scheduled == len(row.block_ids) * BLOCK
            assert spare <= 0 or (fills_blocks and not self.cache.kv.num_available)
        if counters.states_skipped_no_room > num_skipped:
            assert reserves and not slots.num_available
            wanted = []
        assert [state.position for state in row.reserved] == wanted

    @precondition(lambda self: self.rows)
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
        """Run all rows that are not paused; each samples `token` everywhere, but for one that may differ.

        Up to `cut` of the tokens that a row's drafts bring are not kept, as behind a stop word, and end the row.
        """
        for _ in range(num_steps):
            step = [row for row in self.rows if not row.is_paused]
            for row in step:
                if not row.scheduled:
                    self._schedule(row, budget, drafts)
            self._run(step, [3 - token if index == odd_one else token for index in range(len(step))], cut)
            self._grow(capacity)
            if not self.rows:
                break
            self.pools_and_rows_agree()
            self.whatever_can_be_found_was_written()
            self.live_states_are_where_their_rows_look_for_them()

    def _run(self, step: Sequence[RunningRequest], sampled: Sequence[int], cut: int) -> None:
        self._forward(step)
        for row in step:
            if row.is_prefilling:
                self._publish(row, row.scheduled)
        accepted = [self._num_accepted(row, token) for row, token in zip(step, sampled, strict=True)]
        for row, num_accepted in zip(step, accepted, strict=True):
            self._align_copy(row, num_accepted)
        ended = []
        for row, token, num_accepted in zip(step, sampled, accepted, strict=True):
            num_kept = max(num_accepted - cut, 1)
            if row.samples_this_step:
                row.generated += [token] * num_kept
            if row.is_prefilling:
                self.cache.advance(row, row.scheduled)
            else:
                self._publish(row, num_kept)
                self.cache.advance(row, num_kept)
            assert (row.scheduled, row.drafts, len(row.cursor.draft_slots)) == (0, (), row.cursor.accepted - 1)
            if row.length >= MAX_LEN or num_kept < num_accepted:
                ended.append(row)
        for row in ended:
            self._leave(row)

    def _num_accepted(self, row: RunningRequest, token: int) -> int:
        wrong = [place for place, draft in enumerate(row.drafts) if draft != token]
        return 1 + (wrong[0] if wrong else len(row.drafts))

    def _align_copy(self, row: RunningRequest, num_accepted: int) -> None:
        """Copy the state at a boundary that a decode step reached, as the device does before the host knows."""
        if row.is_prefilling or not row.reserved:
            return
        (reserved,) = row.reserved
        copy = plan_align_copy(row.computed, row.scheduled, len(row.drafts), num_accepted, 0, BLOCK)
        if copy is None:
            self.memory.write_state(reserved.slot, None, {})
            return
        assert (copy.destination_column + 1) * BLOCK == reserved.position
        columns = [self._place(slot) for slot in (row.cursor.live_slot, *row.cursor.draft_slots)]
        window = {0: self.memory.windows[columns[0]][copy.shift]}
        self.memory.write_state(reserved.slot, self.memory.states[columns[copy.source_column]], window)

    def _publish(self, row: RunningRequest, num_tokens: int) -> None:
        """Publish a row, and check which boundaries can be found afterwards and which checkpoint was retired."""
        end, is_current = row.computed + num_tokens, row.epoch == self.cache.epoch
        reached = [state.position for state in row.reserved if state.position <= end]
        self._forget_lost_states()
        before = set(self.cache.slots.cached_blocks())
        if is_current:
            self._note_keys(row, end)
            self.memory.published_states.update(sequence_of(row).upto(position) for position in reached)
        self.cache.publish(row, num_tokens)
        after = set(self.cache.slots.cached_blocks())
        assert not row.reserved and row.source_block is None
        retired = set()
        if is_current:
            for index in range(end // BLOCK):
                assert self.cache.kv.find(row.chain.keys[index]) == row.block_ids[index]
            blocks = {row.block_ids[position // BLOCK - 1] for position in reached}
            assert blocks <= after
            self.unmatched -= blocks & before  # two requests have come to it
            if not row.is_prefilling and after - before:
                retired = {self.newest.get(row.request_id)} & self.unmatched
                self._note_checkpoint(row, after - before)
        else:
            assert after == before
        assert before - after == retired, "a state that others may want is gone"
        assert after - before <= {row.block_ids[position // BLOCK - 1] for position in reached}
        self._forget_lost_states()

    def _note_checkpoint(self, row: RunningRequest, published: set[BlockId]) -> None:
        (self.newest[row.request_id],) = published
        if self.checkpoints == "rolling":
            self.unmatched |= published

    def _forget_lost_states(self) -> None:
        self.unmatched &= set(self.cache.slots.cached_blocks())

    def _grow(self, capacity: int) -> None:
        outcome = grow_rows(self.rows, self.cache, capacity)
        for row in outcome.evicted:
            self.rows.remove(row)
            self.texts.append(sequence_of(row).tokens)
        paused = {block for row in self.rows if row.is_paused for block in row.block_ids}
        assert len(paused) <= capacity and all(row.is_paused for row in outcome.paused)
        assert not self.rows or not all(row.is_paused for row in self.rows)

    def _forward(self, step: Sequence[RunningRequest]) -> None:
        """Read every row's state, then write KV and states as the model's kernels do."""
        written = [slot for row in step for slot in self._written_slots(row)]
        assert len(set(written)) == len(written)
        for row in step:
            self._check_initial_state(row, set(written) - set(self._columns(row)))
        for row in step:
            self._write_kv(row)
        for row in step:
            self._check_kv(row, row.computed + row.scheduled)
            self._write_states(row)

    def _columns(self, row: RunningRequest) -> list[SlotId]:
        """Return the slots behind the tokens of a decode step, or the live slot, which a prefill writes."""
        slots = [row.cursor.live_slot] if row.is_prefilling else [row.cursor.live_slot, *row.cursor.draft_slots]
        return [self._place(slot) for slot in slots]

    def _written_slots(self, row: RunningRequest) -> list[SlotId]:
        return [*self._columns(row), *(state.slot for state in row.reserved)]

    def _check_initial_state(self, row: RunningRequest, written_by_others: set[SlotId]) -> None:
        if row.source_slot is not None:
            slot, window_slot, offset = row.source_slot, row.source_slot, 0
        else:
            slot, window_slot, offset = (
                self._place(row.cursor.state_slot),
                self._place(row.cursor.live_slot),
                row.cursor.accepted - 1,
            )
        assert slot not in written_by_others
        if row.computed:
            assert self.memory.states[slot] == sequence_of(row).upto(row.computed)
            assert self.memory.windows[window_slot][offset] == sequence_of(row).upto(row.computed)

    def _write_kv(self, row: RunningRequest) -> None:
        for position in range(row.computed, row.computed + row.scheduled):
            if position // BLOCK < row.num_shared_blocks:
                continue
            block = row.block_ids[position // BLOCK]
            assert self.cache.kv.key_of(block) is None, "a findable block is written"
            assert self.cache.kv.num_refs(block) == 1, "a shared block is written"
            self.memory.write_kv(block, position % BLOCK, fed_to(row).upto(position + 1))

    def _write_states(self, row: RunningRequest) -> None:
        fed, start, end = fed_to(row), row.computed, row.computed + row.scheduled
        assert all(start < state.position <= end and state.position % BLOCK == 0 for state in row.reserved)
        if row.is_prefilling:
            self.memory.write_state(self._place(row.cursor.live_slot), fed.upto(end), {0: fed.upto(end)})
            for state in row.reserved:
                self.memory.write_state(state.slot, fed.upto(state.position), {0: fed.upto(state.position)})
            return
        after = [fed.upto(position + 1) for position in range(start, end)]
        for column, text in zip(self._columns(row), after, strict=False):
            self.memory.write_state(column, text, {})
        self.memory.windows[self._place(row.cursor.live_slot)] = dict(enumerate(after))

    def _note_keys(self, row: RunningRequest, end: int) -> None:
        sequence = sequence_of(row).upto(end)
        keys = block_keys(self.cache.root_of(sequence.tenant), sequence.tokens, BLOCK)
        for index, key in enumerate(keys):
            self.memory.sequences[key] = sequence.upto((index + 1) * BLOCK)

    # Leaving.

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.sampled_from(self.rows)))

    @precondition(lambda self: any(row.scheduled for row in self.rows))
    @rule(data=st.data(), is_forward_run=st.booleans())
    def abort(self, data: st.DataObject, is_forward_run: bool) -> None:
        """Abort one row, or fail a whole step after its forward: rows whose live state is lost leave."""
        step = [row for row in self.rows if row.scheduled]
        if is_forward_run:
            self._forward(step)
        else:
            step = [data.draw(st.sampled_from(step))]
        for row in step:
            loses_state = is_forward_run or row.source_slot is not None
            self.cache.abort(row)
            assert (row.reserved, row.scheduled, row.drafts, row.source_block) == ([], 0, (), None)
            if loses_state:
                self._leave(row)

    def _leave(self, row: RunningRequest) -> None:
        self.texts.append(sequence_of(row).tokens)
        self.cache.release(row)
        self.rows.remove(row)

    # What else happens to a cache.

    @precondition(lambda self: self.num_requests % 7 == 6)  # now and then: a cache that is always flushed never hits
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
    def pools_and_rows_agree(self) -> None:
        self.cache.check_integrity(self.rows)

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
    def live_states_are_where_their_rows_look_for_them(self) -> None:
        for row in self.rows:
            self._check_initial_state(row, set())

    @invariant()
    def drafts_leave_a_slot_to_each_request_that_may_come(self) -> None:
        slots = self.cache.slots
        most = slots.num_slots - MAX_ROWS if slots.shares_slots else MAX_ROWS * MOST_DRAFTS
        assert slots.count_by_owner()["draft"] <= most

    @invariant()
    def reserved_slots_are_not_findable(self) -> None:
        findable = {self.cache.slots.slot_of(block) for block in self.cache.slots.cached_blocks()}
        for row in self.rows:
            for state in row.reserved:
                assert self.cache.slots.owner_of(state.slot) is SlotOwner.RESERVED and state.slot not in findable
            for owner, slots in ((SlotOwner.LIVE, [row.cursor.live_slot]), (SlotOwner.DRAFT, row.cursor.draft_slots)):
                assert all(self.cache.slots.owner_of_running(slot) is owner for slot in slots)
                assert not findable & {self._place(slot) for slot in slots}

    def _registered(self) -> list[tuple[BlockId, BlockKey]]:
        keys = ((BlockId(block), self.cache.kv.key_of(BlockId(block))) for block in range(self.cache.kv.num_blocks))
        return [(block, key) for block, key in keys if key is not None]

    def teardown(self) -> None:
        for row in self.rows:
            self.cache.release(row)
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
