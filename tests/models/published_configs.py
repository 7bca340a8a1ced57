"""Published configurations of models."""

from typing import Any

NEMOTRON_3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "chunk_size": 128,
    "conv_kernel": 4,
    "dtype": "bfloat16",
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "residual_in_fp32": False,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131_072,
}
"""Source: config.json of OpenResearcher/OpenResearcher-30B-A3B, trained from Nemotron 3 Nano 30B-A3B."""
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151_643,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "eos_token_id": 151_645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10_000_000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 151_936,
}
"""Fields and values of Qwen3-Next-80B-A3B, from transformers' documentation and training recipes."""
QWEN3_5_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248_044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248_320,
}


def qwen3_5(num_layers: int, tied: bool = False, **text: Any) -> dict[str, Any]:
    """Return the configuration of a Qwen3.5 model of these sizes, as part of a multimodal model."""
    kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(num_layers)]
    model_type = "qwen3_5_moe" if "num_experts" in text else "qwen3_5"
    fields = {"model_type": f"{model_type}_text", "num_hidden_layers": num_layers, "layer_types": kinds}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248_056,
        "model_type": model_type,
        "text_config": QWEN3_5_TEXT | fields | text,
        "tie_word_embeddings": tied,
        "vision_config": {"model_type": f"{model_type}_vision", "depth": 27, "hidden_size": 1152},
        "vision_start_token_id": 248_053,
    }


def experts(hidden_size: int, count: int, top_k: int) -> dict[str, int]:
    """Return the configuration fields of experts; the shared expert has the same hidden size as the others."""
    return {
        "moe_intermediate_size": hidden_size,
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "shared_expert_intermediate_size": hidden_size,
    }


def heads(attention: int, kv: int, value: int) -> dict[str, int]:
    return {"num_attention_heads": attention, "num_key_value_heads": kv, "linear_num_value_heads": value}


QWEN: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": QWEN3_NEXT,
    "Qwen3.5-0.8B": qwen3_5(24, tied=True, hidden_size=1024, intermediate_size=3584, **heads(8, 2, 16)),
    "Qwen3.5-4B": qwen3_5(32, tied=True, hidden_size=2560, intermediate_size=9216, **heads(16, 4, 32)),
    "Qwen3.5-9B": qwen3_5(32, hidden_size=4096, intermediate_size=12288, **heads(16, 4, 32)),
    "Qwen3.6-27B": qwen3_5(64, hidden_size=5120, intermediate_size=17408, **heads(24, 4, 48)),
    "Qwen3.6-35B-A3B": qwen3_5(40, hidden_size=2048, **heads(16, 2, 32), **experts(512, 256, 8)),
    "Qwen3.5-397B-A17B": qwen3_5(60, hidden_size=4096, **heads(32, 2, 64), **experts(1024, 512, 10)),
}
