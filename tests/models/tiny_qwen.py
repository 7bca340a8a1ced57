"""Configurations of tiny Qwen3-Next and Qwen3.5 models: text-only, and in multimodal models."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig, Qwen3NextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

WHOLE_SUFFIX = "_whole"
"""Suffix of the families whose language model is part of a larger model."""

QWEN_CHUNK_SIZE = 64
"""Chunk size of the scan, which no configuration names."""

_KINDS = {"M": "linear_attention", "*": "full_attention"}
_OPTIONS: dict[str, Sequence[Any]] = {
    "layers": ["M*M", "*MM", "MM*", "M**M", "*M", "*M*", "MMM*", "M*"],
    # hidden size, attention heads, KV heads: as many, 2 to 1, 4 to 1, one for all
    "attention": [(32, 4, 4), (64, 4, 2), (48, 4, 1), (64, 8, 2), (32, 4, 2), (64, 8, 1), (48, 4, 4), (32, 8, 2)],
    "head_dim": [16, 32, 24],
    "rotary_percent": [0.25, 0.5, 1.0],
    # key heads, value heads, channels of a key, of a value
    "delta": [(2, 4, 8, 16), (4, 4, 16, 8), (1, 4, 16, 16), (2, 8, 32, 8), (4, 8, 8, 16), (2, 4, 16, 8), (2, 2, 8, 16)],
    "d_conv": [4, 3, 4, 2],
    "intermediate_size": [48, 64, 80],
    "vocab_size": [97, 101, 113, 127, 131, 128],
    "tied": [False, True],
    "eps": [1e-5, 1e-4, 1e-3],
    "rope_theta": [10_000.0, 500.0, 1e7],
    "max_shard_size": ["5GB", "20KB", "5GB"],
    # how the checkpoint is served
    "block_chunks": [1, 1, 2],
    "max_tokens": [37, 72, 100, 150],
    "align_prefill_chunks": [True, False],
}
_EXPERTS = {
    "experts": [(8, 2), (4, 3), (16, 5), (6, 1)],  # and how many a token chooses
    "shared_size": [40, 16],
}
_OF_QWEN3_NEXT = {
    "normalizes": [True, True, False],
    "dense_layers": [[], [], [0], [1]],
    "sparse_step": [1, 1, 1, 2],
}
QWEN_OPTIONS: dict[str, dict[str, Sequence[Any]]] = {
    "qwen3_next": _OPTIONS | _EXPERTS | _OF_QWEN3_NEXT,
    "qwen3_5": _OPTIONS,
    "qwen3_5_moe": _OPTIONS | _EXPERTS,
    "qwen3_5_whole": _OPTIONS,
    "qwen3_5_moe_whole": _OPTIONS | _EXPERTS,
}
"""Family → setting → its options."""

_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def qwen_config(family: str, settings: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a family of `QWEN_OPTIONS`."""
    has_experts = "experts" in settings
    text = _text_fields(settings) | (_expert_fields(settings) if has_experts else {})
    if family == "qwen3_next":
        dense = {"mlp_only_layers": settings["dense_layers"], "decoder_sparse_step": settings["sparse_step"]}
        return Qwen3NextConfig(**text, **dense, norm_topk_prob=settings["normalizes"])
    if not family.endswith(WHOLE_SUFFIX):
        return Qwen3_5MoeTextConfig(**text) if has_experts else Qwen3_5TextConfig(**text)
    text.pop("tie_word_embeddings")  # the larger model's counts
    vision = _VISION | {"out_hidden_size": text["hidden_size"]}
    whole = Qwen3_5MoeConfig if has_experts else Qwen3_5Config
    return whole(text_config=text, vision_config=vision, tie_word_embeddings=settings["tied"])


def _text_fields(settings: dict[str, Any]) -> dict[str, Any]:
    hidden_size, heads, kv_heads = settings["attention"]
    key_heads, value_heads, key_dim, value_dim = settings["delta"]
    return {
        "vocab_size": settings["vocab_size"],
        "hidden_size": hidden_size,
        "num_hidden_layers": len(settings["layers"]),
        "layer_types": [_KINDS[symbol] for symbol in settings["layers"]],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": settings["head_dim"],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": settings["d_conv"],
        "intermediate_size": settings["intermediate_size"],
        "rms_norm_eps": settings["eps"],
        "tie_word_embeddings": settings["tied"],
        "max_position_embeddings": 640,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": settings["rope_theta"],
            "partial_rotary_factor": settings["rotary_percent"],
        },
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,  # generation ends by length only
    }


def _expert_fields(settings: dict[str, Any]) -> dict[str, Any]:
    num_experts, top_k = settings["experts"]
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": settings["shared_size"],
    }
