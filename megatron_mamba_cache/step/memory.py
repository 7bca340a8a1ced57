"""Device memory of a context: KV buffer, state pool, step buffers and their bookkeeping. Freed by a suspend."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import CacheConfig
from ..errors import CacheCapacityError
from ..kernels.attention.choice import choose_attention
from ..kernels.attention.interface import AttentionShape
from ..kernels.compilation import WATCH
from ..metrics import CacheCounters, CacheSnapshot
from ..policy.admission import AdmissionRules
from ..policy.boundaries import BoundaryRule
from ..policy.draft_states import DraftStates, ReplayStates, WindowStates, num_folded
from ..policy.eviction_rules import EVICTION_RULES
from ..policy.identifiers import BlockId
from ..policy.index_pools import FixedIndexPool
from ..policy.pools import CachePools
from ..policy.prefix_cache import CacheIdentity, PrefixCache
from ..policy.requests import RunningRequest
from ..policy.slot_pool import SlotPool
from ..ranks.agreement import CacheCapacity
from ..ranks.group import Ranks, on_all_ranks
from ..recurrences.interface import LiveState
from ..recurrences.layout import BlockLayout, bytes_of, slab_tensors, state_tensors
from ..recurrences.model_shape import HybridModelShape
from ..recurrences.pool import StatePool
from ..recurrences.slab_shape import MemorySizes
from .batch import StepGeometry
from .buffers import StepBuffers, StepLimits
from .captured_shapes import most_padding_requests
from .memory_below import MemoryBelow
from .overlapped_step import Capture
from .routed_experts import NoRoutes, RouteTable


class CacheMemory:
    """Cache memory and step buffers on the device with their bookkeeping, created and freed as a whole.

    Args:
        capacity: Numbers of KV blocks and state slots, equal on all ranks.
        max_blocks: Maximum number of KV blocks per request.
        counters: Counters that the prefix cache updates.
        weights_version: Version of the weights with which the cached states and KV are computed.
        below: Lower tiers (host memory and disk), which outlive this memory.
        shares_steps: True if expert-parallel ranks run steps of the same shape.

    Raises:
        CacheCapacityError: If any rank has too little memory.
    """

    def __init__(
        self,
        config: CacheConfig,
        shape: HybridModelShape,
        capacity: CacheCapacity,
        ranks: Ranks,
        *,
        max_blocks: int,
        counters: CacheCounters,
        weights_version: str,
        below: MemoryBelow,
        shares_steps: bool,
    ) -> None:
        device = torch.cuda.current_device()
        attention_shape = _attention_shape(shape, config, capacity, device)
        self.attention = on_all_ranks(ranks, lambda: choose_attention(config.attention_backend, attention_shape))
        # Allocate memory first, so that an impossible budget fails before the bookkeeping is built.
        self.state_pool, self.kv_buffer = on_all_ranks(ranks, lambda: _allocated(shape, config, capacity, device))
        self.routes = RouteTable(self.kv_buffer, shape) if config.record_routes else NoRoutes()
        running = FixedIndexPool(config.num_running_slots) if config.quantizes_states else None
        self.dummy_block = BlockId(capacity.num_blocks - 1)  # receives writes of padding, never read
        self._space = capacity.space()
        rule = EVICTION_RULES[config.eviction](capacity.state_len)
        pools = CachePools.over(self._space, rule, block_size=config.block_size_tokens, running=running)
        self.pools = pools
        self.blocks, self.slots = pools.kv, pools.slots
        self.num_paused_blocks = capacity.num_paused_blocks
        slab_bytes = bytes_of(self.state_pool.cached.parts[0], self.kv_buffer)
        self.below = below.attach(pools, slab_bytes, counters, self.clear_stale_blocks)
        unit = shape.unit_bytes(config)
        total = capacity.num_slabs * capacity.slab.slab_bytes(unit)
        others = shape.buffers_bytes(config), shape.running_bytes(config)
        self._sizes = MemorySizes(unit, total, capacity.slab, *others)
        self.step_buffers = on_all_ranks(ranks, lambda: _step_buffers(config, shape, max_blocks, device, shares_steps))
        self.geometry = StepGeometry(config.block_size_tokens, shape.grain, self.dummy_block)
        stride = 1 if config.boundary_stride == "all" else config.boundary_stride
        self.boundary_rule = BoundaryRule(config.block_size_tokens, stride)
        self.prefix_cache = PrefixCache(
            pools,
            AdmissionRules(self.boundary_rule, config.align_prefill_chunks, shape.rounds_at_boundaries(config)),
            CacheIdentity(shape.cache_fingerprint(config), weights_version),
            counters,
            draft_states=_draft_states(config, shape, self.slots),
            checkpoints=config.decode_checkpoints,
            enabled=config.prefix_caching,
            epoch=below.epoch,
            tiers=self.below.tiers,
        )

    def snapshot(self, counters: CacheCounters, captured: Capture) -> CacheSnapshot:
        """Return the counters, including evictions from this memory, and the current use of slots and blocks."""
        compiled = WATCH.total
        evictions: dict[str, Any] = {
            "states_evicted": counters.states_evicted + self.slots.num_evicted,
            "kv_blocks_evicted": counters.kv_blocks_evicted + self.slots.num_blocks_evicted,
        }
        return CacheSnapshot(
            counters=replace(counters, **evictions),
            **self._usage(),
            num_compiled_kernels=compiled.num_kernels,
            compile_seconds=compiled.seconds,
            num_graphs=captured.num_graphs,
            capture_seconds=captured.seconds,
            graph_bytes=captured.num_bytes,
        )

    def _usage(self) -> dict[str, dict[str, int]]:
        """Return slots by owner, blocks by kind and bytes by use, keyed by `CacheSnapshot` field."""
        slots, blocks = self.slots.count_by_owner(), self.blocks.count_by_kind()
        num_bytes = self._sizes.by_use(slots, blocks, self._space.count_slabs())
        used = {"state_slots": slots, "kv_blocks": blocks, "cache_bytes": num_bytes}
        return used | self.below.usage()

    def prepare(self, prefilling: Sequence[RunningRequest]) -> None:
        """Prepare memory for the laid-out step's forward pass: clear stale blocks and dequantize cached states."""
        self.clear_stale_blocks()
        if any(request.source_block is not None for request in prefilling):
            self.restore_states(len(prefilling))

    def restore_states(self, num_requests: int) -> None:
        """Dequantize the cached states from which the step's prompts start, into the requests' live slots.

        Args:
            num_requests: Number of leading prefill requests to consider; they must include all that start from a cached
                state.
        """
        if not self.state_pool.cached.is_live:
            names = "source_slots", "final_slots"
            sources, targets = (self.step_buffers.device(name)[:num_requests] for name in names)
            self.state_pool.cached.restore(sources, targets)

    def close(self, requests: Iterable[RunningRequest]) -> None:
        """Write the requests' last published states to lower tiers and wait; call this before the memory is freed."""
        for request in requests:
            self.prefix_cache.keep_below(request)
        self.below.close()

    def clear_stale_blocks(self) -> None:
        """Zero KV blocks whose memory held states. Call this before the first step or copy that may use the blocks."""
        for blocks in self._space.take_stale_blocks():
            self.kv_buffer[:, :, blocks.start : blocks.stop].zero_()

    def resolve(self, requests: Sequence[RunningRequest]) -> None:
        """Move each request's current state into its live slot, and release its draft states."""
        unresolved = [(request, state) for request in requests if (state := self._live_state(request)).is_unresolved]
        self.state_pool.drafts.resolve([state for _, state in unresolved])
        for request, _ in unresolved:
            self.prefix_cache.draft_states.close(request.cursor, request.computed)

    def _live_state(self, request: RunningRequest) -> LiveState:
        fold_len, at = self.step_buffers.limits.fold_len, request.cursor
        folded = request.computed if not fold_len or request.is_prefilling else num_folded(request, fold_len)
        return LiveState(at.live_slot, at.state_slot, at.accepted, at.draft_buffer or 0, folded, request.computed)

    def pause(self, requests: Sequence[RunningRequest]) -> None:
        """Release the draft slots of paused requests. Draft buffers are kept, because their memory is preallocated."""
        if not self.step_buffers.limits.fold_len:
            self.resolve(requests)


