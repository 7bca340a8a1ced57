"""Slot allocator for cached Mamba states, with the interface of Megatron's documented allocator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CacheCapacityError
from ..policy.boundaries import BoundaryRule, select_boundaries
from ..policy.identifiers import BlockId, SlotId
from ..policy.slot_pool import SlotPool
from .interface import StateGroup, StateTensor
from .pool import StatePool
from .slot_allocator_context import NoReservations, PromptRequest, SlotAllocatorContext, StepReservations

MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3
"""Maximum number of boundaries per prompt without a stride: the end of the KV match and the last two boundaries."""


@dataclass(frozen=True, slots=True)
class _StoredOffset:
    offset: int
    block: BlockId
    slot: SlotId


class StateSlotAllocator:
    """Allocator that assigns slots of an engine's pools to the Mamba states at the ends of KV blocks.

    The methods have the signatures of Megatron's allocator and return the same results, such as -1 for a missing slot.
    """

    def __init__(
        self,
        context: SlotAllocatorContext,
        pool: StatePool,
        slots: SlotPool,
        rule: BoundaryRule,
        reservations: StepReservations,
    ) -> None:
        self.context = context
        self.state_pool = pool
        self.slots = slots
        self._rule = rule
        self._reservations = reservations
        self._hashes: dict[BlockId, int] = {}
        self._stored: dict[int, list[_StoredOffset]] = {}  # request index -> boundaries in its current prefill chunk

    def allocate_slots_batch(self, block_ids: Sequence[int]) -> list[int]:
        """Return a slot for each block; evict the states with the lowest priority if needed.

        A block that occurs twice gets one slot. The caller must write a new slot before a request can match it; in an
        engine, this means before the next step.

        Raises:
            CacheCapacityError: If there are too few slots; no slot is allocated or evicted in this case.
            ValueError: If a block id is negative.
        """
        blocks = [BlockId(int(block)) for block in block_ids]
        if blocks and min(blocks) < 0:
            raise ValueError(f"block ids must not be negative, found {blocks}; remove padding from the list")
        held = [block for block in dict.fromkeys(blocks) if self.slots.slot_of(block) is not None]
        missing = [block for block in dict.fromkeys(blocks) if self.slots.slot_of(block) is None]
        available = self.slots.num_available - sum(not self.slots.is_pinned(block) for block in held)
        if len(missing) > available:
            raise CacheCapacityError(
                f"{len(missing)} new state slots are needed, but {available} of {self.slots.num_slots} are available; "
                "raise "
                "--cache-gb, or --inference-dynamic-batching-prefix-caching-mamba-gb if that is set, or max_slots"
            )
        for block in held:
            self.slots.pin(block)
        new_slots = self.slots.reserve(len(missing))
        for block in held:
            self.slots.unpin(block)
        for block, slot in zip(missing, new_slots, strict=True):
            self.slots.publish(slot, block)
            self._hashes.pop(block, None)  # an evicted state may have left a hash
        return [self.get_slot(block) for block in blocks]

    def get_slot(self, block_id: int) -> int:
        """Return the slot of the block's state; -1 if it has none."""
        slot = self.slots.slot_of(BlockId(int(block_id)))
        return -1 if slot is None else slot

    def has_state(self, block_id: int) -> bool:
        """Return True if a state is cached for the block."""
        return self.get_slot(block_id) >= 0

    def invalidate_block(self, block_id: int) -> None:
        """Drop the block's cached state and hash, and release any slot reserved for it."""
        block = BlockId(int(block_id))
        self.slots.drop(block)
        self._hashes.pop(block, None)
        for request_idx, stored in self._stored.items():
            for item in (item for item in stored if item.block == block):
                self.slots.cancel(item.slot)
            self._stored[request_idx] = [item for item in stored if item.block != block]

    def on_kv_blocks_deregistered(self, block_ids: Sequence[int], hashes: Sequence[int]) -> None:
        """Drop the states of blocks that are removed from the KV cache; `hashes` is unused."""
        for block in block_ids:
            self.invalidate_block(block)

    def register_block_hashes_batch(self, block_ids: Sequence[int], hashes: Sequence[int]) -> None:
        """Store the hashes of blocks that have a cached state; hashes that are not positive are ignored."""
        for block, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash > 0 and self.has_state(block):
                self._hashes[BlockId(int(block))] = block_hash

    def hash_of(self, block_id: int) -> int | None:
        """Return the hash registered for the block; None if it has no hash or no cached state."""
        return self._hashes.get(BlockId(int(block_id))) if self.has_state(block_id) else None

    def store_from_tensors(self, block_id: int, layer_idx: int, ssm_state: Tensor, conv_state: Tensor) -> None:
        """Write one layer's state to the slot of a block.

        Raises:
            ValueError: If the block has no slot, the layer does not exist, or a state's shape differs from the pool's.
        """
        slot, cached = self.get_slot(block_id), self.state_pool.cached
        if slot < 0:
            raise ValueError(f"block {block_id} has no state slot; call allocate_slots_batch first")
        num_layers = len(self.state_pool.groups[0].layers)
        if not 0 <= layer_idx < num_layers:
            raise ValueError(f"layer_idx must be between 0 and {num_layers - 1}, found {layer_idx}")
        states = {"conv_state": conv_state, "ssm_state": ssm_state}
        for index, (name, state) in enumerate(states.items()):
            if tuple(state.shape) != (shape := cached.shape(index)):
                raise ValueError(f"{name} must have shape {shape}, found {tuple(state.shape)}")
        for index, state in enumerate(states.values()):
            cached.store_layer(index, layer_idx, slot, state)

    def store_from_live_batch(self, slots: Sequence[int], request_indices: Sequence[int]) -> None:
        """Copy the live states of requests to slots, for all layers and state tensors.

        Raises:
            ValueError: If a slot is negative or the lengths differ; nothing is copied in this case.
        """
        targets, sources = [int(slot) for slot in slots], [int(request_idx) for request_idx in request_indices]
        if targets and min(targets) < 0:
            raise ValueError(f"slots must not be negative, found {targets}; remove padding from the list")
        if len(targets) != len(sources):
            raise ValueError(
                f"the number of slots must equal the number of requests, found {len(targets)} slots and "
                f"{len(sources)} requests"
            )
        live_slots = [self._live_slot(request_idx) for request_idx in sources]
        self.state_pool.cached.store_from(self._live_states, *self._sent(live_slots, targets))

    def restore_to_live(self, request_idx: int, block_id: int) -> bool:
        """Copy the block's cached state to the request's live slot; return False if the block has no state."""
        slot = self.get_slot(block_id)
        if slot < 0:
            return False
        self.state_pool.cached.restore_to(self._live_states, *self._sent([slot], [self._live_slot(request_idx)]))
        return True

    def compute_and_store_offsets(
        self,
        req: PromptRequest,
        current_id: int,
        skip_tokens: int,
        prefill_chunk_length: int,
        num_matched_blocks: int,
        matched_block_ids: Sequence[int],
        overall_required_blocks: int,
    ) -> None:
        """Reserve slots for the states to be cached at block boundaries in a prefill chunk.

        The chunk has `prefill_chunk_length` tokens, starting at `req.finished_chunk_token_count`. Its first
        `skip_tokens` need no prefill; offsets count from the first token after them. Boundaries that already have a
        state are skipped, and so are the remaining boundaries if no slot is available. The last two arguments are
        unused; they are part of Megatron's signature.
        """
        chunk_start = req.finished_chunk_token_count
        start = chunk_start + skip_tokens
        positions = select_boundaries(
            self._rule,
            prompt_len=len(req.prompt_tokens),
            start=start,
            end=chunk_start + prefill_chunk_length,
            kv_match_end=num_matched_blocks * self._rule.block_size,
        )
        self._cancel(current_id)
        row_blocks = self.context.request_to_kv_block_ids[current_id]
        stored = []
        for position in positions:
            block = BlockId(int(row_blocks[position // self._rule.block_size - 1]))
            if not self.has_state(block) and self.slots.num_available:
                stored.append(_StoredOffset(position - start, block, self.slots.reserve()[0]))
        self._stored[current_id] = stored

    def get_intermediate_gpu_data(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the boundaries reserved in the current step: offsets [prefills, k] int32 and counts [prefills] int32.

        Both are None if no boundary is reserved. Offsets are padded with 0. k is the largest count, but at least
        `MAX_INTERMEDIATE_OFFSETS_PER_REQUEST`, or ceil(max_tokens / block size) if the boundary rule has a stride.
        """
        rows = [[item.offset for item in self._stored[index]] for index in sorted(self._stored)]
        rows = rows or self._reservations.boundary_offsets()
        if not any(rows):
            return None, None
        k = MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
        if self._rule.stride is not None:
            k = math.ceil(self.context.max_tokens / self._rule.block_size)
        k = max(k, *map(len, rows))
        device = self.state_pool.device
        padded = [row + [0] * (k - len(row)) for row in rows]
        counts = [len(row) for row in rows]
        return (
            torch.tensor(padded, dtype=torch.int32, device=device),
            torch.tensor(counts, dtype=torch.int32, device=device),
        )

    def commit_intermediate_states(self) -> None:
        """Publish the boundary states that the forward pass or graph replay wrote; the states become read-only."""
        for stored in self._stored.values():
            while stored:  # removed one by one, so that the rest stay reserved if an error occurs
                item = stored[0]
                if self.has_state(item.block):
                    self.slots.cancel(item.slot)
                else:
                    self.slots.publish(item.slot, item.block)
                del stored[0]
        self._stored.clear()
        self._reservations.publish_prompts()

    def reset(self) -> None:
        """Drop all cached states, hashes and reserved boundaries; live slots are not affected."""
        for request_idx in list(self._stored):
            self._cancel(request_idx)
        self._hashes.clear()
        self.slots.flush()

    def _cancel(self, request_idx: int) -> None:
        for item in self._stored.pop(request_idx, []):
            self.slots.cancel(item.slot)

    @property
    def _live_states(self) -> tuple[Tensor, ...]:
        of_layers = self.context.mamba_conv_states, self.context.mamba_ssm_states
        return *of_layers, *self.state_pool.tensors[len(of_layers) :]

    def _sent(self, src: Sequence[int], dst: Sequence[int]) -> Tensor:
        """Copy `src` and `dst` to the pool's device as one int32 tensor [2, n]."""
        return torch.tensor([list(src), list(dst)], dtype=torch.int32).to(self.state_pool.device)

    def _live_slot(self, request_idx: int) -> int:
        return int(self.context.mamba_metadata.request_to_mamba_state_idx[request_idx])


class MambaSlotAllocator(StateSlotAllocator):
    """A `StateSlotAllocator` that allocates its own pool of `max_slots` slots with the given state shapes."""

    def __init__(
        self,
        context: SlotAllocatorContext,
        max_slots: int,
        num_mamba_layers: int,
        conv_states_shape: tuple[int, ...],
        ssm_states_shape: tuple[int, ...],
        conv_states_dtype: torch.dtype,
        ssm_states_dtype: torch.dtype,
    ) -> None:
        if max_slots < 1:
            raise ValueError(f"max_slots must be at least 1, found {max_slots}")
        tensors = (
            StateTensor("conv", tuple(conv_states_shape), conv_states_dtype),
            StateTensor("ssm", tuple(ssm_states_shape), ssm_states_dtype),
        )
        group = StateGroup(tuple(range(num_mamba_layers)), tensors)
        pool = StatePool.zeros([group], max_slots, torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        super().__init__(context, pool, SlotPool(max_slots), BoundaryRule(context.block_size_tokens), NoReservations())


def states_by_megatron(pool: StatePool) -> tuple[Tensor, Tensor]:
    """Return the conv and SSM states of a pool in Megatron's layout, [layers, slots, ...] each."""
    return pool.tensor("conv"), pool.tensor("ssm")
