"""Bamba checkpoints: each layer is a mixer and a gated MLP."""

from .architecture import AttentionShape, FeedForwardShape, HybridArchitecture, MambaShape
from .checkpoint_config import CheckpointConfig
from .layer_placements import (
    Places,
    attention_places,
    ends_places,
    gate_half,
    mamba_places,
    mlp_norm_place,
    up_half,
)
from .placement import Placement, Split


def architecture_of(config: CheckpointConfig) -> HybridArchitecture:
    """Return the architecture that a Bamba configuration describes; a layer of it is two of Megatron's."""
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        config.require(name, False, False)
    config.require("hidden_act", "silu", "silu")  # the mixers' too
    attention_layers = set(config.get("attn_layer_indices", ()))
    layers = ("*" if layer in attention_layers else "M" for layer in range(config.get("num_hidden_layers")))
    return HybridArchitecture(
        pattern="".join(f"{mixer}-" for mixer in layers),
        vocab_size=config.get("vocab_size"),
        hidden_size=config.get("hidden_size"),
        max_sequence_length=config.get("max_position_embeddings", 4096),
        norm_eps=config.get("rms_norm_eps", 1e-5),
        mamba=mamba_shape(config),
        attention=AttentionShape(
            num_heads=config.get("num_attention_heads"),
            num_kv_heads=config.get("num_key_value_heads", config.get("num_attention_heads")),
            head_dim=config.get("head_dim", config.get("hidden_size") // config.get("num_attention_heads")),
            rotary_base=rotary_base(config),
            rotary_percent=config.get("rope_parameters", {}).get(
                "partial_rotary_factor", config.get("partial_rotary_factor", 0.5)
            ),
        ),
        feed_forward=FeedForwardShape(config.get("intermediate_size"), "silu", gated=True),
        tie_embeddings=config.get("tie_word_embeddings", False),
    )


def placements_of(architecture: HybridArchitecture) -> Places:
    """Return where each tensor of a Bamba checkpoint goes."""
    names = {"embeddings": "model.embed_tokens.weight", "final_norm": "model.final_layernorm.weight"}
    places = ends_places(architecture, {**names, "output": "lm_head.weight"})
    for layer, mixer in enumerate(architecture.pattern[::2]):
        prefix = f"model.layers.{layer}."
        norm = f"{prefix}input_layernorm.weight"
        if mixer == "M":
            places |= mamba_places(architecture, 2 * layer, f"{prefix}mamba.", norm)
        else:
            places |= attention_places(architecture, 2 * layer, f"{prefix}self_attn.", norm)
        places |= _gated_mlp(2 * layer + 1, f"{prefix}feed_forward.")
        places |= mlp_norm_place(2 * layer + 1, f"{prefix}pre_ff_layernorm.weight")
    return places


def mamba_shape(config: CheckpointConfig) -> MambaShape:
    """Return the mixers' sizes under the names that Bamba and Granite share."""
    num_heads, inner = config.get("mamba_n_heads"), config.get("mamba_expand", 2) * config.get("hidden_size")
    head_dim = config.get("mamba_d_head", "auto")
    return MambaShape(
        num_heads=num_heads,
        head_dim=inner // num_heads if head_dim == "auto" else head_dim,
        state_dim=config.get("mamba_d_state"),
        num_groups=config.get("mamba_n_groups"),
        ssm_chunk_size=config.get("mamba_chunk_size", 256),
        d_conv=config.get("mamba_d_conv", 4),
        conv_bias=config.get("mamba_conv_bias", True),
        time_step_limit=config.number_pair("time_step_limit", (0.0, float("inf"))),
    )


def rotary_base(config: CheckpointConfig) -> float:
    """Return the base of plain rotary embeddings; scaled ones are an error."""
    rope = config.get("rope_parameters", config.get("rope_scaling", {}))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise config.error(f"rope_type={kind!r} is not supported, only 'default'")
    return float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))


def _gated_mlp(layer: int, prefix: str) -> Places:
    fc1 = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
    return {
        f"{prefix}gate_proj.weight": (Placement(fc1, Split(0), view=gate_half),),
        f"{prefix}up_proj.weight": (Placement(fc1, Split(0), view=up_half),),
        f"{prefix}down_proj.weight": (Placement(f"decoder.layers.{layer}.mlp.linear_fc2.weight", Split(1)),),
    }
