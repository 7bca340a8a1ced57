"""Any JSON value in any field of a configuration gives a model or a `ValueError`, and a wrong type costs no memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mamba_cache.models import hybrid_model
from megatron_mamba_cache.models.checkpoints.checkpoint_config import CheckpointConfig
from megatron_mamba_cache.models.checkpoints.checkpoint_family import FAMILIES as MODULES
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.models.checkpoint_edits import copy_of, set_fields
from tests.models.tiny_checkpoints import FAMILIES, MAMBA_FAMILIES

NEVER_RIGHT: tuple[Any, ...] = (
    "x",
    -1,
    "",
    -1.5,
    [None],
    [[1]],
    {"x": {}},
    float("nan"),
    float("-inf"),
    1e400,
    10**400,
)
SOMETIMES_RIGHT: tuple[Any, ...] = ([], {}, None, True, False, 0, 1.5)
FACTORS = {"embedding_multiplier", "residual_multiplier", "logits_scaling"}
"""Fields that are never negative in a known model, but compute with negative values."""
OBJECTS = {"rope_parameters", "rope_scaling"}
MAY_BE_ZERO = {"num_local_experts", "num_experts"}
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record each model whose construction begins."""
    names: list[str] = []

    class NotedModel(hybrid_model.MambaModel):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            names.append("begun")
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(hybrid_model, "MambaModel", NotedModel)
    return names


def fields_read(directory: Path) -> set[str]:
    """Return the names of all fields that affect the architecture."""
    names: set[str] = set()

    class Noting(dict):  # of a JSON object
        def get(self, name: str, default: Any = None) -> Any:
            names.add(name)
            return super().get(name, default)

    fields = Noting(json.loads((directory / "config.json").read_text()))
    MODULES[fields["model_type"]].architecture_of(CheckpointConfig(fields, "config.json"))
    return names


