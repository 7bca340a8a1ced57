"""The sizes of a hybrid model that the cache depends on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ..config import CacheConfig
from .layout import RoundedLayout, SlotLayout, StateLayout
from .mamba2.replay_rings import RingLayout
from .mamba2.replay_rows import least_capacity, least_x_capacity
from .mamba2.replay_tiling import replays_fast
from .slab_shape import SlabShape, UnitBytes

MAMBA, ATTENTION, EXPERTS = "M", "*", "E"
"""Symbols of layer types, as in Megatron's hybrid patterns."""
_MOST_IN_WINDOWS = 2
"""Requests up to which windows of states take no longer than replayed ones without drafts; see `step_cost.md`."""
_MOST_DRAFT_BYTES = 8 * 2**20
"""Of a layer's states after drafts, up to which windows take no longer either; see `draft_chances.md`."""
_LAUNCHED_PRODUCTS = 270_000_000_000
"""Products of a token and a weight that take a GPU as long as the host takes to launch a layer without graphs, which is
1.2 ms at 450 TFLOP/s (measured on one rank: 1.1 to 2 ms; see `model_forms.md`)."""


@dataclass(frozen=True, slots=True)
class HybridModelShape:
    """Sizes of a hybrid model on this rank, and a fingerprint of the whole model's architecture.

    Args:
        layer_types: One symbol a layer of this rank: M Mamba, * attention, - MLP, E mixture of experts.
        conv_dim, d_conv: Channels and taps of the causal convolution.
        ssm_shape: (heads, d_state, head_dim).
        ssm_chunk_size: That of the whole model, even if this rank has no Mamba layer.
        num_heads, num_kv_heads: Query and key/value heads.
        softmax_scale: Factor on attention scores.
        fingerprint: The same on all ranks.
        layer_weights: Weights that a layer multiplies a token with, on a rank: the mean of the whole model's layers; 0
            if they are not known.
        waits_for_experts: True if the host waits inside a step for what experts a rank's tokens choose.
    """

    layer_types: tuple[str, ...]
    conv_dim: int
    d_conv: int
    ssm_shape: tuple[int, int, int]
    ssm_chunk_size: int
    num_heads: int
    num_kv_heads: int
    softmax_scale: float
    kv_channels: int
    vocab_size: int
    params_dtype: torch.dtype
    fingerprint: str
    layer_weights: int = 0
    waits_for_experts: bool = False

    @property
    def has_experts(self) -> bool:
        """True if this rank has a mixture of experts."""
        return EXPERTS in self.layer_types

    @property
    def num_mamba_layers(self) -> int:
        """Mamba layers of this rank."""
        return self.layer_types.count(MAMBA)

    @property
    def num_attention_layers(self) -> int:
        """Attention layers of this rank."""
        return self.layer_types.count(ATTENTION)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one KV block over all attention layers of this rank."""
        per_token = 2 * self.num_attention_layers * self.num_kv_heads * self.kv_channels
        return block_size * per_token * self.params_dtype.itemsize

    def state_layout(self, config: CacheConfig) -> StateLayout:
        """Return the layout of a live state's slot under the configured dtypes and number of drafts.

        Conv inputs of drafts lie in the slot where the states after them have slots, and else beside the ring.
        """
        return StateLayout(
            num_layers=self.num_mamba_layers,
            conv_shape=(self.d_conv - 1 + config.num_draft_slots, self.conv_dim),
            ssm_shape=self.ssm_shape,
            conv_dtype=self._dtype(config.conv_state_dtype),
            ssm_dtype=self._dtype(config.ssm_state_dtype),
        )

    def _dtype(self, name: str) -> torch.dtype:
        return {"model": self.params_dtype, "fp32": torch.float32, "bf16": torch.bfloat16}[name]

    def cached_layout(self, config: CacheConfig) -> SlotLayout:
        """Return the layout of a cached state's slot: that of a live one, unless cached states are rounded."""
        live = self.state_layout(config)
        if not config.rounds_states:
            return live
        return RoundedLayout(live.num_layers, (self.d_conv - 1, self.conv_dim), self.ssm_shape, live.conv_dtype)

    def running_bytes(self, config: CacheConfig) -> int:
        """Return the bytes of all requests' live and draft states, where they have places of their own, else 0."""
        return config.num_running_slots * self.state_layout(config).slot_bytes if config.rounds_states else 0

    def ring_layout(self, config: CacheConfig) -> RingLayout:
        """Return the layout of the ring of a request whose states are replayed."""
        heads, d_state, head_dim = self.ssm_shape
        ring_len, max_tokens = config.ring_len or 0, 1 + config.num_speculative_tokens
        return RingLayout(
            num_layers=self.num_mamba_layers,
            capacity=least_capacity(ring_len, max_tokens),
            x_capacity=least_x_capacity(ring_len, max_tokens),
            heads=heads,
            head_dim=head_dim,
            groups=(self.conv_dim - heads * head_dim) // (2 * d_state),
            d_state=d_state,
            dtype=self.params_dtype,
            conv_dim=self.conv_dim,
            conv_dtype=self.state_layout(config).conv_dtype,
            num_drafts=config.num_speculative_tokens,
        )

    def rounding_len(self, config: CacheConfig) -> int | None:
        """Return after how many tokens a replayed state is stored less exactly than it is computed; None if never."""
        is_rounded = config.replays and self.state_layout(config).ssm_dtype.itemsize < torch.float32.itemsize
        return config.ring_len if is_rounded else None

    def rings_bytes(self, config: CacheConfig) -> int:
        """Return the bytes of the rings of all requests; 0 if states are not replayed."""
        return config.max_requests * self.ring_layout(config).ring_bytes if config.replays else 0

    def unit_bytes(self, config: CacheConfig) -> UnitBytes:
        """Return what this rank stores of a cached state and of a KV block."""
        token_row = (
            self.num_kv_heads * self.kv_channels * self.params_dtype.itemsize if self.num_attention_layers else 0
        )
        live = self.state_layout(config)
        are_live = live.num_layers and not config.rounds_states
        state_row = live.ssm_shape[-1] * live.ssm_dtype.itemsize if are_live else 1
        cached_bytes = self.cached_layout(config).aligned_bytes
        return UnitBytes(cached_bytes, self.block_bytes(config.block_size_tokens), token_row, state_row)

    def resolved(
        self, config: CacheConfig, gather: Callable[[UnitBytes], Sequence[UnitBytes]] = lambda unit: [unit]
    ) -> CacheConfig:
        """Return the settings with `draft_states` and `cuda_graph_prefill_tokens` decided, by the model's sizes.

        Replayed states take less time for more than a request or two, and where drafts have large states. Rings are
        reserved for `max_requests`, which are no more than one budget has room for, and leave room for one request of
        the longest sequence.

        Args:
            gather: Returns the `unit_bytes` of all ranks of the model, given those of this one, which has all of it
                without. Called once.
        """
        config = self.with_forms(config)
        slab = SlabShape.fitting(gather(self.unit_bytes(config)))
        if not self.limits_requests(config):
            return config
        budget, of_ring = int((config.cache_gb or 0.0) * 2**30), self.ring_layout(config).ring_bytes
        fitting = budget // max(self.request_bytes(config), 1)
        beside_longest = (budget - self.longest_bytes(config, slab)) // of_ring if of_ring else fitting
        return replace(config, max_requests=max(1, min(config.max_requests, fitting, beside_longest)))

    def with_forms(self, config: CacheConfig) -> CacheConfig:
        """Return the settings with `draft_states` and `cuda_graph_prefill_tokens` decided."""
        state_bytes = prod(self.ssm_shape) * self._dtype(config.ssm_state_dtype).itemsize
        draft_bytes = config.max_requests * config.num_speculative_tokens * state_bytes
        is_larger = config.max_requests > _MOST_IN_WINDOWS or draft_bytes > _MOST_DRAFT_BYTES
        _, d_state, head_dim = self.ssm_shape
        prefers_replay = is_larger and replays_fast(head_dim, d_state)
        launched = self.most_launched or 0
        return config.resolved(prefers_replay=prefers_replay, most_launched=launched // 1024 * 1024)

    @property
    def most_launched(self) -> int | None:
        """Tokens of a step up to which the host launches longer than a GPU computes; None if that is not known."""
        return _LAUNCHED_PRODUCTS // self.layer_weights if self.layer_weights else None

    @staticmethod
    def limits_requests(config: CacheConfig) -> bool:
        """Return whether one budget limits `max_requests`: where it pays for their rings and live states."""
        return config.cache_gb is not None and config.replays and not config.rounds_states

    def request_bytes(self, config: CacheConfig) -> int:
        """Return the least bytes of a running request whose states are replayed: of a state, a KV block and a ring."""
        unit = self.unit_bytes(config)
        return unit.state + unit.block + self.ring_layout(config).ring_bytes

    def longest_bytes(self, config: CacheConfig, slab: SlabShape) -> int:
        """Return the bytes that one request of the longest sequence needs of one budget in slabs, besides its ring."""
        unit = self.unit_bytes(config)
        num_blocks = -(-config.max_sequence_length // config.block_size_tokens)
        return slab.slabs_of_request(num_blocks, config.num_request_slots) * slab.slab_bytes(unit) + unit.block

    def check(self, config: CacheConfig) -> None:
        """Raise `ValueError` if the settings do not fit the model."""
        if config.prefix_caching and config.block_size_tokens % self.ssm_chunk_size:
            raise ValueError(
                f"block_size_tokens is {config.block_size_tokens}, which is not a multiple of the model's SSM chunk of "
                f"{self.ssm_chunk_size}: set --inference-dynamic-batching-block-size to a multiple of it, or "
                "--no-prefix-caching"
            )
