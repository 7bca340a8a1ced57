"""GraniteMoeHybrid (Granite 4) checkpoints: each layer has a mixer, experts, a shared MLP, and multipliers."""

from ..architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    HybridArchitecture,
    RoutingFields,
    checked_routing,
)
from ..checkpoints.checkpoint_config import MOST_EXPERTS, CheckpointConfig
from ..checkpoints.stored_names import OtherNames
from ..placement import Placement, Split, stacked
from .bamba import mamba_shape, rotary_base
from .layer_placements import Placements, ends_placements, mixer_placements, mlp_norm_placement

ENDS = {"embeddings": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "output": "lm_head.weight"}
OTHER_NAMES = OtherNames(
    parts={
        "model.": ("",),  # names in a checkpoint without an output layer
        "block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts.gate_up_proj",),
        "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts.down_proj",),
        "block_sparse_moe.router.layer.weight": ("block_sparse_moe.router.weight",),
    }
)

_SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}


def architecture_of(config: CheckpointConfig) -> HybridArchitecture:
    """Return the architecture that a GraniteMoeHybrid config describes. Each layer becomes two Megatron layers."""
    config = config.naming({"layers_block_type": "layer_types"})
    for name in ("attention_bias", "mamba_proj_bias"):
        config.require(name, False, False)
    config.require("hidden_act", "silu", "silu")  # also the mixers' activation
    num_experts = config.integer("num_local_experts", 0, least=0, most=MOST_EXPERTS)
    num_heads = config.integer("num_attention_heads")
    mixers, feed_forward = config.each_of("layer_types", _SYMBOLS), "E" if num_experts else "-"
    config.require("num_hidden_layers", len(mixers), len(mixers))
    position = config.one_of("position_embedding_type", ("rope", "nope"), "nope")
    return HybridArchitecture(
        pattern="".join(f"{mixer}{feed_forward}" for mixer in mixers),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_sequence_length=config.integer("max_position_embeddings", 4096),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        recurrent=mamba_shape(config),
        attention=AttentionSizes(
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=config.integer("head_dim", config.integer("hidden_size") // num_heads),
            scale=config.number("attention_multiplier", 1.0),
            rotary_base=rotary_base(config) if position == "rope" else None,
        ),
        feed_forward=FeedForwardSizes(config.integer("shared_intermediate_size"), "silu", gated=True),
        experts=_experts(config) if num_experts else None,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        input_multiplier=config.factor("embedding_multiplier", 1.0),
        residual_multiplier=config.factor("residual_multiplier", 1.0),
        output_multiplier=1.0 / config.factor("logits_scaling", 1.0),
    )


def placements_of(architecture: HybridArchitecture) -> Placements:
    """Return the Megatron destinations of each tensor in a GraniteMoeHybrid checkpoint."""
    placements = ends_placements(architecture, ENDS)
    for layer in range(len(architecture.pattern) // 2):
        prefix = f"model.layers.{layer}."
        norm = f"{prefix}input_layernorm.weight"
        placements |= mixer_placements(architecture, 2 * layer, f"{prefix}mamba.", f"{prefix}self_attn.", norm)
        placements |= _feed_forward(architecture, 2 * layer + 1, prefix)
        placements |= mlp_norm_placement(2 * layer + 1, f"{prefix}post_attention_layernorm.weight")
    return placements


def _experts(config: CheckpointConfig) -> ExpertsSizes:
    experts = ExpertsSizes(
        num_experts=config.integer("num_local_experts", most=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        hidden_size=config.integer("intermediate_size"),
        shared_hidden_size=config.integer("shared_intermediate_size"),
        score="softmax",
    )
    return checked_routing(config, experts, RoutingFields("num_local_experts", "num_experts_per_tok"))


def _feed_forward(architecture: HybridArchitecture, layer: int, prefix: str) -> Placements:
    mlp, experts = f"decoder.layers.{layer}.mlp.", architecture.experts
    shared = f"{mlp}shared_experts." if experts else mlp
    both_halves = Split(0, (architecture.feed_forward.hidden_size,) * 2)  # the gate and up halves are split separately
    placements: Placements = {
        f"{prefix}shared_mlp.input_linear.weight": (Placement(f"{shared}linear_fc1.weight", both_halves),),
        f"{prefix}shared_mlp.output_linear.weight": (Placement(f"{shared}linear_fc2.weight", Split(1)),),
    }
    if experts is None:
        return placements
    mixture, gate_and_up = f"{prefix}block_sparse_moe.", Split(0, (experts.hidden_size,) * 2)
    each = [f"{mlp}experts.local_experts.{index}." for index in range(experts.num_experts)]
    return {
        **placements,
        f"{mixture}router.layer.weight": (Placement(f"{mlp}router.weight"),),
        f"{mixture}input_linear.weight": stacked(Placement(f"{one}linear_fc1.weight", gate_and_up) for one in each),
        f"{mixture}output_linear.weight": stacked(Placement(f"{one}linear_fc2.weight", Split(1)) for one in each),
    }
