"""The prefix cache against a model that knows what every block and slot was last written with.

KV of a position and a state after it are a function of the tokens up to there, so the model writes those tokens,
and a reader that finds any others has been given the wrong memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_mamba_cache.policy.admission import AdmissionPlan, Refusal
from megatron_mamba_cache.policy.block_growth import grow_rows
from megatron_mamba_cache.policy.block_hashing import block_keys
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey, SlotId
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.requests import RequestSpec, RunningRequest
from megatron_mamba_cache.policy.slot_pool import SlotOwner
from tests.policy.small_cache import BLOCK, frozen, keep, request, small_cache

MAX_ROWS = 3
NUM_BLOCKS = 9
MAX_LEN = 24  # six blocks: a lone row always fits


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


@dataclass(slots=True)
class Memory:
    """What each token of a block and each slot was last written with; None for garbage."""

    kv: dict[tuple[BlockId, int], Text | None] = field(default_factory=dict)
    states: dict[SlotId, Text | None] = field(default_factory=dict)
    published_states: set[Text] = field(default_factory=set)
    sequences: dict[BlockKey, Text] = field(default_factory=dict)  # what each key stands for


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests come, run in steps, pause, are evicted, aborted and flushed, in pools that are always too small."""

    tokens = st.sampled_from([1, 1, 1, 1, 2])
    tenants = st.sampled_from(["", "", "", "", "blue"])
    budgets = st.sampled_from([1, 3, 4, 6, 9, 64, 64])

    def __init__(self) -> None:
        super().__init__()
        self.cache = small_cache()
        self.memory = Memory()
        self.rows: list[RunningRequest] = []
        self.texts: list[tuple[int, ...]] = [(1,) * 13]
        self.num_requests = 0

    @initialize(
        num_slots=st.integers(MAX_ROWS, MAX_ROWS + 4), stride=st.sampled_from([None, 1, 2]), align=st.booleans()
    )
    def build(self, num_slots: int, stride: int | None, align: bool) -> None:
        self.cache = small_cache(NUM_BLOCKS, num_slots, stride=stride, align=align)

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
        text = data.draw(st.sampled_from(self.texts))
        longest = min(len(text), MAX_LEN - 1 - len(tail))
        prefix = text[: max(longest - data.draw(st.sampled_from([0, 0, 1, 2, 5, 9])), 0)]
        prompt = (*prefix, *tail) or (1,)
        spec = request(self.num_requests, prompt, max_len=MAX_LEN, tenant=tenant, may_skip=may_skip)
        candidate = self.cache.candidate(spec)
        before = frozen(self.cache)
        plan = self.cache.plan(candidate, budget)
        assert frozen(self.cache) == before
        self._check_outcome(spec, plan, budget)
        if isinstance(plan, AdmissionPlan):
            row = self.cache.admit(candidate, plan)
            self.num_requests += 1
            self.rows.append(row)
            self._check_admission(row, plan)

    def _check_outcome(self, spec: RequestSpec, plan: AdmissionPlan | Refusal, budget: int) -> None:
        sequence = Text(spec.tenant, self.cache.epoch, tuple(spec.prompt.tolist()))
        blocks, skip = self._best_match(sequence, spec.may_skip)
        waits = spec.may_skip and any(
            skip < state.position < spec.prompt_len
            and row.epoch == self.cache.epoch
            and sequence_of(row).upto(state.position) == sequence.upto(state.position)
            for row in self.rows
            for state in row.reserved
        )
        assert (plan is Refusal.WAITS_FOR_PREFIX) == waits
        num_new = -(-spec.prompt_len // BLOCK) - len(blocks)
        lacks_blocks = self.cache.kv.num_available_beside(blocks) < num_new
        assert plan is not Refusal.NO_BLOCKS or lacks_blocks
        assert plan is not Refusal.NO_TOKENS or budget < 1
        slots = self.cache.slots
        is_full = slots.num_slots == MAX_ROWS and not slots.num_available
        in_step = slots.num_reserved or any(slots.is_pinned(BlockId(block)) for block in range(NUM_BLOCKS))
        assert plan is not Refusal.NO_SLOT or in_step or is_full
        if isinstance(plan, AdmissionPlan):
            assert not lacks_blocks
            assert list(plan.match.blocks) == blocks
            assert plan.match.skip_tokens in {skip, 0}
            assert plan.match.skip_tokens == skip or self._needs_slot_of(blocks[skip // BLOCK - 1])
            assert plan.match.skip_tokens < plan.chunk_end <= min(spec.prompt_len, plan.match.skip_tokens + budget)

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

    def _needs_slot_of(self, source: BlockId) -> bool:
        """Whether a new row can only have the slot of the state that it would start from."""
        return self.cache.slots.num_available == 1 - self.cache.slots.is_pinned(source)

    def _check_admission(self, row: RunningRequest, plan: AdmissionPlan) -> None:
        sequence, skip = sequence_of(row), plan.match.skip_tokens
        assert row.computed == skip
        if skip:
            assert sequence.upto(skip) in self.memory.published_states
            assert row.source_slot is not None and self.memory.states[row.source_slot] == sequence.upto(skip)
        else:
            assert row.source_slot is None
        self.memory.states[row.live_slot] = None
        self._check_kv(row, len(plan.match.blocks) * BLOCK)

    def _check_kv(self, row: RunningRequest, end: int) -> None:
        sequence = sequence_of(row)
        for position in range(end):
            block, offset = row.block_ids[position // BLOCK], position % BLOCK
            assert self.memory.kv[block, offset] == sequence.upto(position + 1)

    # One step.

    @precondition(lambda self: any(not row.scheduled and not row.is_paused for row in self.rows))
    @rule(data=st.data(), budget=budgets)
    def schedule(self, data: st.DataObject, budget: int) -> None:
        rows = [row for row in self.rows if not row.scheduled and not row.is_paused]
        self._schedule(data.draw(st.sampled_from(rows)), budget)

    def _schedule(self, row: RunningRequest, budget: int) -> None:
        if row.is_prefilling:
            self.cache.schedule_chunk(row, min(row.computed + budget, row.spec.prompt_len))
        else:
            self.cache.schedule_decode(row)

    @precondition(lambda self: self.rows)
    @rule(
        num_steps=st.integers(1, 8),
        budget=budgets,
        token=tokens,
        odd_one=st.integers(0, 8),
        capacity=st.sampled_from([0, 2, 4, NUM_BLOCKS]),
    )
    def run_steps(self, num_steps: int, budget: int, token: int, odd_one: int, capacity: int) -> None:
        """Run all rows that are not paused; each samples `token`, but for one that may differ."""
        for _ in range(num_steps):
            step = [row for row in self.rows if not row.is_paused]
            for row in step:
                if not row.scheduled:
                    self._schedule(row, budget)
            self._run(step, token, odd_one)
            self._grow(capacity)
            if not self.rows:
                break
            self.pools_and_rows_agree()
            self.whatever_can_be_found_was_written()

    def _run(self, step: Sequence[RunningRequest], token: int, odd_one: int) -> None:
        self._forward(step)
        for row in step:
            if row.epoch == self.cache.epoch:
                self._note_keys(row)
                self.memory.published_states.update(sequence_of(row).upto(state.position) for state in row.reserved)
            if row.is_prefilling:
                self.cache.publish(row, row.scheduled)
        for index, row in enumerate(step):
            if row.samples_this_step:
                keep(self.cache, row, [3 - token if index == odd_one else token])
            else:
                self.cache.advance(row, row.scheduled)
        for row in [row for row in step if row.length >= MAX_LEN]:
            self._leave(row)

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
        initial = [self._initial_slot(row) for row in step]
        written = [slot for row in step for slot in (row.live_slot, *(state.slot for state in row.reserved))]
        assert len(set(written)) == len(written)
        for row, slot in zip(step, initial, strict=True):
            others = {row.live_slot for row in step} - {row.live_slot}
            assert slot is None or slot not in others | {state.slot for row in step for state in row.reserved}
            assert slot is None or self.memory.states[slot] == sequence_of(row).upto(row.computed)
        for row in step:
            self._write_kv(row)
        for row in step:
            end = row.computed + row.scheduled
            self._check_kv(row, end)
            self.memory.states[row.live_slot] = sequence_of(row).upto(end)
            for state in row.reserved:
                assert row.computed < state.position <= end and state.position % BLOCK == 0
                self.memory.states[state.slot] = sequence_of(row).upto(state.position)

    def _initial_slot(self, row: RunningRequest) -> SlotId | None:
        if row.source_slot is not None:
            return row.source_slot
        return row.live_slot if row.computed else None

    def _write_kv(self, row: RunningRequest) -> None:
        for position in range(row.computed, row.computed + row.scheduled):
            if position // BLOCK < row.num_shared_blocks:
                continue
            block = row.block_ids[position // BLOCK]
            assert self.cache.kv.key_of(block) is None, "a findable block is written"
            assert self.cache.kv.num_refs(block) == 1, "a shared block is written"
            self.memory.kv[block, position % BLOCK] = sequence_of(row).upto(position + 1)

    def _note_keys(self, row: RunningRequest) -> None:
        sequence = sequence_of(row)
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
            assert (row.reserved, row.scheduled, row.source_block) == ([], 0, None)
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
        assert not list(self._registered())

    @rule(share=st.sampled_from([0.3, 0.6, 1.0]))
    def press_on_blocks(self, share: float) -> None:
        blocks = self.cache.kv.allocate(round(share * self.cache.kv.num_available))
        self.memory.kv.update({(block, offset): None for block in blocks for offset in range(BLOCK)})
        self.cache.kv.release(blocks)

    @rule(share=st.sampled_from([0.3, 0.6, 1.0]))
    def press_on_slots(self, share: float) -> None:
        slots = self.cache.slots.reserve(round(share * self.cache.slots.num_available))
        self.memory.states.update(dict.fromkeys(slots))
        for slot in slots:
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

    @invariant()
    def reserved_slots_are_not_findable(self) -> None:
        findable = {self.cache.slots.slot_of(BlockId(block)) for block in range(NUM_BLOCKS)}
        for row in self.rows:
            for state in row.reserved:
                assert self.cache.slots.owner_of(state.slot) is SlotOwner.RESERVED and state.slot not in findable
            assert self.cache.slots.owner_of(row.live_slot) is SlotOwner.LIVE and row.live_slot not in findable

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


TestPrefixCacheAgainstModel = PrefixCacheMachine.TestCase
TestPrefixCacheAgainstModel.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
