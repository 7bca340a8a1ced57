"""NemotronH checkpoints, in which each layer is a Mamba, attention, MLP or MoE layer."""

from ..architecture import (
    ACTIVATIONS,
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    HybridArchitecture,
    MambaSizes,
    RoutingFields,
    checked_routing,
)
from ..checkpoints.checkpoint_config import MOST_EXPERTS, MOST_LAYERS, CheckpointConfig
from ..checkpoints.stored_names import OtherNames
from ..mtp_head import ends_of_head
from ..placement import Placement, Split
from .layer_placements import Placements, ends_placements, mixer_placements, mlp_norm_placement

ENDS = {"embeddings": "backbone.embeddings.weight", "final_norm": "backbone.norm_f.weight", "output": "lm_head.weight"}
OTHER_NAMES = OtherNames(
    parts={"backbone.": ("model.", ""), "embeddings.weight": ("embedding.weight",)},
    stacks={f".experts.{{}}.{name}.weight": f".experts.{name}" for name in ("up_proj", "down_proj")},
)

_OTHER_FIELDS = {
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}
_CHOICE = RoutingFields("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
_SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


def architecture_of(config: CheckpointConfig) -> HybridArchitecture:
    """Return the architecture that a NemotronH configuration describes."""
    config = config.naming(_OTHER_FIELDS)
    for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        config.require(name, False, False)
    config.require("mamba_hidden_act", "silu", "silu")
    pattern = _pattern(config)
    if "E" not in pattern and config.has("moe_latent_size"):
        latent = config.shown("moe_latent_size", config.integer("moe_latent_size"))
        raise config.error(f"{latent} is not supported without experts in the layer pattern {pattern!r:.100}")
    # The model was trained with time_step_limit. transformers uses time_step_min as the lower limit, but only in its
    # chunked implementation.
    limit = config.limits("time_step_limit")
    return HybridArchitecture(
        pattern=pattern,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_sequence_length=config.integer("max_position_embeddings", 4096),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        recurrent=MambaSizes(
            num_heads=config.integer("mamba_num_heads"),
            head_dim=config.integer("mamba_head_dim"),
            state_dim=config.integer("ssm_state_size"),
            num_groups=config.integer("n_groups"),
            ssm_chunk_size=config.integer("chunk_size", 128),
            d_conv=config.integer("conv_kernel", 4),
            conv_bias=config.flag("use_conv_bias", True),
            time_step_limit=limit,
        ),
        attention=AttentionSizes(
            num_heads=config.integer("num_attention_heads"),
            num_kv_heads=config.integer("num_key_value_heads"),
            # attention_head_dim is the older name; if neither is present, transformers uses 128 for any hidden size
            head_dim=config.integer("head_dim", config.integer("attention_head_dim", 128)),
        ),
        feed_forward=FeedForwardSizes(
            config.integer("intermediate_size"), config.one_of("mlp_hidden_act", ACTIVATIONS, "relu2"), gated=False
        ),
        experts=_experts(config) if "E" in pattern else None,
        tie_embeddings=config.flag("tie_word_embeddings", False),
    )


def placements_of(architecture: HybridArchitecture) -> Placements:
    """Return the Megatron destinations of each tensor in a NemotronH checkpoint."""
    return {**ends_placements(architecture, ENDS), **_layers(architecture, "backbone.layers.")}


def mtp_pattern(config: CheckpointConfig, architecture: HybridArchitecture) -> str:
    """Return the layer pattern of the MTP head."""
    if config.has("mtp_hybrid_override_pattern"):
        return config.text("mtp_hybrid_override_pattern", most=MOST_LAYERS)
    if config.has("mtp_layers_block_type"):
        return "".join(config.each_of("mtp_layers_block_type", _SYMBOLS))
    return "*E"


def mtp_placements(head: HybridArchitecture) -> Placements:
    """Return the destinations of each tensor of an MTP head; see `MTPHead`."""
    first, last = "mtp.layers.0.", f"mtp.layers.{len(head.pattern) - 1}."
    ends = (f"{first}enorm.weight", f"{first}hnorm.weight", f"{first}eh_proj.weight", f"{last}final_layernorm.weight")
    return {**ends_of_head(*ends), **_layers(head, "mtp.layers.")}


def _layers(architecture: HybridArchitecture, stored: str) -> Placements:
    """Return the destinations of the layers' tensors, whose names begin with `stored` and the layer's number."""
    placements: Placements = {}
    for layer, symbol in enumerate(architecture.pattern):
        prefix, norm = f"{stored}{layer}.mixer.", f"{stored}{layer}.norm.weight"
        if symbol in "M*":
            placements |= mixer_placements(architecture, layer, prefix, prefix, norm)
        elif symbol == "-":
            placements |= {**_mlp(layer, prefix, "mlp."), **mlp_norm_placement(layer, norm)}
        else:
            placements |= {**_mixture(architecture, layer, prefix), **mlp_norm_placement(layer, norm)}
    return placements


def _pattern(config: CheckpointConfig) -> str:
    if config.has("layers_block_type"):
        return "".join(config.each_of("layers_block_type", _SYMBOLS))
    return config.text("hybrid_override_pattern", most=MOST_LAYERS)


def _experts(config: CheckpointConfig) -> ExpertsSizes:
    config.require("n_shared_experts", 1, 1)
    # Only this kind of router is implemented here. NemotronH has no other, but the fields exist in other families.
    config.require("scoring_func", "sigmoid", "sigmoid")
    config.require("topk_method", "noaux_tc", "noaux_tc")
    experts = ExpertsSizes(
        num_experts=config.integer("n_routed_experts", most=MOST_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        hidden_size=config.integer("moe_intermediate_size"),
        shared_hidden_size=config.integer("moe_shared_expert_intermediate_size"),
        score="sigmoid",
        num_groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
        normalizes=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
        latent_size=config.integer("moe_latent_size") if config.has("moe_latent_size") else None,
    )
    return checked_routing(config, experts, _CHOICE)


def _mlp(layer: int, prefix: str, part: str) -> Placements:
    target = f"decoder.layers.{layer}.{part}"
    return {
        f"{prefix}up_proj.weight": (Placement(f"{target}linear_fc1.weight", Split(0)),),
        f"{prefix}down_proj.weight": (Placement(f"{target}linear_fc2.weight", Split(1)),),
    }


def _mixture(architecture: HybridArchitecture, layer: int, prefix: str) -> Placements:
    assert architecture.experts is not None
    router = f"decoder.layers.{layer}.mlp.router."
    placements = {
        f"{prefix}gate.weight": (Placement(f"{router}weight"),),
        f"{prefix}gate.e_score_correction_bias": (Placement(f"{router}expert_bias"),),
        **_mlp(layer, f"{prefix}shared_experts.", "mlp.shared_experts."),
    }
    if architecture.experts.latent_size is not None:
        for name in ("fc1_latent_proj", "fc2_latent_proj"):
            placements[f"{prefix}{name}.weight"] = (Placement(f"decoder.layers.{layer}.mlp.{name}.weight"),)
    for expert in range(architecture.experts.num_experts):
        placements |= _mlp(layer, f"{prefix}experts.{expert}.", f"mlp.experts.local_experts.{expert}.")
    return placements
