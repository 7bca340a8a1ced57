"""Slots to which the next step writes boundary states: reserved, then published or cancelled."""

from ..metrics import CacheCounters
from .identifiers import BlockId, BlockKey
from .kv_block_pool import KVBlockPool
from .requests import ReservedState, RunningRequest
from .slot_pool import SlotPool


class StateReservations:
    """Reserve, publish and cancel the boundary states of running requests.

    Args:
        is_rolling: True if a request keeps only its newest decode checkpoint and checkpoints that other requests use.
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
        """Keys of the reserved prompt boundaries, each with its request's id; others may wait for the publish."""

    def reserve_in_prompt(self, request: RunningRequest, position: int) -> None:
        """Reserve a slot for a boundary of the prompt, unless its state is cached or reserved or no slot is left."""
        key = request.chain.keys[position // self._block_size - 1]
        known = self._kv.find(key)
        if known is not None and self._slots.slot_of(known) is not None:
            self._slots.keep(known)
            return
        if key not in self.keys and self._reserve(request, position):
            self.keys[key] = request.request_id

    def reserve_in_decode(self, request: RunningRequest, position: int) -> None:
        """Reserve a slot for a boundary that decoding may reach in this step; its key is known after the step."""
        self._reserve(request, position)

    def publish(self, request: RunningRequest, end: int) -> None:
        """Publish the reserved states up to token `end`, whose blocks are registered; cancel the rest."""
        while request.reserved:  # one at a time, so that after a failure `cancel` handles the rest
            state = request.reserved[0]
            block = request.block_ids[state.position // self._block_size - 1] if state.position <= end else None
            if block is None or self._slots.slot_of(block) is not None:
                if block is not None:
                    self._slots.keep(block)  # two requests reached the same boundary
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
        # Count the other texts that continue after a prompt boundary by their blocks; this request's own will follow.
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
