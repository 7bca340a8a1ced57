"""A configuration means the same under the field names of every version of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_mamba_cache.models.checkpoints.checkpoint_family import CheckpointFamily
from megatron_mamba_cache.models.checkpoints.hugging_face import read_sizes
from tests.models.checkpoint_edits import assert_refused, copy_of, edit_json

OLDER_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}

Edit = Callable[[dict[str, Any]], dict[str, Any]]


def named(**names: str) -> Edit:
    """Return an edit that renames fields."""
    return lambda config: {names.get(name, name): value for name, value in config.items()}


def older_kinds(field: str) -> Edit:
    """Return an edit that gives layer types their older names."""
    return lambda config: config | {field: [OLDER_KINDS.get(kind, kind) for kind in config[field]]}


def as_pattern(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config.pop("layers_block_type")
    return config | {"hybrid_override_pattern": "".join(map(SYMBOLS.get, kinds)), "num_hidden_layers": len(kinds)}


def theta_alone(**more: Any) -> Edit:
    """Return an edit that writes the rotary base as transformers 4 does."""
    return lambda config: config | {"rope_theta": config.pop("rope_parameters")["rope_theta"], **more}


def by_interval(config: dict[str, Any]) -> dict[str, Any]:
    """Write the interval of attention layers instead of each layer's type."""
    kinds = config.pop("layer_types")
    assert kinds.index("full_attention") == len(kinds) - 1
    return config | {"full_attention_interval": len(kinds)}


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Write the fields of the rotary embedding at the top level, as transformers 4 does."""
    rope = config.pop("rope_parameters")
    names = ("rope_theta", "partial_rotary_factor")
    return config | {name: rope[name] for name in names} | {"rope_scaling": None}


def without_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    assert config.pop("layer_types") == ["linear_attention"] * 3 + ["full_attention"]
    return config


EDITS: dict[str, tuple[str, Edit]] = {
    "layers as a pattern": ("nemotron_h", as_pattern),
    "layers with experts as a pattern": ("nemotron_h_moe", as_pattern),
    "older kinds of layers": ("nemotron_h", older_kinds("layers_block_type")),
    "general names": ("nemotron_h_moe", named(layers_block_type="layer_types", n_routed_experts="num_local_experts")),
    "Mamba sizes": (
        "nemotron_h",
        named(n_groups="mamba_n_groups", conv_kernel="mamba_d_conv", chunk_size="mamba_chunk_size"),
    ),
    "Mamba settings": ("nemotron_h", named(use_conv_bias="mamba_conv_bias", time_step_limit="mamba_dt_limit")),
    "Granite's layers": ("granite", named(layer_types="layers_block_type")),
    "Granite's older kinds of layers": ("granite_moe", older_kinds("layer_types")),
    "Granite's rotary base": ("granite", theta_alone(rope_scaling=None)),
    "Granite's rotary fields": ("granite_moe", named(rope_parameters="rope_scaling")),
    "Bamba's rotary fields": ("bamba", named(rope_parameters="rope_scaling")),
    "Qwen's layers by an interval": ("qwen3_5_moe", by_interval),
    "Qwen's layers by the usual interval": ("qwen3_5", without_layer_types),
    "Qwen's rotary fields": ("qwen3_5_moe", named(rope_parameters="rope_scaling")),
    "Qwen's rotary fields of version 4": ("qwen3_next", as_version_4),
}


def edited(directory: Path, edit: Edit) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    return directory


@pytest.mark.parametrize(("family", "edit"), EDITS.values(), ids=EDITS)
def test_field_names_of_other_transformers_versions_are_equivalent(
    family: str, edit: Edit, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = edited(copy_of(checkpoints[family], tmp_path), edit)
    assert (directory / "config.json").read_text() != (checkpoints[family] / "config.json").read_text()
    assert read_sizes(directory) == read_sizes(checkpoints[family])
    theirs, usual = (AutoConfig.from_pretrained(source).to_diff_dict() for source in (directory, checkpoints[family]))
    assert {name: theirs.get(name) for name in usual} == usual  # the installed version reads it so too


@pytest.mark.parametrize(
    "edit",
    [
        theta_alone(),
        theta_alone(rope_scaling=None, partial_rotary_factor=1.0),
        lambda config: config | {"partial_rotary_factor": 0.25},
        lambda config: config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        lambda config: config | {"rope_parameters": None, "rope_scaling": {"type": "default"}, "rope_theta": 2e4},
    ],
)
@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "qwen3_5"])
def test_rotary_channels_and_base_match_transformers(
    family: str, edit: Edit, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = edited(copy_of(checkpoints[family], tmp_path), edit)
    attention, theirs = read_sizes(directory)[0].attention, AutoConfig.from_pretrained(directory).rope_parameters
    assert attention.rotary_base == theirs["rope_theta"]
    assert attention.rotary_percent == theirs["partial_rotary_factor"]


def mrope(config: dict[str, Any]) -> None:
    """Add the fields for multimodal rotary embeddings, which all published Qwen3.5 configurations have."""
    config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}


def older_mrope(config: dict[str, Any]) -> None:
    config["rope_scaling"] = config.pop("rope_parameters") | {"type": "mrope", "mrope_section": [2, 1, 1]}
    config["rope_scaling"].pop("rope_type")


@pytest.mark.parametrize("edit", [mrope, older_mrope])
def test_image_position_settings_do_not_change_the_text_model(
    edit: Callable[[dict[str, Any]], None], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints["qwen3_5"], tmp_path)
    edit_json(directory / "config.json", edit)
    assert read_sizes(directory) == read_sizes(checkpoints["qwen3_5"])


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("family", ["nemotron_h", "bamba", "granite", "qwen3_5"])
def test_weight_dtype_is_read_from_either_field(
    family: str, field: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def edit(config: dict[str, Any]) -> dict[str, Any]:
        config.pop("dtype")
        return config | {field: "bfloat16"}

    assert CheckpointFamily.read(checkpoints[family]).dtype is torch.float32
    assert CheckpointFamily.read(edited(copy_of(checkpoints[family], tmp_path), edit)).dtype is torch.bfloat16


@pytest.mark.usefixtures("no_model_is_built")
def test_errors_use_the_field_names_in_the_config_file(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_of(checkpoints["nemotron_h"], tmp_path)
    edit_json(directory / "config.json", lambda config: config.update(mamba_n_groups="x"))
    assert_refused(directory, f"{directory / 'config.json'}: mamba_n_groups='x', but must be an integer between 1 and")
