"""Arguments for Megatron's own context, which `MambaCacheContext` extends, and what its engine sets of it."""

from collections.abc import Mapping
from typing import Any

from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaInferenceStateConfig
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.transformer import TransformerConfig

from ..config import CacheConfig
from ..recurrences.model_shape import HybridModelShape

_SUPPORTED: Mapping[str, Any] = {
    # Attention over the paged cache is computed by kernels that know none of these.
    "window_size": None,
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    # Megatron's forward asks a context of its own for what these need.
    "flash_decode": False,
    "fp8": None,
    "fp4": None,
    # It cuts a step, which has tokens of several requests, and adds a bias once for each part.
    "mlp_chunks_for_prefill": 1,
}


def check_settings(config: TransformerConfig) -> None:
    """Raise `ValueError` naming the setting if no model that is configured so can be served."""
    require_settings(config, _SUPPORTED)


def require_settings(config: TransformerConfig, supported: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless each of these settings has its one supported value."""
    for name, value in supported.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{name} is {found!r}; only {value!r} is supported")


SET_BY_MEGATRON = frozenset({"chunked_prefill_request_id", "has_explicit_chunked_prefill_req"})
"""Attributes of a context that Megatron's engine sets, and ours too; the context sets all others."""


def megatron_settings(config: CacheConfig, shape: HybridModelShape, *, only_last_logits: bool) -> dict[str, Any]:
    """Return the arguments of Megatron's dynamic context with which it allocates as little as possible."""
    layer_types = list(shape.layer_types)
    if Symbols.ATTENTION not in layer_types:  # Megatron requires one on every stage; it gets no memory
        layer_types.append(Symbols.ATTENTION)
    return {
        "params_dtype": shape.params_dtype,
        "num_layers": len(layer_types),
        "kv_channels": shape.kv_channels,
        "num_attention_heads": shape.num_kv_heads,
        "max_sequence_length": config.max_sequence_length,
        "buffer_size_gb": 0.0,  # Megatron's own allocator stays minimal: `CacheMemory` replaces it
        "max_requests": config.max_requests,
        "max_tokens": config.max_tokens,
        "block_size_tokens": config.block_size_tokens,
        "materialize_only_last_token_logits": only_last_logits,
        "request_metadata_types": [],  # requests keep what Megatron would track in device tensors
        "mamba_inference_state_config": MambaInferenceStateConfig(layer_types, (1, 1), (1, 1, 1)),
        "tensor_model_parallel_size": 1,  # the shape is this rank's own
        "pipeline_model_parallel_size": 1,
        "persist_cuda_graphs": config.resident_pools,
    }
