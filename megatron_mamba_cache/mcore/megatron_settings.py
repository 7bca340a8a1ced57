"""Check Megatron's configuration, and build the constructor arguments of its dynamic context."""

from collections.abc import Mapping
from typing import Any

from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaInferenceStateConfig
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.transformer import TransformerConfig

from ..config import CacheConfig
from ..recurrences.model_shape import HybridModelShape

_SUPPORTED: Mapping[str, Any] = {
    # The paged attention kernels support none of these settings.
    "window_size": None,
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    # Megatron's forward pass supports these only with Megatron's own context.
    "flash_decode": False,
    "fp8": None,
    "fp4": None,
    # This setting splits a step, which contains tokens of several requests, and adds a bias once per part.
    "mlp_chunks_for_prefill": 1,
}


def check_settings(config: TransformerConfig) -> None:
    """Raise `ValueError` if a setting has a value that is not supported; the message names the setting."""
    require_settings(config, _SUPPORTED)


def require_settings(config: TransformerConfig, supported: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless each setting in `supported` has the value given there."""
    for name, value in supported.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{name} is {found!r}; only {value!r} is supported")


SET_BY_MEGATRON = frozenset({"chunked_prefill_request_id", "has_explicit_chunked_prefill_req"})
"""Attributes of a context that Megatron's engine and ours set; the context itself sets all others."""


def megatron_settings(config: CacheConfig, shape: HybridModelShape, *, only_last_logits: bool) -> dict[str, Any]:
    """Return constructor arguments with which Megatron's dynamic context allocates as little memory as possible."""
    layer_types = list(shape.layer_types)
    if Symbols.ATTENTION not in layer_types:  # Megatron requires an attention layer on every stage; it gets no memory
        layer_types.append(Symbols.ATTENTION)
    return {
        "params_dtype": shape.params_dtype,
        "num_layers": len(layer_types),
        "kv_channels": shape.kv_channels,
        "num_attention_heads": shape.num_kv_heads,
        "max_sequence_length": config.max_sequence_length,
        "buffer_size_gb": 0.0,  # `CacheMemory` replaces Megatron's allocator
        "max_requests": config.max_requests,
        "max_tokens": config.max_tokens,
        "block_size_tokens": config.block_size_tokens,
        "materialize_only_last_token_logits": only_last_logits,
        "request_metadata_types": [],  # requests keep these values, which Megatron would keep in device tensors
        "mamba_inference_state_config": MambaInferenceStateConfig(layer_types, (1, 1), (1, 1, 1)),
        "tensor_model_parallel_size": 1,  # the shape describes this rank only
        "pipeline_model_parallel_size": 1,
        "persist_cuda_graphs": config.resident_pools,
    }
