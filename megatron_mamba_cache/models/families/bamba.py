"""Bamba checkpoints, in which each layer has a mixer and a gated MLP."""

from ..architecture import AttentionSizes, FeedForwardSizes, HybridArchitecture, MambaSizes
from ..checkpoints.checkpoint_config import MOST_LAYERS, CheckpointConfig
from ..checkpoints.stored_names import OtherNames
from .layer_placements import Placements, ends_placements, gated_mlp_placements, mixer_placements, mlp_norm_placement

ENDS = {
    "embeddings": "model.embed_tokens.weight",
    "final_norm": "model.final_layernorm.weight",
    "output": "lm_head.weight",
}
OTHER_NAMES = OtherNames(parts={"model.": ("",)})  # names in a checkpoint without an output layer


def architecture_of(config: CheckpointConfig) -> HybridArchitecture:
    """Return the architecture that a Bamba configuration describes. Each layer becomes two Megatron layers."""
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        config.require(name, False, False)
    config.require("hidden_act", "silu", "silu")  # also the mixers' activation
    num_layers, num_heads = config.integer("num_hidden_layers", most=MOST_LAYERS), config.integer("num_attention_heads")
    attention_layers = set(config.indices("attn_layer_indices", num_layers))
    layers = ("*" if layer in attention_layers else "M" for layer in range(num_layers))
    return HybridArchitecture(
        pattern="".join(f"{mixer}-" for mixer in layers),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_sequence_length=config.integer("max_position_embeddings", 4096),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        recurrent=mamba_shape(config),
        attention=AttentionSizes(
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=config.integer("head_dim", config.integer("hidden_size") // num_heads),
            rotary_base=rotary_base(config),
            # transformers reads this field only from these sections
            rotary_percent=config.section("rope_parameters", "rope_scaling").number("partial_rotary_factor", 0.5),
        ),
        feed_forward=FeedForwardSizes(config.integer("intermediate_size"), "silu", gated=True),
        tie_embeddings=config.flag("tie_word_embeddings", False),
    )


def placements_of(architecture: HybridArchitecture) -> Placements:
    """Return the Megatron destinations of each tensor in a Bamba checkpoint."""
    placements = ends_placements(architecture, ENDS)
    for layer in range(len(architecture.pattern) // 2):
        prefix = f"model.layers.{layer}."
        norm = f"{prefix}input_layernorm.weight"
        placements |= mixer_placements(architecture, 2 * layer, f"{prefix}mamba.", f"{prefix}self_attn.", norm)
        placements |= gated_mlp_placements(f"decoder.layers.{2 * layer + 1}.mlp.", f"{prefix}feed_forward.")
        placements |= mlp_norm_placement(2 * layer + 1, f"{prefix}pre_ff_layernorm.weight")
    return placements


def mamba_shape(config: CheckpointConfig) -> MambaSizes:
    """Return the dimensions of the Mamba mixers, read from fields that Bamba and Granite have in common."""
    num_heads = config.integer("mamba_n_heads")
    inner = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    is_derived = config.equals("mamba_d_head", "auto", default="auto")
    head_dim = inner // num_heads if is_derived else config.integer("mamba_d_head")
    if num_heads * head_dim != inner:
        raise config.error(
            f"mamba_n_heads * mamba_d_head must equal mamba_expand * hidden_size ({inner}), "
            f"found {num_heads} * {head_dim}"
        )
    return MambaSizes(
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=config.integer("mamba_d_state"),
        num_groups=config.integer("mamba_n_groups"),
        ssm_chunk_size=config.integer("mamba_chunk_size", 256),
        d_conv=config.integer("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        time_step_limit=config.limits("time_step_limit"),
    )


def rotary_base(config: CheckpointConfig, plain: tuple[str, ...] = ("default",)) -> float:
    """Return the base of the rotary embeddings; raise `ValueError` if their type is not in `plain`."""
    rope = config.section("rope_parameters", "rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in plain:
        raise config.error(f"rope_type={kind!r} is not supported; use one of {', '.join(map(repr, plain))}")
    return rope.number("rope_theta", config.number("rope_theta", 10_000.0))
