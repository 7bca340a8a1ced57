"""Dimensions of the models in the benchmarks, as configuration fields; the default family is NemotronH."""

from typing import Any

_MAMBA_OF_ONE_GROUP = {
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
}
_GRANITE = _MAMBA_OF_ONE_GROUP | {
    "model_type": "granitemoehybrid",
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "vocab_size": 100_352,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
}
_QWEN = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
_QWEN_EXPERTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

MODEL_FIELDS: dict[str, dict[str, Any]] = {
    "8b": {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "hidden_size": 4096,
        "vocab_size": 131_072,
        "intermediate_size": 21_504,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "chunk_size": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "nano3": {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688,
        "vocab_size": 131_072,
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "chunk_size": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
    },
    "super": {
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEME",
        "hidden_size": 4096,
        "vocab_size": 131_072,
        "intermediate_size": 2688,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "chunk_size": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
        "routed_scaling_factor": 5.0,
    },
    "granite-small": _GRANITE
    | {
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "mamba_n_heads": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "logits_scaling": 16,
    },
    "granite-tiny": _GRANITE
    | {
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "logits_scaling": 6,
    },
    "bamba": _MAMBA_OF_ONE_GROUP
    | {
        "model_type": "bamba",
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "hidden_size": 4096,
        "vocab_size": 128_256,
        "intermediate_size": 14_336,
        "mamba_n_heads": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen36-27b": _QWEN
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "vocab_size": 248_320,
        "intermediate_size": 17_408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen36-35b": _QWEN
    | _QWEN_EXPERTS
    | {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "vocab_size": 248_320,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "qwen3-next": _QWEN
    | _QWEN_EXPERTS
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 24,
        "vocab_size": 151_936,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "small": {
        "hybrid_override_pattern": "M-M*-M-M*-",
        "hidden_size": 1024,
        "vocab_size": 32_768,
        "intermediate_size": 4096,
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "chunk_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "tiny": {
        "hybrid_override_pattern": "M-M*-M-",
        "hidden_size": 64,
        "vocab_size": 512,
        "intermediate_size": 128,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""Nano3 has the sizes of NVIDIA-Nemotron-3-Nano-30B-A3B and of Nemotron 3.5 Lightning; super those of
NVIDIA-Nemotron-3-Super-120B-A12B and a quarter of its layers, which fit on one card; granite-small and -tiny those of
granite-4.0-h-small (32B-A9B) and -tiny (7B-A1B); bamba those of Bamba-9B-v2; qwen36-27b and -35b those of Qwen3.6-27B
and -35B-A3B, without images; qwen3-next those of Qwen3-Next-80B-A3B and half of its layers, which fit on one card."""
