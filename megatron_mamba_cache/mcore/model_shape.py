"""What the cache has to know about a hybrid model, read off the model once."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols

from ..config import CacheConfig
from ..state.layout import StateLayout
from .mamba_mixer import CachingMambaMixer
from .self_attention import CachingSelfAttention
from .specs import check_layer_pattern


@dataclass(frozen=True, slots=True)
class HybridModelShape:
    """Sizes of a hybrid model on this rank, and a fingerprint of its architecture.

    Args:
        layer_types: One symbol a layer: M Mamba, * attention, - MLP, E mixture of experts.
        conv_dim, d_conv: Channels and taps of the causal convolution.
        ssm_shape: (heads, d_state, head_dim).
        num_heads, num_kv_heads: Query and key/value heads of the whole model.
        softmax_scale: Of attention scores.
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
    def of(model: Any) -> "HybridModelShape":
        """Read the shape of a MambaModel built from a spec of `with_mamba_cache`.

        Raises:
            ValueError: If it is no hybrid of Mamba and attention layers, or was built without the caching modules.
        """
        layer_types = tuple(model.decoder.layer_type_list)
        check_layer_pattern("".join(layer_types))
        mixer = _caching_mixer(model)
        config = model.config
        return HybridModelShape(
            layer_types=layer_types,
            conv_dim=mixer.conv1d.weight.shape[0],
            d_conv=mixer.d_conv,
            ssm_shape=(mixer.nheads_local_tp, mixer.d_state, mixer.headdim),
            ssm_chunk_size=mixer.chunk_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_query_groups,
            softmax_scale=config.softmax_scale or config.kv_channels**-0.5,
            kv_channels=config.kv_channels,
            vocab_size=model.vocab_size,
            params_dtype=config.params_dtype,
            fingerprint=_fingerprint(model),
        )

    @property
    def num_mamba_layers(self) -> int:
        """Mamba layers of this rank."""
        return self.layer_types.count(Symbols.MAMBA)

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


def _caching_mixer(model: Any) -> CachingMambaMixer:
    mixers = [module for module in model.modules() if isinstance(module, CachingMambaMixer)]
    attentions = [module for module in model.modules() if isinstance(module, CachingSelfAttention)]
    if not mixers or not attentions:
        raise ValueError(
            "the model was built without the caching modules; build it from with_mamba_cache(spec) instead of spec"
        )
    return mixers[0]


def _fingerprint(model: Any) -> str:
    described = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    config = model.config
    facts = (described, model.position_embedding_type, config.layernorm_epsilon, config.rotary_interleaved)
    return hashlib.sha256(repr(facts).encode()).hexdigest()
