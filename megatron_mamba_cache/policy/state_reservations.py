"""The slots that the step in preparation writes boundary states to: reserved, then published or cancelled."""

from collections.abc import Container

from ..metrics import CacheCounters
from .identifiers import BlockId, BlockKey
from .kv_block_pool import KVBlockPool
from .requests import ReservedState, RunningRequest
from .slot_pool import SlotPool


class StateReservations:
    """Reserves, publishes and cancels the boundary states of running requests.

    Args:
        is_rolling: A request keeps only its newest decode checkpoint, besides those that other requests use.
    """

    def __init__(
        self, kv: KVBlockPool, slots: SlotPool, counters: CacheCounters, block_size: int, *, is_rolling: bool
    ) -> None:
        self._kv = kv
        self._slots = slots
        self._counters = counters
        self._block_size = block_size
        self._is_rolling = is_rolling
        self._keys: dict[BlockKey, int] = {}  # of prompt boundaries -> request id

    @property
    def keys(self) -> Container[BlockKey]:
        """Keys of the reserved prompt boundaries: requests that share them may wait for the publish."""
        return self._keys

    def reserve_in_prompt(self, row: RunningRequest, position: int) -> None:
        """Reserve a boundary of the request's prompt, unless its state is cached or reserved, or no slot is left."""
        key = row.chain.keys[position // self._block_size - 1]
        known = self._kv.find(key)
        if known is not None and self._slots.slot_of(known) is not None:
            self._slots.keep(known)
            return
        if key not in self._keys and self._reserve(row, position):
            self._keys[key] = row.request_id

    def reserve_in_decode(self, row: RunningRequest, position: int) -> None:
        """Reserve a boundary that decoding may reach in this step; its key is known once its tokens are."""
        self._reserve(row, position)

    def publish(self, row: RunningRequest, end: int) -> None:
        """Publish the states at boundaries up to token `end`, whose blocks are registered; cancel the others."""
        while row.reserved:  # one by one, so that a failure leaves the rest to `cancel`
            state = row.reserved[0]
            block = row.block_ids[state.position // self._block_size - 1] if state.position <= end else None
            if block is None or self._slots.slot_of(block) is not None:
                if block is not None:
                    self._slots.keep(block)  # two requests reached it
                self._slots.cancel(state.slot)
                block = None
            else:
                self._publish_state(row, state, block)
            row.unreserve(state)
            self._forget_key(row, state)
            if block is not None:
                self._note_published(row, block)

    def cancel(self, row: RunningRequest) -> None:
        """Return every reservation of the request."""
        while row.reserved:
            state = row.reserved[-1]
            self._slots.cancel(state.slot)
            row.unreserve(state)
            self._forget_key(row, state)

    def clear_keys(self) -> None:
        """Forget the keys of reserved prompt boundaries: no request can match them any more."""
        self._keys.clear()

    def _reserve(self, row: RunningRequest, position: int) -> bool:
        if not self._slots.num_available:
            self._counters.states_skipped_no_room += 1
            return False
        (slot,) = self._slots.reserve()
        row.reserve(ReservedState(position, slot))
        self._counters.states_reserved += 1
        return True

    def _publish_state(self, row: RunningRequest, state: ReservedState, block: BlockId) -> None:
        index = state.position // self._block_size
        depth = self._slots.deepest(row.block_ids[: index - 1])
        anchor = row.block_ids[depth - 1] if depth else None
        # Other texts that continue after a prompt boundary are known by their blocks; this request's state will follow.
        continues = index < len(row.block_ids) and self._kv.parent_of(row.block_ids[index]) == block
        num_others = self._kv.num_children(block) - continues
        self._slots.publish(state.slot, block, state.position, anchor, num_others)
        if row.is_prefilling:
            end = row.first_generated
            row.count_written(min(state.position, end) - min(self._slots.tokens_before(block), end))

    def _note_published(self, row: RunningRequest, block: BlockId) -> None:
        self._counters.states_published += 1
        if row.is_prefilling:
            return
        self._counters.decode_states_published += 1
        if self._is_rolling:
            if row.checkpoint is not None:
                self._slots.retire(row.checkpoint)
            self._slots.mark_rolling(block)
        row.publish_checkpoint(block)

    def _forget_key(self, row: RunningRequest, state: ReservedState) -> None:
        if row.is_prefilling:
            key = row.chain.keys[state.position // self._block_size - 1]
            if self._keys.get(key) == row.request_id:
                del self._keys[key]
