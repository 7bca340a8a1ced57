"""Configurations as they are published: the sizes that benchmarks call a model's are those of its checkpoints."""

from typing import Any

from megatron_mamba_cache.models.checkpoints.checkpoint_config import CheckpointConfig
from megatron_mamba_cache.models.families.nemotron_h import architecture_of

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


def test_nemotron_3_nano_is_read_as_published() -> None:
    found = architecture_of(CheckpointConfig(NEMOTRON_3_NANO, "config.json"))
    assert [found.pattern.count(symbol) for symbol in "ME*-"] == [23, 23, 6, 0]
    assert (found.hidden_size, found.max_sequence_length, found.mamba.num_heads) == (2688, 262_144, 64)
    experts = found.experts
    assert experts is not None and (experts.num_experts, experts.top_k, experts.hidden_size) == (128, 6, 1856)
    assert (experts.shared_hidden_size, experts.scaling, experts.latent_size) == (3712, 2.5, None)


def test_latent_experts_may_be_named_absent_and_layers_listed() -> None:
    listed = {"M": "mamba", "E": "moe", "*": "attention"}
    fields = NEMOTRON_3_NANO | {
        "moe_latent_size": None,
        "moe_shared_expert_overlap": True,
        "mtp_layers_block_type": ["moe"],
    }
    pattern = fields.pop("hybrid_override_pattern")
    fields["layers_block_type"] = [listed[symbol] for symbol in pattern]
    found = architecture_of(CheckpointConfig(fields, "config.json"))
    assert found == architecture_of(CheckpointConfig(NEMOTRON_3_NANO, "config.json"))