@contextmanager
def step_memory(config: CacheConfig) -> Iterator[None]:
    """Context manager that turns a failed step-buffer allocation into a `CacheCapacityError` with a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise CacheCapacityError(
            f"cannot allocate the step buffers for max_requests={config.max_requests}, max_tokens={config.max_tokens} "
            f"and max_sequence_length={config.max_sequence_length}; lower one of these settings ({error})"
        ) from error


def _draft_states(config: CacheConfig, shape: HybridModelShape, slots: SlotPool) -> DraftStates:
    if config.replays:
        return ReplayStates(config.max_requests, shape.rounding_len(config))
    keeps_checkpoints = config.prefix_caching and config.decode_checkpoints != "none"
    return WindowStates(slots, config.max_requests, keeps_checkpoints=keeps_checkpoints)


def _allocated(
    shape: HybridModelShape, config: CacheConfig, capacity: CacheCapacity, device: torch.device | int
) -> tuple[StatePool, Tensor]:
    """Allocate the state pool and the KV blocks, [2, layers, blocks, block size, kv heads, head dim]."""
    live, states, unit = shape.state_layout(config), shape.cached_layout(config), shape.unit_bytes(config)
    block_shape = (config.block_size_tokens, shape.num_kv_heads, shape.kv_channels)
    blocks = BlockLayout(shape.num_attention_layers, block_shape, shape.kv_dtype(config.kv_cache_dtype))
    try:
        parts, kv_buffer = slab_tensors(states, blocks, capacity.slab, unit, capacity.num_slabs, device)
        cached = None
        if config.quantizes_states:
            cached, parts = parts, state_tensors(live, config.num_running_slots, device)
        pool = StatePool(shape.state_groups(config), parts, cached)
        buffers = shape.draft_buffers(config)
        if buffers is not None:
            pool.keep_drafts_in(buffers.storage(pool.live, config.max_requests, config.fold_len))
        return pool, kv_buffer
    except (RuntimeError, MemoryError) as error:
        raise CacheCapacityError(
            f"cannot allocate {config.cache_gb:.3g} GiB for KV blocks and states; lower --cache-gb"
        ) from error


def _attention_shape(
    shape: HybridModelShape, config: CacheConfig, capacity: CacheCapacity, device: torch.device | int
) -> AttentionShape:
    return AttentionShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.kv_channels,
        block_size=config.block_size_tokens,
        scale=shape.softmax_scale,
        dtype=shape.params_dtype,
        device=torch.device("cuda", device) if isinstance(device, int) else device,
        num_blocks=capacity.num_blocks,
        block_stride_bytes=capacity.slab.slab_bytes(shape.unit_bytes(config)) // capacity.slab.blocks_per_slab,
        has_fp8_kv=config.kv_cache_dtype == "fp8",
    )


def _step_buffers(
    config: CacheConfig, shape: HybridModelShape, max_blocks: int, device: torch.device | int, shares_steps: bool
) -> StepBuffers:
    max_requests = config.max_requests
    if config.num_cuda_graphs and config.most_graph_tokens:
        max_requests += most_padding_requests(max_requests, is_shared=shares_steps)
    limits = StepLimits(
        max_tokens=config.max_tokens,
        max_requests=max_requests,
        # At most two chunks of a request are short: the first, up to a multiple of the chunk size, and the last.
        max_chunks=config.max_tokens // shape.grain + 2 * max_requests,
        max_blocks=max_blocks,
        max_drafts=config.num_speculative_tokens,
        max_length=config.max_sequence_length,
        marks_real_tokens=shape.has_experts,
        has_quantized_weights=shape.has_quantized_weights,
        has_fp8_kv=config.kv_cache_dtype == "fp8",
        fold_len=config.fold_len,
        restores_states=config.quantizes_states,
        block_size=config.block_size_tokens,
    )
    with step_memory(config):
        return StepBuffers(limits, device)
