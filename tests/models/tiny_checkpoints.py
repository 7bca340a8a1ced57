"""Tiny random checkpoints of each hybrid family with fixed seeds, written by transformers.

Draws are balanced: a setting takes each of its options about equally often, in an order of its own. Some are taken once
more with an SSM chunk as large as real models have it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BambaConfig,
    GraniteMoeHybridConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.models.spread_weights import spread_weights
from tests.models.tiny_qwen import QWEN_CHUNK_SIZE, QWEN_OPTIONS, WHOLE_SUFFIX, qwen_config

MAMBA_FAMILIES = ("nemotron_h", "nemotron_h_moe", "bamba", "granite", "granite_moe")
FAMILIES = (*MAMBA_FAMILIES, *(family for family in QWEN_OPTIONS if not family.endswith(WHOLE_SUFFIX)))
"""Families whose configuration is flat."""
CASES_PER_FAMILY = {
    **{"nemotron_h": 8, "nemotron_h_moe": 8, "bamba": 16, "granite": 8, "granite_moe": 8},
    **{family: 4 if family.endswith(WHOLE_SUFFIX) else 8 for family in QWEN_OPTIONS},
}
CASE_NAMES = [f"{family}-{index}" for family, count in CASES_PER_FAMILY.items() for index in range(count)]
LARGE_CHUNKS = {
    "nemotron_h": {64: 0, 128: 7, 256: 2},
    "nemotron_h_moe": {64: 1, 128: 3, 256: 6},
    "bamba": {64: 4, 128: 9, 256: 11},
    "granite": {64: 0, 128: 3, 256: 6},
    "granite_moe": {64: 4, 128: 3, 256: 6},
}
"""Family → SSM chunk → the case that is used with that chunk."""
LARGE_CHUNK_NAMES = [
    f"{family}-{index}-chunk{size}" for family, cases in LARGE_CHUNKS.items() for size, index in cases.items()
]

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_UNBOUNDED = (0.0, float("inf"))
_SHARED_OPTIONS: dict[str, Sequence[Any]] = {
    # hidden size, attention heads, KV heads: as many, 2 to 1, 4 to 1, one for all
    "attention": [(32, 4, 4), (64, 4, 2), (48, 4, 1), (64, 8, 2), (32, 4, 2), (64, 8, 1), (48, 4, 4), (32, 8, 2)],
    "mamba": [(1, 4), (8, 8), (2, 8), (1, 8), (2, 4), (8, 16)],  # groups, heads
    "state_dim": [4, 8, 16],
    "chunk_size": [8, 16, 32],
    "d_conv": [4, 3, 4, 2],
    "conv_bias": [True, False],
    "intermediate_size": [48, 64, 80],
    "vocab_size": [97, 101, 113, 127, 131, 128],
    "tied": [False, True],
    "eps": [1e-5, 1e-4, 1e-3],
    "rope_theta": [10_000.0, 500.0, 1e6],
    "limit": [_UNBOUNDED, _UNBOUNDED, _UNBOUNDED, (0.1, 0.4)],
    "max_shard_size": ["5GB", "20KB", "5GB"],
    # how the checkpoint is served
    "block_chunks": [1, 2],
    "max_tokens": [17, 24, 40],
    "align_prefill_chunks": [True, False],
}
_OPTIONS: dict[str, dict[str, Sequence[Any]]] = {
    "nemotron_h": {
        "layers": ["*M-M", "M-M*", "M**M", "MM*-", "-M*M", "M*", "*M*M*", "M--*M"],
        "head_dim": [8, 16, 12],
        "mamba_head_dim": [8, 16, 12],
        "activation": ["relu2", "silu"],
        "limit": [_UNBOUNDED, _UNBOUNDED, _UNBOUNDED, (0.1, float("inf"))],
    },
    "bamba": {
        "layers": ["M*M", "*MM", "MM*", "M**M", "*M", "*M*", "M*", "MMM*"],
        "rotary_percent": [0.5, 1.0],
        "expand": [2, 4, 3],
    },
    "granite": {
        "layers": ["M*M", "*MM", "MM*", "M**M", "*M", "*M*", "M*", "MMM*"],
        "expand": [2, 4, 3],
        # on embeddings, residuals, attention scores; divisor of logits
        "multipliers": [(12.0, 0.22, 0.0625, 6.0), (1.0, 1.0, 1.0, 1.0), (3.0, 0.5, 0.3, 0.5)],
        "position": ["rope", None],
    },
}
_OPTIONS["nemotron_h_moe"] = _OPTIONS["nemotron_h"] | {
    "layers": ["-ME*", "*EME", "M*EE", "EM*M", "M*E", "-E*M", "MEM*E", "*ME"],
    # experts, chosen ones, groups of experts, chosen groups
    "experts": [(8, 2, 1, 1), (8, 2, 4, 2), (4, 3, 1, 1), (8, 4, 2, 2), (16, 3, 4, 1), (6, 1, 1, 1), (16, 5, 4, 2)],
    "scaling": [1.0, 2.5],
    "latent": [None, 16, None, 12],
    "normalizes": [True, True, False],
}
_OPTIONS["granite_moe"] = _OPTIONS["granite"] | {"experts": [(4, 2), (1, 1), (8, 3), (6, 4), (8, 1)]}


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A configuration, and how to write and serve it.

    Args:
        bounds_time_steps: True if time steps are clamped: transformers does so in its chunked form, and not when it
            decodes from a cache.
    """

    name: str
    config: PreTrainedConfig
    max_shard_size: str
    cache_settings: Mapping[str, Any]
    bounds_time_steps: bool

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.cache_settings["block_size_tokens"]

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.config.get_text_config().vocab_size

    def model(self, draw: int = 0) -> PreTrainedModel:
        """Return a transformers model with new random weights at each call."""
        is_whole = self.config.get_text_config() is not self.config
        classes = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
        model = classes.from_config(self.config, attn_implementation="eager").eval()
        spread_weights(model, seed=1000 * draw + sum(self.name.encode()))
        return model

    def write(self, model: PreTrainedModel, directory: Path) -> None:
        """Write the checkpoint of a model of this configuration."""
        weights = model.state_dict()
        if self.config.tie_word_embeddings:
            weights.pop("lm_head.weight")  # equal to the embeddings
        model.save_pretrained(directory, state_dict=weights, max_shard_size=self.max_shard_size)


