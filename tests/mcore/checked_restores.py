"""Check that restored states are the published ones, bit for bit."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import pytest
import torch

from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.requests import ReservedState, RunningRequest
from megatron_mamba_cache.policy.state_reservations import StateReservations
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.cached_form import StoredStates
from megatron_mamba_cache.recurrences.quantized_states import QuantizedStates
from megatron_mamba_cache.step.memory import CacheMemory


def digest_of(states: StoredStates, slot: int) -> bytes:
    """Return a digest of a slot's contents."""
    parts = [part[:, slot] for part in states.parts]
    return sha256(b"".join(part.contiguous().cpu().view(torch.uint8).numpy().tobytes() for part in parts)).digest()


@contextmanager
def checked_restores(patch: pytest.MonkeyPatch) -> Iterator[dict[BlockKey, set[bytes]]]:
    """Check that restored states equal, bit for bit, the states that were published under their keys.

    Whatever happens between: evictions, other tiers, suspended engines. Yields the digests of what was published.
    """
    published: dict[BlockKey, set[bytes]] = defaultdict(set)
    memories: list[CacheMemory] = []
    publish, prepare, begin = StateReservations._publish_state, CacheMemory.prepare, CacheMemory.__init__

    def noted(memory: CacheMemory, *arguments: Any, **settings: Any) -> None:
        begin(memory, *arguments, **settings)
        memories.append(memory)

    def published_state(pool: StateReservations, request: RunningRequest, state: ReservedState, block: BlockId) -> None:
        (memory,) = (memory for memory in memories if memory.prefix_cache._reservations is pool)
        quantized = memory.state_pool.cached
        assert not quantized.is_live
        published[memory.blocks.key_of(block)].add(digest_of(quantized, state.slot))
        publish(pool, request, state, block)

    def checked(memory: CacheMemory, requests: Sequence[RunningRequest]) -> None:
        prepare(memory, requests)
        pool, quantized = memory.state_pool, memory.state_pool.cached
        assert not quantized.is_live
        for request in requests:
            if request.source_block is not None and request.cursor.live_slot != PAD_SLOT:
                source = request.source_slot
                assert digest_of(quantized, source) in published[memory.blocks.key_of(request.source_block)]
                for index, tensor in enumerate(tensor for group in pool.groups for tensor in group.tensors):
                    live, stored = pool.tensors[index][:, request.cursor.live_slot], quantized.storage(index)
                    if isinstance(stored, QuantizedStates):
                        restored = stored.values[:, source].float() * stored.scales[:, source, ..., None, :]
                    else:
                        restored, live = stored[:, source], live[:, : tensor.shape[0]]
                    assert torch.equal(live, restored), tensor.name

    patch.setattr(CacheMemory, "__init__", noted)
    patch.setattr(StateReservations, "_publish_state", published_state)
    patch.setattr(CacheMemory, "prepare", checked)
    yield published
