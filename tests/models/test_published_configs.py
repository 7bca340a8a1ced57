"""Configurations as they are published: the sizes that benchmarks call a model's are those of its checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.models.architecture import GatedDeltaSizes, HybridArchitecture, MambaSizes
from megatron_mamba_cache.models.checkpoints.checkpoint_config import CheckpointConfig
from megatron_mamba_cache.models.checkpoints.hugging_face import read_sizes
from megatron_mamba_cache.models.families.nemotron_h import architecture_of
from megatron_mamba_cache.models.parameter_shapes import parameters_of
from megatron_mamba_cache.models.part_shape import part_shape

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
    assert isinstance(found.recurrent, MambaSizes)
    assert (found.hidden_size, found.max_sequence_length, found.recurrent.num_heads) == (2688, 262_144, 64)
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
"""Fields and values of Qwen3-Next-80B-A3B, as transformers' documentation and training recipes give them."""
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
    """Return the configuration of a Qwen3.5 model of these sizes, part of a model that sees images."""
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
    """Return the fields of experts of which the shared one has the size of the others."""
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
WEIGHTS = {
    "Qwen3-Next-80B-A3B": 79.7,
    "Qwen3.5-0.8B": 0.75,
    "Qwen3.5-4B": 4.2,
    "Qwen3.5-9B": 9.0,
    "Qwen3.6-27B": 26.9,
    "Qwen3.6-35B-A3B": 34.7,
    "Qwen3.5-397B-A17B": 396.3,
}
"""Billions of them, without those for images and for multi-token prediction."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def documented() -> dict[str, list[str]]:
    """Return the cells of the page's table of sizes by model."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| Qwen")]
    return {name: cells for names, *cells in rows if len(cells) == 5 for name in names.split(", ")}


@pytest.fixture(params=QWEN)
def qwen(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, HybridArchitecture]:
    """Read a directory with a published configuration."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN[request.param]))
    architecture, dtype = read_sizes(tmp_path)
    assert dtype is torch.bfloat16
    return request.param, architecture


def test_layers_of_qwen_models_are_read_as_published(qwen: tuple[str, HybridArchitecture]) -> None:
    name, found = qwen
    feed_forward = "E" if found.experts else "-"
    assert set(found.pattern[1::2]) == {feed_forward}
    assert found.pattern[::2] == "MMM*" * (len(found.pattern) // 8)
    assert found.tie_embeddings is (name in ("Qwen3.5-0.8B", "Qwen3.5-4B")) and found.zero_centered_norms
    assert isinstance(found.recurrent, GatedDeltaSizes) and found.recurrent.key_head_dim == 128
    attention = found.attention
    assert (attention.head_dim, attention.rotary_base, attention.rotary_percent) == (256, 1e7, 0.25)
    assert attention.has_output_gate and attention.has_head_norms
    weights = sum(math.prod(parameter.shape) for parameter in parameters_of(found).values())
    assert weights / 1e9 == pytest.approx(WEIGHTS[name], rel=0.01)


def test_qwen_models_store_what_is_documented(qwen: tuple[str, HybridArchitecture]) -> None:
    name, found = qwen
    shape = part_shape(found, torch.bfloat16)
    live, quantized = (
        shape.cached_layout(CacheConfig(cached_state_dtype=dtype).resolved()).slot_bytes for dtype in ("live", "int8")
    )
    assert documented()[name] == [
        f"{found.pattern.count('M')} + {found.pattern.count('*')}",
        f"{live / 2**20:.1f}",
        f"{quantized / 2**20:.1f}",
        f"{shape.block_bytes(1):,}",
        f"{10 * 2**30 // live}",
    ]
