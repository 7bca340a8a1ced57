"""The cache as one thing: KV blocks and state slots of requests that are admitted, published and released.

Every public method either applies whole or raises before it changed anything. The order of calls for a request is
admit → publish → advance → (schedule_chunk or schedule_token → publish → advance, grow in between) → release. A step
that fails ends the request's stay: abort, or release at once, for its live state can no longer be trusted.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..errors import CacheIntegrityError
from ..metrics import CacheCounters
from .admission import AdmissionPlan, AdmissionRules, PromptView, Refusal, has_live_slot_beside, plan_admission
from .block_hashing import BlockKeyChain, CacheSalt
from .boundaries import select_boundaries
from .identifiers import BlockId, BlockKey
from .kv_block_pool import KVBlockPool
from .requests import Candidate, RequestSpec, ReservedState, RunningRequest
from .slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What cached contents depend on besides tokens: the model and its weights."""

    fingerprint: str
    weights_version: str


class PrefixCache:
    """Matches, admits, publishes and releases requests over one KV block pool and one slot pool.

    `kv` must call `slots.drop` for each block it evicts, so that a state leaves with its block.
    """

    def __init__(
        self,
        kv: KVBlockPool,
        slots: SlotPool,
        rules: AdmissionRules,
        identity: CacheIdentity,
        counters: CacheCounters,
        *,
        enabled: bool = True,
    ) -> None:
        self.kv = kv
        self.slots = slots
        self.rules = rules
        self.counters = counters
        self.enabled = enabled
        self.epoch = 0
        self._identity = identity
        self._reserved_keys: dict[BlockKey, int] = {}  # boundary key -> request id, of the step in preparation
        self._num_admitted = 0

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.rules.boundaries.block_size

    def candidate(self, spec: RequestSpec) -> Candidate:
        """Return `spec` ready for admission, its prompt's block keys computed."""
        return Candidate(spec, self._keys_of(spec), self.epoch)

    def plan(self, candidate: Candidate, budget: int) -> AdmissionPlan | Refusal:
        """Plan the admission of a candidate within `budget` tokens; changes nothing but stale keys."""
        if candidate.epoch != self.epoch:
            candidate.chain, candidate.epoch = self._keys_of(candidate.spec), self.epoch
        spec = candidate.spec
        prompt_keys = candidate.chain.keys[: spec.prompt_len // self.block_size]
        view = PromptView(prompt_keys, spec.prompt_len, spec.may_skip)
        return plan_admission(
            view, self.kv, self.slots, budget=budget, reserved_keys=self._reserved_keys, rules=self.rules
        )

    def admit(self, candidate: Candidate, plan: AdmissionPlan, age: int | None = None) -> RunningRequest:
        """Apply an admission plan and schedule the request's first prefill chunk.

        Args:
            age: Of a request that ran before and lost its memory; None for a new one.

        Raises:
            CacheIntegrityError: If a block or state of the plan is gone since it was made; nothing has changed then.
        """
        match, block_size = plan.match, self.block_size
        self._check_plan(candidate, plan)
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
            row = RunningRequest(
                spec=candidate.spec,
                chain=candidate.chain,
                epoch=candidate.epoch,
                age=self._num_admitted if age is None else age,
                live_slot=live_slot,
                block_ids=[*match.blocks, *new_blocks],
                num_shared_blocks=len(match.blocks),
                computed=match.skip_tokens,
                num_published_blocks=len(match.blocks),
                source_block=source,
                source_slot=None if source is None else self.slots.slot_of(source),
            )
            undo.callback(self._cancel_reserved, row)
            self.schedule_chunk(row, plan.chunk_end)
            undo.pop_all()
        self._num_admitted += 1
        self._count_admission(row, len(match.blocks) * block_size)
        return row

    def schedule_chunk(self, row: RunningRequest, chunk_end: int) -> None:
        """Schedule prefill up to `chunk_end` and reserve the boundaries that deserve a cached state."""
        row.scheduled = chunk_end - row.computed
        if not self._publishes(row):
            return
        positions = select_boundaries(
            self.rules.boundaries,
            prompt_len=row.spec.prompt_len,
            start=row.computed,
            end=chunk_end,
            kv_match_end=row.num_shared_blocks * self.block_size,
        )
        for position in positions:
            self._reserve(row, position)

    def schedule_token(self, row: RunningRequest) -> None:
        """Schedule the next single token of a decoding row."""
        row.scheduled = 1

    def publish(self, row: RunningRequest) -> None:
        """Make what the row's step wrote findable, after the forward is launched and before the row advances."""
        if self._publishes(row):
            self._publish_blocks(row)
            self._publish_states(row)
        else:
            self._cancel_reserved(row)
        self._unpin_source(row)

    def abort(self, row: RunningRequest) -> None:
        """Return every reservation and pin of a step that will not be published."""
        self._cancel_reserved(row)
        self._unpin_source(row)
        row.scheduled = 0

    def advance(self, row: RunningRequest) -> None:
        """Count the step's tokens as computed."""
        if row.is_prefilling:
            self.counters.prefill_tokens_computed += row.scheduled
        else:
            self.counters.decode_tokens_computed += row.scheduled
        row.computed += row.scheduled
        row.scheduled = 0

    def grow(self, row: RunningRequest) -> None:
        """Give the row one more KV block.

        Raises:
            CacheCapacityError: If there is none; nothing has changed then.
        """
        row.block_ids.extend(self.kv.allocate(1))

    def release(self, row: RunningRequest) -> None:
        """Take back all that the row holds; its published blocks and states stay findable."""
        self.abort(row)
        self.slots.touch(row.block_ids)
        self.kv.release(row.block_ids)
        self.slots.release_live(row.live_slot)
        row.block_ids = []

    def flush(self, weights_version: str | None = None) -> None:
        """Make all that is cached unreachable; running rows publish nothing more until they are prefilled again."""
        self.epoch += 1
        if weights_version is not None:
            self._identity = CacheIdentity(self._identity.fingerprint, weights_version)
        self._reserved_keys.clear()
        self.slots.flush()  # first: a pinned state has left the map when its block goes
        self.kv.flush()

    def check_integrity(self, rows: Sequence[RunningRequest]) -> None:
        """Raise `CacheIntegrityError` unless pools and rows agree about every block and slot."""
        self.kv.check_integrity()
        self.slots.check_integrity()
        refs: dict[BlockId, int] = {}
        for row in rows:
            for block in row.block_ids:
                refs[block] = refs.get(block, 0) + 1
        for block, count in refs.items():
            if self.kv.num_refs(block) != count:
                raise CacheIntegrityError(f"block {block}: {self.kv.num_refs(block)} references, {count} rows hold it")
        if self.kv.num_referenced != len(refs):
            raise CacheIntegrityError(f"{self.kv.num_referenced} blocks referenced, rows hold {len(refs)}")
        stray = [block for block in self.slots.cached_blocks() if self.kv.key_of(block) is None]
        if stray:
            raise CacheIntegrityError(f"blocks {stray} have a cached state but no key")
        owners, num_reserved = self.slots.count_by_owner(), sum(len(row.reserved) for row in rows)
        if (owners["live"], owners["reserved"]) != (len(rows), num_reserved):
            raise CacheIntegrityError(f"slots {owners}, but {len(rows)} rows with {num_reserved} reservations")

    def root_of(self, tenant: str) -> bytes:
        """Return the digest under which a tenant's first blocks are chained in this epoch."""
        identity = self._identity
        return CacheSalt(identity.fingerprint, identity.weights_version, self.epoch, tenant).root()

    def _keys_of(self, spec: RequestSpec) -> BlockKeyChain:
        chain = BlockKeyChain(self.root_of(spec.tenant), self.block_size)
        if self.enabled:
            chain.extend(spec.prompt)
        return chain

    def _publishes(self, row: RunningRequest) -> bool:
        return self.enabled and row.epoch == self.epoch

    def _check_plan(self, candidate: Candidate, plan: AdmissionPlan) -> None:
        match = plan.match
        for block, key in zip(match.blocks, candidate.chain.keys, strict=False):
            if self.kv.find(key) != block:
                raise CacheIntegrityError(f"block {block} of an admission plan is no longer cached")
        if match.skip_tokens and self.slots.slot_of(match.blocks[match.skip_tokens // self.block_size - 1]) is None:
            raise CacheIntegrityError(f"the state at token {match.skip_tokens} of an admission plan is gone")
        has_blocks = self.kv.num_available_beside(match.blocks) >= plan.num_new_blocks
        if not (has_blocks and has_live_slot_beside(match, self.slots, self.block_size)):
            raise CacheIntegrityError("the room an admission plan counted on is gone; plan again before admitting")

    def _reserve(self, row: RunningRequest, position: int) -> None:
        block_index = position // self.block_size - 1
        key = row.chain.keys[block_index]
        known = self.kv.find(key)
        if known is not None and self.slots.slot_of(known) is not None:
            return
        if key in self._reserved_keys:
            return
        if not self.slots.num_available:
            self.counters.states_skipped_no_room += 1
            return
        (slot,) = self.slots.reserve()
        row.reserved.append(ReservedState(position, slot))
        self._reserved_keys[key] = row.request_id
        self.counters.states_reserved += 1

    def _publish_blocks(self, row: RunningRequest) -> None:
        num_full = (row.computed + row.scheduled) // self.block_size
        if num_full > len(row.chain.keys):
            row.chain.extend(row.tokens(row.chain.num_tokens, num_full * self.block_size))
        for index in range(row.num_published_blocks, num_full):
            parent = row.block_ids[index - 1] if index else None
            row.block_ids[index] = self.kv.register(row.block_ids[index], row.chain.keys[index], parent)
        row.num_published_blocks = max(row.num_published_blocks, num_full)

    def _publish_states(self, row: RunningRequest) -> None:
        while row.reserved:  # one by one, so that whatever fails in between leaves the rest to `abort`
            state = row.reserved[0]
            block = row.block_ids[state.position // self.block_size - 1]
            if self.slots.slot_of(block) is None:
                self.slots.publish(state.slot, block, state.position)
                self.counters.states_published += 1
            else:
                self.slots.cancel(state.slot)
            del row.reserved[0]
            self._forget_reserved_key(row, state)

    def _cancel_reserved(self, row: RunningRequest) -> None:
        while row.reserved:
            state = row.reserved.pop()
            self.slots.cancel(state.slot)
            self._forget_reserved_key(row, state)

    def _forget_reserved_key(self, row: RunningRequest, state: ReservedState) -> None:
        key = row.chain.keys[state.position // self.block_size - 1]
        if self._reserved_keys.get(key) == row.request_id:
            del self._reserved_keys[key]

    def _unpin_source(self, row: RunningRequest) -> None:
        if row.source_block is not None:
            self.slots.unpin(row.source_block)
        row.source_block = None
        row.source_slot = None

    def _count_admission(self, row: RunningRequest, matched_tokens: int) -> None:
        self.counters.requests_admitted += 1
        self.counters.prompt_tokens_matched += matched_tokens
        self.counters.prompt_tokens_skipped += row.computed
        self.counters.states_restored += row.source_slot is not None
