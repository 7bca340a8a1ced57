"""Read a model's architecture from the arguments of a Megatron-LM training run."""

from typing import Any

from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

from ..architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    HybridArchitecture,
    MambaSizes,
    RoutingFields,
    checked_routing,
)
from .checkpoint_config import MOST_EXPERTS, MOST_LAYERS, CheckpointConfig

_GATED_NORM_EPS = 1e-5  # constant in Megatron's mixer; no argument sets it
_SSM_CHUNK_SIZE = 128  # constant in Megatron's mixer; no argument sets it
_EXPAND = 2  # constant in Megatron's mixer, for checkpoints without an argument for the number of Mamba heads

_SUPPORTED: dict[str, tuple[Any, Any]] = {
    # argument: (the only supported value, Megatron-LM's default)
    "normalization": ("RMSNorm", "LayerNorm"),
    "apply_layernorm_1p": (False, False),
    "layernorm_zero_centered_gamma": (False, False),  # newer name of apply_layernorm_1p
    "add_bias_linear": (False, True),
    "add_qkv_bias": (False, False),
    "qk_layernorm": (False, False),
    "qk_l2_norm": (False, False),
    "attention_output_gate": (False, False),
    "multi_latent_attention": (False, False),
    "window_size": (None, None),
    "softmax_type": ("vanilla", "vanilla"),
    "glu_linear_offset": (0.0, 0.0),
    "activation_func_clamp_value": (None, None),
    "quick_geglu": (False, False),
    "use_mup": (False, False),
    "heterogeneous_layers_config_path": (None, None),
}
_SUPPORTED_ROTATION: dict[str, tuple[Any, Any]] = {
    "use_rope_scaling": (False, False),
    "rotary_interleaved": (False, False),
    "rotary_seq_len_interpolation_factor": (None, None),
    "no_rope_freq": (None, None),
}
_SUPPORTED_ROUTING: dict[str, tuple[Any, Any]] = {
    "moe_router_pre_softmax": (False, False),
    "moe_shared_expert_gate": (False, False),
    "moe_apply_probs_on_input": (False, False),
    "moe_expert_capacity_factor": (None, None),
}
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")  # used only in training, unlike "sinkhorn"
_CHOICE = RoutingFields("num_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk")


def architecture_of(arguments: CheckpointConfig) -> HybridArchitecture:
    """Return the architecture of the hybrid model trained with these arguments.

    Raises:
        ValueError: If an argument is missing, of the wrong type or not supported; the message names it.
    """
    _require(arguments, _SUPPORTED)
    pattern = _pattern(arguments)
    if "E" not in pattern and arguments.has("moe_latent_size"):
        latent = arguments.shown("moe_latent_size", arguments.integer("moe_latent_size"))
        raise arguments.error(f"{latent} is not supported without experts in the layer pattern {pattern!r:.100}")
    return HybridArchitecture(
        pattern=pattern,
        vocab_size=arguments.integer("padded_vocab_size"),
        hidden_size=arguments.integer("hidden_size"),
        max_sequence_length=arguments.integer("max_position_embeddings"),
        # Since megatron-core 0.16, arguments have the names of the TransformerConfig fields that they set.
        norm_eps=arguments.number("layernorm_epsilon", arguments.number("norm_epsilon", 1e-5)),
        recurrent=_mamba(arguments),
        attention=_attention(arguments),
        feed_forward=_feed_forward(arguments),
        experts=_experts(arguments) if "E" in pattern else None,
        tie_embeddings=not arguments.flag("untie_embeddings_and_output_weights", False),
    )


def _require(arguments: CheckpointConfig, supported: dict[str, tuple[Any, Any]]) -> None:
    for name, (value, default) in supported.items():
        arguments.require(name, value, default)