def refusal_of(directory: Path) -> str | None:
    """Return the message of the `ValueError` that loading raises; None if it succeeds. Other errors are not caught."""
    try:
        load_hugging_face(directory, torch.float32)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_invalid_config_value_is_refused_before_the_model_is_built(
    family: str, checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    config = directory / "config.json"
    content, names = config.read_text(), fields_read(directory)
    of_recurrence = "time_step_limit" if family in MAMBA_FAMILIES else "linear_key_head_dim"
    assert {"hidden_size", "vocab_size", of_recurrence, "tie_word_embeddings"} <= names
    for name in sorted(names | {"model_type"}):
        for value in NEVER_RIGHT:
            if name in OBJECTS and isinstance(value, dict):
                continue  # fields that mean nothing
            if name in FACTORS and value in (-1, -1.5):
                continue
            set_fields(directory, **{name: value})
            refusal = refusal_of(directory)
            assert refusal is not None, (name, value)
            assert refusal.startswith(f"{config}: ") and name in refusal, (name, value, refusal)
            config.write_text(content)
    assert not begun


@pytest.mark.parametrize("family", FAMILIES)
def test_plausible_config_value_builds_a_model_or_is_refused(
    family: str, checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    config = directory / "config.json"
    content, outcomes = config.read_text(), set()
    for name in sorted(fields_read(directory) | {"model_type"}):
        for value in SOMETIMES_RIGHT:
            set_fields(directory, **{name: value})
            begun.clear()
            refusal = refusal_of(directory)
            outcomes.add(refusal is None)
            if refusal is not None and not begun:
                assert str(config) in refusal or "checkpoint" in refusal, (name, value, refusal)
            # Only null, which takes a default, may turn out to be another size than the tensors have.
            assert refusal is None or not begun or value is None, (name, value, refusal)
            config.write_text(content)
    assert outcomes == {True, False}


@pytest.mark.parametrize("family", ["bamba", "granite", "qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("field", ROTARY)
def test_invalid_rotary_embedding_fields_are_refused(
    field: str, family: str, checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    for value in (*NEVER_RIGHT, [], {}, True, 0):
        set_fields(directory, rope_parameters=ROTARY | {field: value}, position_embedding_type="rope")
        refusal = refusal_of(directory)
        if family == "granite" and field == "partial_rotary_factor":
            assert refusal is None  # it rotates whole heads
            continue
        assert refusal is not None and str(directory / "config.json") in refusal and field in refusal, (value, refusal)
        assert not begun


def test_rotary_channels_that_do_not_form_pairs_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints["bamba"], tmp_path)
    for factor in (0.01, 1.5, 3 / 8):
        set_fields(directory, rope_parameters=ROTARY | {"partial_rotary_factor": factor})
        refusal = refusal_of(directory)
        assert refusal is not None and "must rotate an even number of channels per head" in refusal
    assert not begun


def test_inconsistent_mamba_head_sizes_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints["bamba"], tmp_path)
    for fields in ({"mamba_n_heads": 7}, {"mamba_d_head": 3}):
        content = (directory / "config.json").read_text()
        set_fields(directory, **fields)
        refusal = refusal_of(directory)
        assert refusal is not None and "must equal mamba_expand * hidden_size" in refusal
        (directory / "config.json").write_text(content)
    assert not begun


@pytest.mark.parametrize(
    "limit",
    [3, "inf", [0.1], [0.1, 0.2, 0.3], [0.4, 0.1], [-1, 1], ["x", 1], [None, 1], [{}, {}]],
)
def test_time_step_limit_must_be_an_ascending_pair(
    limit: Any, checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints["granite"], tmp_path)
    set_fields(directory, time_step_limit=limit)
    message = f"time_step_limit={limit!r}, but must be a pair of ascending non-negative numbers"
    assert refusal_of(directory) == f"{directory / 'config.json'}: {message}"
    assert not begun


@pytest.mark.parametrize("family", FAMILIES)
def test_error_for_a_huge_dimension_names_the_field(
    family: str, checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    config = directory / "config.json"
    content, fields = config.read_text(), json.loads(config.read_text())
    sizes = [name for name in fields_read(directory) - {"n_shared_experts"} if type(fields.get(name)) is int]
    assert {"hidden_size", "vocab_size", "num_attention_heads"} <= set(sizes)
    for name in sizes:
        many = ("num_local_experts", "n_routed_experts", "num_experts", "num_hidden_layers")
        most = 8192 if name in many else 2**24
        for value in (most + 1, 2**24 + 1, 10**13, 10**30):
            set_fields(directory, **{name: value})
            message = f", but must be an integer between {0 if name in MAY_BE_ZERO else 1} and {most}"
            if name == "num_hidden_layers" and "layer_types" in fields:
                message = f" is not supported, only {len(fields['layer_types'])} is"
            assert refusal_of(directory) == f"{config}: {name}={value}{message}"
            config.write_text(content)
    assert not begun


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("nemotron_h", {"layers_block_type": ["mamba"] * 8193}, "layers_block_type has 8193 entries, but must have at"),
        ("granite", {"layer_types": ["mamba"] * 8193}, "layer_types has 8193 entries, but must have at most 8192"),
        ("nemotron_h", {"hybrid_override_pattern": "M" * 9000}, "hybrid_override_pattern has 9000 characters"),
        ("granite", {"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported, only 3"),
        (
            "granite",
            {"layer_types": ["x" * 999, 1]},
            f"layer_types=['{'x' * 198}..., but must be a non-empty list with",
        ),
        ("granite", {"logits_scaling": 1e-320}, "but must be a number of magnitude between 1e-30 and 1e+30"),
        ("granite", {"time_step_limit": [0, 10**400]}, "but must be a pair of ascending non-negative numbers"),
        ("granite", {"time_step_limit": ["inf", "inf"]}, "but must be a pair of ascending non-negative numbers"),
        ("granite", {"time_step_limit": [0.1, 1e39]}, "but must be a pair of ascending non-negative numbers"),
        ("granite", {"layer_types": ["x" * 999, "y"]}, f"has unknown entries ['{'x' * 198}...; known entries are"),
        ("granite", {"hidden_size": "a\n" * 300}, "..., but must be an integer between 1 and 16777216"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported, only True"),
    ],
)
def test_error_for_extreme_config_values_is_one_short_line(
    family: str, fields: dict[str, Any], message: str, checkpoints: dict[str, Path], tmp_path: Path, begun: list[str]
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    if "hybrid_override_pattern" in fields:
        set_fields(directory, layers_block_type=None)
    set_fields(directory, **fields)
    refusal = refusal_of(directory)
    assert refusal is not None and message in refusal and len(refusal) < 500 and not begun


@pytest.mark.parametrize("error", [RuntimeError("[enforce fail] can't allocate memory"), MemoryError()], ids=repr)
def test_out_of_memory_error_names_the_largest_dimensions(
    error: Exception, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    directory = copy_of(checkpoints["nemotron_h"], tmp_path)
    set_fields(directory, intermediate_size=2**24)
    monkeypatch.setattr(hybrid_model, "MambaModel", fail)
    with pytest.raises(MemoryError, match=f"{directory / 'config.json'}: .* feed_forward.hidden_size={2**24}"):
        load_hugging_face(directory, torch.float32)


def test_other_torch_errors_are_not_reported_as_out_of_memory(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(hybrid_model, "MambaModel", fail)
    with pytest.raises(RuntimeError, match="no kernel image"):
        load_hugging_face(checkpoints["nemotron_h"], torch.float32)
