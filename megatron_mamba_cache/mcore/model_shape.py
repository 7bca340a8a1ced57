"""What the cache needs to know about a hybrid model, read once from the model and its parts on other ranks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols

from ..config import CacheConfig
from ..state.layout import StateLayout
from .mamba_mixer import CachingMambaMixer
from .ranks import OneRank, Ranks, on_all_ranks
from .self_attention import CachingSelfAttention
from .specs import check_layer_pattern


@dataclass(frozen=True, slots=True)
class _MixerShape:
    """Sizes of the Mamba mixers on a rank, all of them alike."""

    conv_dim: int
    d_conv: int
    ssm_shape: tuple[int, int, int]
    ssm_chunk_size: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a model."""

    layer_types: tuple[str, ...]
    mixers: _MixerShape | None  # None: no Mamba layer here
    fingerprint: str


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

    @staticmethod
    def of(model: Any, ranks: Ranks | None = None) -> "HybridModelShape":
        """Read the shape of a MambaModel built from a spec of `with_mamba_cache`; all its ranks call it.

        Args:
            ranks: Ranks that hold the model; None if this one holds all of it.

        Raises:
            ValueError: If it is not a hybrid of Mamba and attention layers, was built without the caching modules, has
                KV heads that the ranks cannot share, or has different mixers on them.
        """
        ranks = ranks or OneRank()
        parts = ranks.gather(on_all_ranks(ranks, lambda: _part_of(model)))
        num_tensor_ranks = ranks.num_ranks // ranks.num_stages
        check_layer_pattern("".join(symbol for part in parts[::num_tensor_ranks] for symbol in part.layer_types))
        mixers = _agreed_mixers(parts)
        config = model.config
        if config.num_query_groups % num_tensor_ranks:
            raise ValueError(
                f"{config.num_query_groups} KV heads do not divide by {num_tensor_ranks} tensor-parallel ranks; choose "
                "a --tensor-model-parallel-size that divides them"
            )
        return HybridModelShape(
            layer_types=parts[ranks.index].layer_types,
            conv_dim=mixers.conv_dim,
            d_conv=mixers.d_conv,
            ssm_shape=mixers.ssm_shape,
            ssm_chunk_size=mixers.ssm_chunk_size,
            num_heads=config.num_attention_heads // num_tensor_ranks,
            num_kv_heads=config.num_query_groups // num_tensor_ranks,
            softmax_scale=config.softmax_scale or config.kv_channels**-0.5,
            kv_channels=config.kv_channels,
            vocab_size=model.vocab_size,
            params_dtype=config.params_dtype,
            fingerprint=_agreed_fingerprint(parts),
        )

    @property
    def num_mamba_layers(self) -> int:
        """Mamba layers of this rank."""
        return self.layer_types.count(Symbols.MAMBA)

    @property
    def num_attention_layers(self) -> int:
        """Attention layers of this rank."""
        return self.layer_types.count(Symbols.ATTENTION)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one KV block over all attention layers of this rank."""
        per_token = 2 * self.num_attention_layers * self.num_kv_heads * self.kv_channels
        return block_size * per_token * self.params_dtype.itemsize

    def state_layout(self, config: CacheConfig) -> StateLayout:
        """Return the layout of one state slot under the configured dtypes and number of drafts."""
        dtypes = {"model": self.params_dtype, "fp32": torch.float32, "bf16": torch.bfloat16}
        return StateLayout(
            num_layers=self.num_mamba_layers,
            conv_shape=(self.d_conv - 1 + config.num_speculative_tokens, self.conv_dim),
            ssm_shape=self.ssm_shape,
            conv_dtype=dtypes[config.conv_state_dtype],
            ssm_dtype=dtypes[config.ssm_state_dtype],
        )

    def check(self, config: CacheConfig) -> None:
        """Raise `ValueError` if the settings do not fit the model."""
        if config.prefix_caching and config.block_size_tokens % self.ssm_chunk_size:
            raise ValueError(
                f"block_size_tokens is {config.block_size_tokens}, which is no multiple of the model's SSM chunk of "
                f"{self.ssm_chunk_size}: set --inference-dynamic-batching-block-size to a multiple of it, or "
                "--no-prefix-caching"
            )


def _part_of(model: Any) -> _Part:
    layer_types = tuple(model.decoder.layer_type_list)
    found = {
        Symbols.MAMBA: [module for module in model.modules() if isinstance(module, CachingMambaMixer)],
        Symbols.ATTENTION: [module for module in model.modules() if isinstance(module, CachingSelfAttention)],
    }
    if any(not modules and symbol in layer_types for symbol, modules in found.items()):
        raise ValueError(
            "the model was built without the caching modules; build it from with_mamba_cache(spec) instead of spec"
        )
    return _Part(layer_types, _mixer_shape(found[Symbols.MAMBA]), _fingerprint(model))


def _mixer_shape(mixers: Sequence[Any]) -> _MixerShape | None:
    if not mixers:
        return None
    mixer = mixers[0]
    ssm_shape = mixer.nheads_local_tp, mixer.d_state, mixer.headdim
    return _MixerShape(mixer.conv1d.weight.shape[0], mixer.d_conv, ssm_shape, mixer.chunk_size)


def _agreed_mixers(parts: Sequence[_Part]) -> _MixerShape:
    """Return the sizes of the mixers, the same on all ranks that have any."""
    shapes = [part.mixers for part in parts if part.mixers is not None]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"the ranks' Mamba mixers differ: {sorted(set(map(repr, shapes)))}; build all parts of the model with the "
            "same sizes and SSM chunk"
        )
    return shapes[0]


def _agreed_fingerprint(parts: Sequence[_Part]) -> str:
    """Return one fingerprint for all parts; a single part keeps its own."""
    if len(parts) == 1:
        return parts[0].fingerprint
    return hashlib.sha256(repr([part.fingerprint for part in parts]).encode()).hexdigest()


def _fingerprint(model: Any) -> str:
    described = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    config = model.config
    facts = (described, model.position_embedding_type, config.layernorm_epsilon, config.rotary_interleaved)
    return hashlib.sha256(repr(facts).encode()).hexdigest()
