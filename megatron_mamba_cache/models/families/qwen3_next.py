"""Qwen3-Next checkpoints: each layer has Gated DeltaNet or gated attention, then experts or a gated MLP."""

from collections.abc import Callable

from torch import Tensor

from ..architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    GatedDeltaSizes,
    HybridArchitecture,
    RoutingFields,
    checked_routing,
)
from ..checkpoints.checkpoint_config import MOST_EXPERTS, MOST_LAYERS, CheckpointConfig
from ..checkpoints.stored_names import OtherNames
from ..mtp_head import ends_of_head
from ..placement import Placement, Split
from .bamba import rotary_base
from .layer_placements import (
    Placements,
    ends_placements,
    gated_mlp_placements,
    in_proj_sections,
    mixer_placements,
    mlp_norm_placement,
)

ENDS = {"embeddings": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "output": "lm_head.weight"}
STACKS = {
    ".mlp.experts.{}.gate_proj.weight": ".mlp.experts.gate_up_proj",
    ".mlp.experts.{}.up_proj.weight": ".mlp.experts.gate_up_proj",
    ".mlp.experts.{}.down_proj.weight": ".mlp.experts.down_proj",
}
OTHER_NAMES = OtherNames(parts={"model.": ("",)}, stacks=STACKS)  # no prefix in a checkpoint without an output layer

_SYMBOLS = {"linear_attention": "M", "full_attention": "*"}

Projections = Callable[[HybridArchitecture, str, str], Placements]
"""Maps an architecture, a target name and a prefix of stored names to the destinations of input projections."""


def architecture_of(config: CheckpointConfig) -> HybridArchitecture:
    """Return the architecture that a Qwen3-Next or Qwen3.5 config describes. Each layer becomes two Megatron layers."""
    config.require("attention_bias", False, False)
    config.require("attn_output_gate", True, True)
    config.require("hidden_act", "silu", "silu")  # also the mixers' activation
    config.require("mamba_ssm_dtype", "float32", "float32")
    mixers = _mixers(config)
    experts = _experts(config)
    feed_forward = _feed_forward(config, len(mixers), experts)
    return HybridArchitecture(
        pattern="".join(f"{mixer}{mlp}" for mixer, mlp in zip(mixers, feed_forward, strict=True)),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_sequence_length=config.integer("max_position_embeddings", 32768),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        recurrent=GatedDeltaSizes(
            num_key_heads=config.integer("linear_num_key_heads"),
            num_value_heads=config.integer("linear_num_value_heads"),
            key_head_dim=config.integer("linear_key_head_dim"),
            value_head_dim=config.integer("linear_value_head_dim"),
            d_conv=config.integer("linear_conv_kernel_dim", 4),
        ),
        attention=AttentionSizes(
            num_heads=config.integer("num_attention_heads"),
            num_kv_heads=config.integer("num_key_value_heads"),
            head_dim=config.integer("head_dim", 256),
            rotary_base=rotary_base(config, ("default", "mrope")),  # for text, mrope equals the default
            rotary_percent=config.section("rope_parameters", "rope_scaling").number(
                "partial_rotary_factor", config.number("partial_rotary_factor", 0.25)
            ),
            has_output_gate=True,
            has_head_norms=True,
        ),
        feed_forward=FeedForwardSizes(_dense_size(config, feed_forward, experts), "silu", gated=True),
        experts=experts if "E" in feed_forward else None,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        zero_centered_norms=True,
    )


def placements_of(architecture: HybridArchitecture) -> Placements:
    """Return the Megatron destinations of each tensor in a Qwen3-Next checkpoint."""
    return placements_with(architecture, _projections)


def placements_with(architecture: HybridArchitecture, projections: Projections) -> Placements:
    """Return the destinations of each tensor, using `projections` for the Gated DeltaNet input projections."""
    return {**ends_placements(architecture, ENDS), **_layers(architecture, "model.layers.", projections)}


def mtp_pattern(config: CheckpointConfig, architecture: HybridArchitecture) -> str:
    """Return the layer pattern of the MTP head: a layer with attention, and with experts if the model has any."""
    config.require("mtp_use_dedicated_embeddings", False, False)
    return "*-" if architecture.experts is None else "*E"


def mtp_placements(head: HybridArchitecture) -> Placements:
    """Return the destinations of each tensor of an MTP head; see `MTPHead`."""
    names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight")
    return {**ends_of_head(*names), **_layers(head, "mtp.layers.", _projections)}