def tiny_checkpoint(name: str) -> TinyCheckpoint:
    """Return the checkpoint with this name, which is in `CASE_NAMES` or `LARGE_CHUNK_NAMES`."""
    family, index, *chunk = name.split("-")
    settings = sampled_settings(family)[int(index)]
    if chunk:
        size = int(chunk[0].removeprefix("chunk"))
        settings = settings | {"chunk_size": size, "block_chunks": 1, "max_tokens": size // 2 + 8}
    return TinyCheckpoint(
        name=name,
        config=qwen_config(family, settings) if family in QWEN_OPTIONS else _CONFIG_OF[family](settings),
        max_shard_size=settings["max_shard_size"],
        cache_settings={
            "block_size_tokens": settings.get("chunk_size", QWEN_CHUNK_SIZE) * settings["block_chunks"],
            "max_tokens": settings["max_tokens"],
            "align_prefill_chunks": settings["align_prefill_chunks"],
        },
        bounds_time_steps=settings.get("limit", _UNBOUNDED) != _UNBOUNDED,
    )


def wide_checkpoint(name: str) -> TinyCheckpoint:
    """Return a case whose matrices have enough columns for groups of 32, and some for a block of 128 and an edge."""
    case = tiny_checkpoint(name)
    config = case.config.get_text_config()
    config.hidden_size, config.intermediate_size, config.vocab_size = 160, 96, 128
    if "nemotron" in name:
        config.moe_intermediate_size, config.moe_shared_expert_intermediate_size = 64, 32
        config.mamba_head_dim = 16
    elif "qwen" in name:
        config.moe_intermediate_size, config.shared_expert_intermediate_size = 64, 32
    else:
        config.mamba_d_head = config.mamba_expand * 160 // config.mamba_n_heads
    return case


@cache
def sampled_settings(family: str) -> list[dict[str, Any]]:
    """Return the settings of all tiny checkpoints of a family."""
    options = QWEN_OPTIONS.get(family) or _SHARED_OPTIONS | _OPTIONS[family]
    count = CASES_PER_FAMILY[family]
    rng = random.Random(family)
    columns = {name: _balanced(values, count, rng) for name, values in options.items()}
    return [{name: column[index] for name, column in columns.items()} for index in range(count)]


def _balanced(options: Sequence[Any], count: int, rng: random.Random) -> list[Any]:
    settings = [options[index % len(options)] for index in range(count)]
    rng.shuffle(settings)
    return settings


def _common(settings: dict[str, Any]) -> dict[str, Any]:
    hidden_size, heads, kv_heads = settings["attention"]
    return {
        "vocab_size": settings["vocab_size"],
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": settings["intermediate_size"],
        "tie_word_embeddings": settings["tied"],
        "max_position_embeddings": 640,
        "time_step_limit": settings["limit"],
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,  # generation ends by length only
    }


def _nemotron_h(settings: dict[str, Any]) -> NemotronHConfig:
    groups, heads = settings["mamba"]
    experts, top_k, expert_groups, top_groups = settings.get("experts", (4, 2, 1, 1))
    return NemotronHConfig(
        **_common(settings),
        layers_block_type=[_KINDS[symbol] for symbol in settings["layers"]],
        head_dim=settings["head_dim"],
        mlp_hidden_act=settings["activation"],
        layer_norm_epsilon=settings["eps"],
        ssm_state_size=settings["state_dim"],
        mamba_num_heads=heads,
        mamba_head_dim=settings["mamba_head_dim"],
        n_groups=groups,
        conv_kernel=settings["d_conv"],
        use_conv_bias=settings["conv_bias"],
        chunk_size=settings["chunk_size"],
        # transformers clamps at time_step_min, whatever time_step_limit says; no time step is below the tiny one
        time_step_min=settings["limit"][0] or 1e-9,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=expert_groups,
        topk_group=top_groups,
        routed_scaling_factor=settings.get("scaling", 1.0),
        moe_latent_size=settings.get("latent"),
        norm_topk_prob=settings.get("normalizes", True),
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
    )


def _mamba_fields(settings: dict[str, Any]) -> dict[str, Any]:
    groups, heads = settings["mamba"]
    return {
        "num_hidden_layers": len(settings["layers"]),
        "rms_norm_eps": settings["eps"],
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_state": settings["state_dim"],
        "mamba_d_conv": settings["d_conv"],
        "mamba_expand": settings["expand"],
        "mamba_chunk_size": settings["chunk_size"],
        "mamba_conv_bias": settings["conv_bias"],
    }


def _bamba(settings: dict[str, Any]) -> BambaConfig:
    rope = {"rope_theta": settings["rope_theta"], "partial_rotary_factor": settings["rotary_percent"]}
    return BambaConfig(
        **_common(settings),
        **_mamba_fields(settings),
        attn_layer_indices=[index for index, symbol in enumerate(settings["layers"]) if symbol == "*"],
        rope_parameters={"rope_type": "default", **rope},
    )


def _granite(settings: dict[str, Any]) -> GraniteMoeHybridConfig:
    embedding, residual, attention, logits_divisor = settings["multipliers"]
    experts, top_k = settings.get("experts", (0, 2))
    return GraniteMoeHybridConfig(
        **_common(settings),
        **_mamba_fields(settings),
        layer_types=[_KINDS[symbol] for symbol in settings["layers"]],
        shared_intermediate_size=settings["intermediate_size"] - 8,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        embedding_multiplier=embedding,
        residual_multiplier=residual,
        attention_multiplier=attention,
        logits_scaling=logits_divisor,
        position_embedding_type=settings["position"],
        rope_parameters={"rope_type": "default", "rope_theta": settings["rope_theta"]},
    )


_CONFIG_OF = {
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "bamba": _bamba,
    "granite": _granite,
    "granite_moe": _granite,
}
