"""Reservations of slots for the states at boundaries that the next step writes."""

from ..metrics import CacheCounters
from .identifiers import BlockId, BlockKey
from .kv_block_pool import KVBlockPool
from .requests import ReservedState, RunningRequest
from .slot_pool import SlotPool


class StateReservations:
    """Reserves slots for the boundary states of running requests, and publishes or cancels them.

    Args:
        is_rolling: True if a request keeps only its newest decode checkpoint; older ones stay only if other requests
            use them.
    """

    def __init__(
        self, kv: KVBlockPool, slots: SlotPool, counters: CacheCounters, block_size: int, *, is_rolling: bool
    ) -> None:
        self._kv = kv
        self._slots = slots
        self._counters = counters
        self._block_size = block_size
        self._is_rolling = is_rolling
        self.keys: dict[BlockKey, int] = {}
        """Id of the reserving request, by key of the prompt boundary; other requests may wait for its state."""

    def reserve_in_prompt(self, request: RunningRequest, position: int) -> None:
        """Reserve a slot for a prompt boundary, unless it is cached or reserved already, or no slot is available."""
        key = request.chain.keys[position // self._block_size - 1]
        known = self._kv.find(key)
        if known is not None and self._slots.slot_of(known) is not None:
            self._slots.keep(known)
            return
        if key not in self.keys and self._reserve(request, position):
            self.keys[key] = request.request_id

    def reserve_in_decode(self, request: RunningRequest, position: int) -> None:
        """Reserve a slot for a boundary that the next decode step may reach; the key is computed after the step."""
        self._reserve(request, position)

    def publish(self, request: RunningRequest, end: int) -> None:
        """Publish the reserved states up to position `end`, whose blocks must be registered; cancel the others."""
        while request.reserved:  # remove one at a time, so that `cancel` handles the rest after an error
            state = request.reserved[0]
            block = request.block_ids[state.position // self._block_size - 1] if state.position <= end else None
            if block is None or self._slots.slot_of(block) is not None:
                if block is not None:
                    self._slots.keep(block)  # another request has cached a state here
                self._slots.cancel(state.slot)
                block = None
            else:
                self._publish_state(request, state, block)
            request.unreserve(state)
            self._forget_key(request, state)
            if block is not None:
                self._note_published(request, block)

    def cancel(self, request: RunningRequest) -> None:
        """Cancel all reservations of the request."""
        while request.reserved:
            state = request.reserved[-1]
            self._slots.cancel(state.slot)
            request.unreserve(state)
            self._forget_key(request, state)

    def _reserve(self, request: RunningRequest, position: int) -> bool:
        if not self._slots.num_available:
            self._counters.states_skipped_no_room += 1
            return False
        (slot,) = self._slots.reserve()
        request.reserve(ReservedState(position, slot))
        self._counters.states_reserved += 1
        return True

    def _publish_state(self, request: RunningRequest, state: ReservedState, block: BlockId) -> None:
        index = state.position // self._block_size
        depth = self._slots.deepest(request.block_ids[: index - 1])
        anchor = request.block_ids[depth - 1] if depth else None
        # Count other texts that continue after a prompt boundary; this request's next block is registered later.
        continues = index < len(request.block_ids) and self._kv.parent_of(request.block_ids[index]) == block
        num_others = self._kv.num_children(block) - continues
        self._slots.publish(state.slot, block, state.position, anchor, num_others)
        if request.is_prefilling:
            end = request.first_generated
            request.count_written(min(state.position, end) - min(self._slots.tokens_before(block), end))

    def _note_published(self, request: RunningRequest, block: BlockId) -> None:
        self._counters.states_published += 1
        if request.is_prefilling:
            return
        self._counters.decode_states_published += 1
        if self._is_rolling:
            if request.checkpoint is not None:
                self._slots.retire(request.checkpoint)
            self._slots.mark_rolling(block)
        request.publish_checkpoint(block)

    def _forget_key(self, request: RunningRequest, state: ReservedState) -> None:
        if request.is_prefilling:
            key = request.chain.keys[state.position // self._block_size - 1]
            if self.keys.get(key) == request.request_id:
                del self.keys[key]
