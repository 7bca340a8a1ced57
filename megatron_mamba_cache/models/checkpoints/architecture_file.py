"""The architecture of a model as a JSON file next to a Megatron checkpoint's weights."""

import json
from dataclasses import asdict
from pathlib import Path

from ..architecture import (
    ACTIVATIONS,
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    GatedDeltaSizes,
    HybridArchitecture,
    MambaSizes,
)
from .checkpoint_config import MOST_EXPERTS, CheckpointConfig, read_json_object

ARCHITECTURE_FILE = "hybrid_architecture.json"

_MAMBA, _GATED_DELTA = "mamba", "gated_delta"
"""The section with the sizes of recurrent layers has the name of their kind."""


def write_architecture(architecture: HybridArchitecture, directory: Path) -> None:
    """Write the file into a directory."""
    kind = _MAMBA if isinstance(architecture.recurrent, MambaSizes) else _GATED_DELTA
    fields = asdict(architecture)
    sections = {kind if name == "recurrent" else name: value for name, value in fields.items()}
    text = json.dumps(sections, indent=2)
    (directory / ARCHITECTURE_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_architecture(directory: Path) -> HybridArchitecture:
    """Read the file of a directory.

    Raises:
        ValueError: Naming the file if it cannot be read, and any field that is missing or of a wrong type.
    """
    path = directory / ARCHITECTURE_FILE
    fields = CheckpointConfig(read_json_object(path), str(path))
    return HybridArchitecture(
        pattern=fields.text("pattern"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        max_sequence_length=fields.integer("max_sequence_length"),
        norm_eps=fields.number("norm_eps"),
        recurrent=_recurrent(fields),
        attention=_attention(fields.section("attention")),
        feed_forward=_feed_forward(fields.section("feed_forward")),
        experts=_experts(fields.section("experts")) if fields.has("experts") else None,
        tie_embeddings=fields.flag("tie_embeddings", False),
        zero_centered_norms=fields.flag("zero_centered_norms", False),
        input_multiplier=fields.factor("input_multiplier", 1.0),
        residual_multiplier=fields.factor("residual_multiplier", 1.0),
        output_multiplier=fields.factor("output_multiplier", 1.0),
    )


def _recurrent(fields: CheckpointConfig) -> MambaSizes | GatedDeltaSizes:
    if fields.has(_MAMBA) and fields.has(_GATED_DELTA):
        raise fields.error(f"has the sections {_MAMBA!r} and {_GATED_DELTA!r}, but must have one of them")
    return _gated_delta(fields.section(_GATED_DELTA)) if fields.has(_GATED_DELTA) else _mamba(fields.section(_MAMBA))


def _gated_delta(fields: CheckpointConfig) -> GatedDeltaSizes:
    return GatedDeltaSizes(
        num_key_heads=fields.integer("num_key_heads"),
        num_value_heads=fields.integer("num_value_heads"),
        key_head_dim=fields.integer("key_head_dim"),
        value_head_dim=fields.integer("value_head_dim"),
        d_conv=fields.integer("d_conv", 4),
        chunk_size=fields.integer("chunk_size", 64),
    )


def _mamba(fields: CheckpointConfig) -> MambaSizes:
    return MambaSizes(
        num_heads=fields.integer("num_heads"),
        head_dim=fields.integer("head_dim"),
        state_dim=fields.integer("state_dim"),
        num_groups=fields.integer("num_groups"),
        ssm_chunk_size=fields.integer("ssm_chunk_size"),
        d_conv=fields.integer("d_conv", 4),
        conv_bias=fields.flag("conv_bias", True),
        time_step_limit=fields.limits("time_step_limit"),
        gated_norm_eps=fields.number("gated_norm_eps") if fields.has("gated_norm_eps") else None,
    )


def _attention(fields: CheckpointConfig) -> AttentionSizes:
    return AttentionSizes(
        num_heads=fields.integer("num_heads"),
        num_kv_heads=fields.integer("num_kv_heads"),
        head_dim=fields.integer("head_dim"),
        scale=fields.number("scale") if fields.has("scale") else None,
        rotary_base=fields.number("rotary_base") if fields.has("rotary_base") else None,
        rotary_percent=fields.number("rotary_percent", 1.0),
        has_output_gate=fields.flag("has_output_gate", False),
        has_head_norms=fields.flag("has_head_norms", False),
    )


def _feed_forward(fields: CheckpointConfig) -> FeedForwardSizes:
    activation = fields.one_of("activation", ACTIVATIONS)
    return FeedForwardSizes(fields.integer("hidden_size"), activation, fields.flag("gated"))


def _experts(fields: CheckpointConfig) -> ExpertsSizes:
    return ExpertsSizes(
        num_experts=fields.integer("num_experts", most=MOST_EXPERTS),
        top_k=fields.integer("top_k"),
        hidden_size=fields.integer("hidden_size"),
        shared_hidden_size=fields.integer("shared_hidden_size") if fields.has("shared_hidden_size") else None,
        score=fields.one_of("score", ("sigmoid", "softmax")),
        num_groups=fields.integer("num_groups", 1),
        top_groups=fields.integer("top_groups", 1),
        num_scoring=fields.integer("num_scoring", 2),
        normalizes=fields.flag("normalizes", True),
        scaling=fields.number("scaling", 1.0),
        latent_size=fields.integer("latent_size") if fields.has("latent_size") else None,
        has_shared_gate=fields.flag("has_shared_gate", False),
    )