def _layers(architecture: HybridArchitecture, stored: str, projections: Projections) -> Placements:
    """Return the destinations of the layers' tensors, whose names begin with `stored` and the layer's number."""
    placements: Placements = {}
    symbols = zip(architecture.pattern[::2], architecture.pattern[1::2], strict=True)
    for layer, (mixer, feed_forward) in enumerate(symbols):
        prefix = f"{stored}{layer}."
        norm = f"{prefix}input_layernorm.weight"
        placements |= mixer_placements(architecture, 2 * layer, f"{prefix}linear_attn.", f"{prefix}self_attn.", norm)
        if mixer == "M":
            in_proj = f"decoder.layers.{2 * layer}.mixer.in_proj.weight"
            placements |= projections(architecture, in_proj, f"{prefix}linear_attn.")
        placements |= mlp_norm_placement(2 * layer + 1, f"{prefix}post_attention_layernorm.weight")
        target = f"decoder.layers.{2 * layer + 1}.mlp."
        if feed_forward == "E":
            placements |= _mixture(architecture, target, f"{prefix}mlp.")
        else:
            placements |= gated_mlp_placements(target, f"{prefix}mlp.")
    return placements


def section_view(architecture: HybridArchitecture, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    """Return a function that returns a view of the sections [`start`, `stop`) of a rank's input projection."""
    sections = in_proj_sections(architecture)
    first, last, end = sum(sections[:start]), sum(sections[:stop]), sum(sections)
    return lambda in_proj: in_proj[first * in_proj.shape[0] // end : last * in_proj.shape[0] // end]


def _mixers(config: CheckpointConfig) -> list[str]:
    if config.has("layer_types"):
        mixers = config.each_of("layer_types", _SYMBOLS)
        config.require("num_hidden_layers", len(mixers), len(mixers))
        return mixers
    interval = config.integer("full_attention_interval", 4)
    num_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    return ["M" if (layer + 1) % interval else "*" for layer in range(num_layers)]


def _experts(config: CheckpointConfig) -> ExpertsSizes | None:
    is_dense = config.equals("model_type", "qwen3_5_text", "")
    num_experts = 0 if is_dense else config.integer("num_experts", least=0, most=MOST_EXPERTS)
    if not num_experts:
        return None
    experts = ExpertsSizes(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok"),
        hidden_size=config.integer("moe_intermediate_size"),
        shared_hidden_size=config.integer("shared_expert_intermediate_size"),
        score="softmax",
        normalizes=_normalizes(config),
        has_shared_gate=True,
    )
    return checked_routing(config, experts, RoutingFields("num_experts", "num_experts_per_tok"))


def _normalizes(config: CheckpointConfig) -> bool:
    """Return True if the routing weights of each token are divided by their sum; Qwen3.5 always does this."""
    if not config.equals("model_type", "qwen3_next", ""):
        config.require("norm_topk_prob", True, True)
    return config.flag("norm_topk_prob", True)


def _feed_forward(config: CheckpointConfig, num_layers: int, experts: ExpertsSizes | None) -> str:
    """Return each layer's pattern symbol for its feed-forward part: "-" for dense, "E" for MoE."""
    if experts is None:
        return "-" * num_layers
    step, dense = config.integer("decoder_sparse_step", 1), config.indices("mlp_only_layers", num_layers)
    return "".join("-" if layer in dense or (layer + 1) % step else "E" for layer in range(num_layers))


def _dense_size(config: CheckpointConfig, feed_forward: str, experts: ExpertsSizes | None) -> int:
    if "-" in feed_forward or experts is None or experts.shared_hidden_size is None:
        return config.integer("intermediate_size")
    return experts.shared_hidden_size  # unused, and some configurations lack intermediate_size


def _projections(architecture: HybridArchitecture, in_proj: str, prefix: str) -> Placements:
    """Return the destinations of two stored projections, [q | k | v | z] and [b | a], with rows grouped by key head."""
    return {
        f"{prefix}in_proj_qkvz.weight": _by_key_head(architecture, in_proj, range(4)),
        f"{prefix}in_proj_ba.weight": _by_key_head(architecture, in_proj, range(4, 6)),
    }


def _by_key_head(architecture: HybridArchitecture, in_proj: str, sections: range) -> tuple[Placement, ...]:
    sizes = architecture.recurrent
    assert isinstance(sizes, GatedDeltaSizes)
    heads, rows = sizes.num_key_heads, in_proj_sections(architecture)

    def of_each_head(section: int) -> Callable[[Tensor], Tensor]:
        start, width = sum(rows[sections.start : section]) // heads, rows[section] // heads
        return lambda tensor: tensor.unflatten(0, (heads, -1))[:, start : start + width].flatten(0, 1)

    return tuple(
        Placement(in_proj, Split(0), rows=of_each_head(section), view=section_view(architecture, section, section + 1))
        for section in sections
    )


def _mixture(architecture: HybridArchitecture, target: str, prefix: str) -> Placements:
    assert architecture.experts is not None
    placements: Placements = {
        f"{prefix}gate.weight": (Placement(f"{target}router.weight"),),
        f"{prefix}shared_expert_gate.weight": (Placement(f"{target}shared_experts.gate_weight"),),
        **gated_mlp_placements(f"{target}shared_experts.", f"{prefix}shared_expert."),
    }
    for expert in range(architecture.experts.num_experts):
        placements |= gated_mlp_placements(f"{target}experts.local_experts.{expert}.", f"{prefix}experts.{expert}.")
    return placements