def _pattern(arguments: CheckpointConfig) -> str:
    if arguments.has("hybrid_override_pattern"):
        pattern, *_of_further_tokens = arguments.text("hybrid_override_pattern", most=MOST_LAYERS).split("/")
        return pattern
    shares = [arguments.share(f"hybrid_{kind}_ratio", 0.0) for kind in ("attention", "mlp")]
    if not shares[0] or sum(shares) > 1:
        raise arguments.error(
            f"hybrid_override_pattern is missing, and hybrid_attention_ratio={shares[0]} and "
            f"hybrid_mlp_ratio={shares[1]} do not describe a model with both Mamba and attention layers"
        )
    return "".join(allocate_layers(arguments.integer("num_layers"), *shares))


def _mamba(arguments: CheckpointConfig) -> MambaSizes:
    head_dim = arguments.integer("mamba_head_dim", 64)
    return MambaSizes(
        num_heads=arguments.integer("mamba_num_heads", _EXPAND * arguments.integer("hidden_size") // head_dim),
        head_dim=head_dim,
        state_dim=arguments.integer("mamba_state_dim", 128),
        num_groups=arguments.integer("mamba_num_groups", 8),
        ssm_chunk_size=_SSM_CHUNK_SIZE,
        gated_norm_eps=_GATED_NORM_EPS,
    )


def _attention(arguments: CheckpointConfig) -> AttentionSizes:
    num_heads = arguments.integer("num_attention_heads")
    position = arguments.one_of("position_embedding_type", ("none", "rope"), "learned_absolute")
    if position == "rope":
        _require(arguments, _SUPPORTED_ROTATION)
    is_grouped = arguments.flag("group_query_attention", False)
    return AttentionSizes(
        num_heads=num_heads,
        num_kv_heads=arguments.integer("num_query_groups") if is_grouped else num_heads,
        head_dim=arguments.integer("kv_channels", arguments.integer("hidden_size") // num_heads),
        scale=arguments.number("softmax_scale") if arguments.has("softmax_scale") else None,
        rotary_base=arguments.number("rotary_base", 10_000) if position == "rope" else None,
        rotary_percent=arguments.number("rotary_percent", 1.0),
    )


def _feed_forward(arguments: CheckpointConfig) -> FeedForwardSizes:
    gated = arguments.flag("swiglu", False)
    squared = arguments.flag("squared_relu", False)
    activation = "silu" if gated else "relu2" if squared else "gelu"
    size = arguments.integer("ffn_hidden_size", 4 * arguments.integer("hidden_size"))
    return FeedForwardSizes(size, activation, gated)


def _experts(arguments: CheckpointConfig) -> ExpertsSizes:
    _require(arguments, _SUPPORTED_ROUTING)
    score = arguments.one_of("moe_router_score_function", ("softmax", "sigmoid"), "softmax")
    arguments.require("moe_router_enable_expert_bias", score == "sigmoid", False)
    if arguments.holds_list("moe_router_load_balancing_type"):
        arguments.each_of("moe_router_load_balancing_type", {name: name for name in _BALANCING})
    else:
        arguments.one_of("moe_router_load_balancing_type", _BALANCING, "aux_loss")
    top_k, num_groups, top_groups = arguments.integer("moe_router_topk", 2), 1, 1
    if arguments.has("moe_router_group_topk"):  # if absent, experts are selected from all groups
        num_groups = arguments.integer("moe_router_num_groups", 1)
        top_groups = arguments.integer("moe_router_group_topk", most=top_k)  # more groups would have no score
    experts = ExpertsSizes(
        num_experts=arguments.integer("num_experts", most=MOST_EXPERTS),
        top_k=top_k,
        hidden_size=arguments.integer("moe_ffn_hidden_size", arguments.integer("ffn_hidden_size")),
        shared_hidden_size=_optional(arguments, "moe_shared_expert_intermediate_size"),
        score=score,
        num_groups=num_groups,
        top_groups=top_groups,
        num_scoring=max(1, top_k // top_groups) if num_groups > 1 else 2,
        normalizes=score == "softmax" or top_k > 1,
        scaling=arguments.number("moe_router_topk_scaling_factor", 1.0),
        latent_size=_optional(arguments, "moe_latent_size"),
    )
    return checked_routing(arguments, experts, _CHOICE)


def _optional(arguments: CheckpointConfig, name: str) -> int | None:
    return arguments.integer(name) if arguments.has(name) else None
