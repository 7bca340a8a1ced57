"""Dimensions of a hybrid model, from which cache sizes and settings are derived."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import CacheConfig
from ..kernels.attention.kv_values import FP8, UNSCALED, KVScales
from .cached_form import CACHED_FORMS
from .hidden_states import hidden_state_group
from .interface import BufferLayout, Recurrence, ReplayedRecurrence, StateDtypes, StateGroup
from .layout import ROUTE_DTYPE, SlotLayout
from .slab_shape import SlabShape, UnitBytes

RECURRENT, ATTENTION, EXPERTS = "M", "*", "E"
"""Symbols for layer types in Megatron's hybrid patterns."""
_MOST_IN_WINDOWS = 2
"""Maximum number of requests for which draft states in slots are as fast as replay; see `step_cost.md`."""
_MOST_DRAFT_BYTES = 8 * 2**20
"""Maximum size of a layer's draft states, in bytes, for which slots are as fast as replay; see `speculation.md`."""
_LAUNCHED_MACS = 270_000_000_000
"""Number of multiply-adds per layer that take the GPU as long as an eager launch takes the host: 1.2 ms at 450 TFLOP/s.

Launch times measured on one rank are 1.1 to 2 ms; see `mixed_steps.md`."""


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """Layers with the same recurrence and dimensions; `layers` are indices among the recurrent layers on this rank."""

    recurrence: Recurrence
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HybridModelShape:
    """Dimensions of a hybrid model on this rank, and a fingerprint of its whole architecture.

    Args:
        layer_types: One symbol per layer on this rank: M recurrent, * attention, - MLP, E mixture of experts.
        head_types: One symbol per layer of the multi-token prediction head; empty without one. The keys and values of
            its attention layers follow those of the model in each KV block.
        hidden_size: Size of the hidden states that the head reads; 0 without a head.
        experts_per_token: Number of experts that a layer routes each token to; 0 without MoE layers.
        recurrent: The recurrences of the whole model, including those without a layer on this rank.
        num_heads, num_kv_heads: Number of query heads and of KV heads.
        softmax_scale: Factor for attention scores.
        fingerprint: Hash of the architecture; equal on all ranks.
        layer_weights: Average number of weights that a token uses per layer on this rank; 0: unknown.
        waits_for_experts: True if the host waits for the routing result within a step.
        kv_scales: Scales of FP8 keys and values, one entry per attention layer on this rank, those of the head last;
            empty: all are 1.0.
        has_quantized_weights: True if some rank has weights that stay quantized.
    """

    layer_types: tuple[str, ...]
    recurrent: tuple[RecurrentLayers, ...]
    num_heads: int
    num_kv_heads: int
    softmax_scale: float
    kv_channels: int
    vocab_size: int
    params_dtype: torch.dtype
    fingerprint: str
    layer_weights: int = 0
    waits_for_experts: bool = False
    kv_scales: tuple[KVScales, ...] = ()
    has_quantized_weights: bool = False
    head_types: tuple[str, ...] = ()
    hidden_size: int = 0
    experts_per_token: int = 0

    @property
    def has_experts(self) -> bool:
        """True if this rank has MoE layers."""
        return EXPERTS in self.layer_types

    @property
    def num_expert_layers(self) -> int:
        """Number of MoE layers on this rank, without those of the head."""
        return self.layer_types.count(EXPERTS)

    @property
    def num_recurrent_layers(self) -> int:
        """Number of recurrent layers on this rank."""
        return self.layer_types.count(RECURRENT)

    @property
    def grain(self) -> int:
        """Least common multiple of the recurrences' chunk sizes; the block size must be a multiple of it."""
        return math.lcm(*(layers.recurrence.grain for layers in self.recurrent))

    @property
    def num_attention_layers(self) -> int:
        """Number of attention layers on this rank, including those of the head."""
        return self.layer_types.count(ATTENTION) + self.head_types.count(ATTENTION)

    def kv_dtype(self, kv_cache_dtype: str) -> torch.dtype:
        """Return the dtype of cached keys and values for a value of `CacheConfig.kv_cache_dtype`."""
        return FP8 if kv_cache_dtype == "fp8" else self.params_dtype

    def scales_of(self, layer: int) -> KVScales:
        """Return the scales of FP8 keys and values for an attention layer on this rank, numbered from 0."""
        return self.kv_scales[layer] if self.kv_scales else UNSCALED

    def cache_fingerprint(self, config: CacheConfig) -> str:
        """Return the part of every cache key that identifies the model and the contents of its KV blocks."""
        kv = () if config.kv_cache_dtype == "auto" else (config.kv_cache_dtype,)
        return " ".join((self.fingerprint, *kv, *(("routes",) if config.record_routes else ())))

    def block_bytes(self, block_size: int, kv_cache_dtype: str = "auto") -> int:
        """Return the size in bytes of one block's keys and values over all attention layers on this rank."""
        per_token = 2 * self.num_attention_layers * self.num_kv_heads * self.kv_channels
        return block_size * per_token * self.kv_dtype(kv_cache_dtype).itemsize

    def route_bytes(self, config: CacheConfig) -> int:
        """Return the size in bytes of a token's recorded experts over all MoE layers on this rank."""
        return self.num_expert_layers * self.experts_per_token * ROUTE_DTYPE.itemsize if config.record_routes else 0

    def scan_bytes(self, num_tokens: int, num_requests: int) -> int:
        """Return the maximum scratch memory in bytes for one layer's prefill scan; excludes memory needed per token.

        This assumes that only the last chunk of a request is short, and that only one request per step starts within a
        chunk.
        """
        num_chunks = min(num_tokens // self.grain + num_requests + 1, num_tokens)
        used = (layers.recurrence for layers in self.recurrent if layers.layers)
        return num_chunks * max((recurrence.chunk_bytes(self.params_dtype) for recurrence in used), default=0)

    def state_groups(self, config: CacheConfig) -> tuple[StateGroup, ...]:
        """Return the groups of recurrent layers and their state tensors in the configured dtypes.

        With a head, a last group holds the hidden state of the last token.
        """
        dtypes = self._dtypes(config)
        groups = tuple(StateGroup(layers.layers, layers.recurrence.tensors(dtypes)) for layers in self.recurrent)
        if not self.head_types:
            return groups
        return *groups, hidden_state_group(self.hidden_size, self.params_dtype, config.num_speculative_tokens)

    def state_layout(self, config: CacheConfig) -> SlotLayout:
        """Return the layout of a live slot; if draft states are in slots, conv windows have space for draft inputs."""
        return SlotLayout.of(self.state_groups(config), config.num_draft_slots)

    def cached_layout(self, config: CacheConfig) -> SlotLayout:
        """Return the layout of a slot for a cached state; it equals that of a live slot unless states are quantized."""
        form = CACHED_FORMS[config.cached_state_dtype if config.quantizes_states else "live"]
        return form.layout(self.state_groups(config), self.state_layout(config))

    def _dtypes(self, config: CacheConfig) -> StateDtypes:
        named = {"model": self.params_dtype, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return StateDtypes(self.params_dtype, named[config.conv_state_dtype], named[config.ssm_state_dtype])

    def running_bytes(self, config: CacheConfig) -> int:
        """Return the size in bytes of live and draft states if they are separate from cached states, else 0."""
        return config.num_running_slots * self.state_layout(config).slot_bytes if config.quantizes_states else 0

    def draft_buffers(self, config: CacheConfig) -> BufferLayout | None:
        """Return the layout of a request's replay buffer; None without replay.

        Raises:
            ValueError: If replay is configured, but the model does not support it.
        """
        if not config.replays:
            return None
        recurrence = self._replayed
        if recurrence is None:
            names = ", ".join(layers.recurrence.name for layers in self.recurrent)
            raise ValueError(
                f"draft_states 'replay' is not supported for models with {names} layers; set --draft-states window"
            )
        dtypes, num_drafts = self._dtypes(config), config.num_speculative_tokens
        return recurrence.buffers(self.num_recurrent_layers, dtypes, config.fold_len, num_drafts)

    @property
    def _replayed(self) -> ReplayedRecurrence | None:
        """The model's only recurrence if it supports replay, else None."""
        recurrence = self.recurrent[0].recurrence
        return recurrence if len(self.recurrent) == 1 and isinstance(recurrence, ReplayedRecurrence) else None

    def request_buffer_bytes(self, config: CacheConfig) -> int:
        """Return the size in bytes of a running request's replay buffer; 0 without replay."""
        buffers = self.draft_buffers(config)
        return 0 if buffers is None else buffers.num_bytes

    def rounds_at_boundaries(self, config: CacheConfig) -> bool:
        """Return True if prefill rounds states at each block boundary, whether a chunk ends there or not: in fp16."""
        return self._dtypes(config).whole is torch.float16

    def rounding_len(self, config: CacheConfig) -> int | None:
        """Return the number of tokens after which a step must end to round a replayed state; None if no step must."""
        is_inexact = config.replays and self._dtypes(config).whole.itemsize < torch.float32.itemsize
        recurrence = self._replayed
        return config.fold_len if is_inexact and not (recurrence and recurrence.folds_within_steps) else None

    def buffers_bytes(self, config: CacheConfig) -> int:
        """Return the total size in bytes of the replay buffers of all requests; 0 without replay."""
        return config.max_requests * self.request_buffer_bytes(config)

    def unit_bytes(self, config: CacheConfig) -> UnitBytes:
        """Return the sizes in bytes of a cached state and of a KV block on this rank."""
        itemsize = self.kv_dtype(config.kv_cache_dtype).itemsize
        token_row = self.num_kv_heads * self.kv_channels * itemsize if self.num_attention_layers else 0
        state_row = 1 if config.quantizes_states else _row_bytes(self.state_groups(config))
        cached_bytes = self.cached_layout(config).aligned_bytes
        block_bytes = self.block_bytes(config.block_size_tokens, config.kv_cache_dtype)
        block_bytes += config.block_size_tokens * self.route_bytes(config)
        return UnitBytes(cached_bytes, block_bytes, token_row, state_row)

    def resolved(
        self, config: CacheConfig, gather: Callable[[UnitBytes], Sequence[UnitBytes]] = lambda unit: [unit]
    ) -> CacheConfig:
        """Return `config` with automatic `draft_states`, `cuda_graph_prefill_tokens` and `max_requests` resolved.

        Replay is chosen for more than two requests or large draft states, where it is faster. Each request needs a
        replay buffer, so `max_requests` is lowered until one request of the maximum sequence length also fits in the
        budget.

        Args:
            gather: Function that takes this rank's `unit_bytes` and returns those of all ranks; it is called once.
        """
        config = self.with_forms(config)
        slab = SlabShape.fitting(gather(self.unit_bytes(config)))
        if not self.limits_requests(config):
            return config
        budget, of_buffer = config.budget_bytes, self.request_buffer_bytes(config)
        fitting = budget // max(self.request_bytes(config), 1)
        after_longest = (budget - self.longest_bytes(config, slab)) // of_buffer if of_buffer else fitting
        return replace(config, max_requests=max(1, min(config.max_requests, fitting, after_longest)))

    def with_forms(self, config: CacheConfig) -> CacheConfig:
        """Return `config` with automatic `draft_states` and `cuda_graph_prefill_tokens` resolved."""
        tensors = [tensor for group in self.state_groups(config) for tensor in group.tensors]
        state_bytes = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors if tensor.is_matrix)
        draft_bytes = config.max_requests * config.num_speculative_tokens * state_bytes
        is_larger = config.max_requests > _MOST_IN_WINDOWS or draft_bytes > _MOST_DRAFT_BYTES
        replayed = self._replayed
        prefers_replay = is_larger and replayed is not None and replayed.replays_fast
        launched = self.most_launched or 0
        return config.resolved(prefers_replay=prefers_replay, most_launched=launched // 1024 * 1024)

    @property
    def most_launched(self) -> int | None:
        """Maximum number of tokens in a step for which eager launches take longer than the GPU work; None: unknown."""
        return _LAUNCHED_MACS // self.layer_weights if self.layer_weights else None

    @staticmethod
    def limits_requests(config: CacheConfig) -> bool:
        """Return True if replay buffers and live states are part of the budget, which then limits `max_requests`."""
        return config.replays and not config.quantizes_states

    def request_bytes(self, config: CacheConfig) -> int:
        """Return the minimum memory in bytes for a running request: a state, a KV block and a replay buffer."""
        unit = self.unit_bytes(config)
        return unit.state + unit.block + self.request_buffer_bytes(config)

    def longest_bytes(self, config: CacheConfig, slab: SlabShape) -> int:
        """Return the memory in bytes for one request of the maximum sequence length, without its replay buffer."""
        unit = self.unit_bytes(config)
        num_blocks = -(-config.max_sequence_length // config.block_size_tokens)
        return slab.slabs_of_request(num_blocks, config.num_request_slots) * slab.slab_bytes(unit) + unit.block

    def check(self, config: CacheConfig) -> None:
        """Raise a `ValueError` if the block size does not fit the model's chunk size, or routes cannot be recorded."""
        if config.record_routes and (not self.has_experts or self.waits_for_experts):
            found = "layers of Megatron's own MoELayer" if self.waits_for_experts else "no MoE layers"
            raise ValueError(
                f"record_routes is True, but the model has {found}; leave --record-routes out, or use a model with MoE "
                "layers of local_hybrid_spec"
            )
        if config.prefix_caching and config.block_size_tokens % self.grain:
            raise ValueError(
                f"block_size_tokens must be a multiple of the recurrence's chunk size {self.grain}, found "
                f"{config.block_size_tokens}; set --inference-dynamic-batching-block-size to a multiple of it, or "
                "--no-prefix-caching"
            )


def kv_heads_of_rank(num_kv_heads: int, num_tensor_ranks: int) -> int:
    """Return the number of KV heads per rank; with more ranks than heads, each rank has a copy of one head.

    Raises:
        ValueError: If neither number divides the other.
    """
    if num_kv_heads % num_tensor_ranks and num_tensor_ranks % num_kv_heads:
        raise ValueError(
            f"number of KV heads {num_kv_heads} is not divisible by {num_tensor_ranks} tensor-parallel ranks, nor is "
            f"{num_tensor_ranks} a multiple of {num_kv_heads}; set --tensor-model-parallel-size to a divisor or "
            f"multiple of {num_kv_heads}"
        )
    return max(1, num_kv_heads // num_tensor_ranks)


def _row_bytes(groups: Sequence[StateGroup]) -> int:
    """Return the least common multiple of the sizes in bytes of a row in the matrix states."""
    rows = (
        tensor.shape[-1] * tensor.dtype.itemsize
        for group in groups
        for tensor in group.tensors
        if tensor.is_matrix and group.layers
    )
    return math.lcm(*rows)
