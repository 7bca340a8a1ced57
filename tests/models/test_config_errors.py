"""An unsupported or invalid configuration is refused with the names of its file and field."""

import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.utils import filter_repo_objects

from tests.models.checkpoint_edits import assert_refused, copy_of, drop_field, set_fields
from tests.models.tiny_checkpoints import FAMILIES

pytestmark = pytest.mark.usefixtures("no_model_is_built")

MAMBA_FIELDS = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state")
DELTA_FIELDS = tuple(
    f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
)
EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
REQUIRED_FIELDS = {
    "nemotron_h": (
        "intermediate_size",
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups",
        "num_key_value_heads",
    ),
    "nemotron_h_moe": (
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "bamba": (*MAMBA_FIELDS, "num_hidden_layers", "intermediate_size"),
    "granite": (*MAMBA_FIELDS, "layer_types", "shared_intermediate_size"),
    "granite_moe": ("num_experts_per_tok", "intermediate_size"),
    "qwen3_next": (*DELTA_FIELDS, *EXPERT_FIELDS, "num_key_value_heads"),
    "qwen3_5": (*DELTA_FIELDS, "intermediate_size", "num_key_value_heads"),
    "qwen3_5_moe": (*DELTA_FIELDS, *EXPERT_FIELDS),
}
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    *(("nemotron_h", {name: True}) for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}),
    ("nemotron_h", {"mlp_hidden_act": "swish"}),
    ("nemotron_h", {"moe_latent_size": 16}),
    ("nemotron_h_moe", {"n_shared_experts": 2}),
    ("nemotron_h_moe", {"num_experts_per_tok": 999}),
    ("nemotron_h_moe", {"scoring_func": "softmax"}),
    ("nemotron_h_moe", {"topk_method": "greedy"}),
    ("nemotron_h_moe", {"n_group": 997}),
    ("granite_moe", {"num_experts_per_tok": 999}),
    *(("bamba", {name: True}) for name in ("attention_bias", "mlp_bias", "mamba_proj_bias")),
    ("bamba", {"hidden_act": "gelu"}),
    *(("granite", {name: True}) for name in ("attention_bias", "mamba_proj_bias")),
    ("granite", {"hidden_act": "relu2"}),
    *((family, {"attention_bias": True}) for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe")),
    ("qwen3_next", {"hidden_act": "gelu"}),
    ("qwen3_5", {"attn_output_gate": False}),
    ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}),
    ("qwen3_5_moe", {"num_experts_per_tok": 999}),
]
UNKNOWN_LAYERS = [
    ("nemotron_h", "layers_block_type"),
    *((family, "layer_types") for family in ("granite", "granite_moe", "qwen3_next", "qwen3_5")),
]


@pytest.fixture
def copies(checkpoints: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Return a copy of each family's checkpoint."""
    return {family: copy_of(directory, tmp_path / family) for family, directory in checkpoints.items()}


def config_of(directory: Path) -> str:
    return str(directory / "config.json")


@pytest.mark.parametrize(("family", "fields"), UNSUPPORTED, ids=str)
def test_unsupported_config_setting_is_refused(family: str, fields: dict[str, Any], copies: dict[str, Path]) -> None:
    set_fields(copies[family], **fields)
    values = (f"{name}={value!r}" for name, value in fields.items())
    assert_refused(copies[family], config_of(copies[family]), "is not supported", *values)


@pytest.mark.parametrize(("family", "field"), UNKNOWN_LAYERS)
def test_unknown_layer_type_is_refused(family: str, field: str, copies: dict[str, Path]) -> None:
    set_fields(copies[family], **{field: ["full_attention", "hyena", "linear_attention"]})
    assert_refused(copies[family], config_of(copies[family]), field, "hyena", "linear_attention")


@pytest.mark.parametrize("pattern", ["XM*M", "M**M\n", "M|*M", "EM*X"])
@pytest.mark.parametrize("family", ["nemotron_h", "nemotron_h_moe"])
def test_unknown_symbol_in_a_layer_pattern_is_refused(family: str, pattern: str, copies: dict[str, Path]) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    experts |= {"moe_shared_expert_intermediate_size": 8}
    set_fields(copies[family], layers_block_type=None, hybrid_override_pattern=pattern, **experts)
    assert_refused(copies[family], config_of(copies[family]), f"layer pattern {pattern!r} has unknown symbols")


def test_error_for_impossible_expert_groups_names_the_field(copies: dict[str, Path]) -> None:
    directory = copies["nemotron_h_moe"]
    set_fields(directory, n_routed_experts=6, num_experts_per_tok=2, n_group=2, topk_group=3)
    assert_refused(directory, config_of(directory), "topk_group=3 is not supported; it must be at most n_group=2")
    set_fields(directory, num_experts_per_tok=4, topk_group=1)
    message = "num_experts_per_tok=4 is not supported; it must be at most 3, the number of experts that topk_group=1"
    assert_refused(directory, config_of(directory), message)


@pytest.mark.parametrize(
    ("family", "field"),
    [("nemotron_h_moe", "n_routed_experts"), ("granite_moe", "num_local_experts"), ("qwen3_5_moe", "num_experts")],
)
def test_error_for_a_huge_expert_count_names_the_field(family: str, field: str, copies: dict[str, Path]) -> None:
    set_fields(copies[family], **{field: 2**19})
    assert_refused(
        copies[family], f"{config_of(copies[family])}: {field}=524288, but must be an integer between", "8192"
    )


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3"])
@pytest.mark.parametrize("family", ["bamba", "granite", "qwen3_next", "qwen3_5"])
def test_scaled_rotary_embedding_is_refused(family: str, kind: str, copies: dict[str, Path]) -> None:
    set_fields(copies[family], rope_parameters={"rope_type": kind, "factor": 2.0}, position_embedding_type="rope")
    assert_refused(copies[family], config_of(copies[family]), f"rope_type={kind!r} is not supported")
    drop_field(copies[family], "rope_parameters")
    set_fields(copies[family], rope_scaling={"type": kind, "factor": 2.0})  # as older checkpoints say it
    assert_refused(copies[family], config_of(copies[family]), f"rope_type={kind!r} is not supported")


@pytest.mark.parametrize("model_type", ["zamba2", "falcon_h1", "jamba", "llama"])
def test_error_for_an_unknown_model_type_lists_supported_types(model_type: str, copies: dict[str, Path]) -> None:
    set_fields(copies["bamba"], model_type=model_type)
    assert_refused(
        copies["bamba"], config_of(copies["bamba"]), repr(model_type), "only 'bamba', 'granitemoehybrid', 'nemotron_h'"
    )


@pytest.mark.parametrize("model_type", ["kimi_linear", "olmo_hybrid", "lara_mini", "qwen3", "qwen3_moe"])
def test_unsupported_recurrent_and_qwen_models_are_refused(model_type: str, copies: dict[str, Path]) -> None:
    set_fields(copies["qwen3_5"], model_type=model_type)
    config, found = config_of(copies["qwen3_5"]), f"model_type={model_type!r} is not supported"
    assert_refused(copies["qwen3_5"], f"{config}: {found}, only", "'qwen3_5_moe_text', 'qwen3_5_text', 'qwen3_next'")


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "glm5_next_text"])
def test_unsupported_multimodal_language_models_are_refused(model_type: str, copies: dict[str, Path]) -> None:
    outer = model_type.removesuffix("_text")
    set_fields(copies["qwen3_5"], model_type=outer, text_config={"model_type": model_type})
    found = f"text_config.model_type={model_type!r} is not supported"
    assert_refused(copies["qwen3_5"], f"{config_of(copies['qwen3_5'])}: {found}, only", "'qwen3_5_text'")


def test_config_without_model_type_is_refused(copies: dict[str, Path]) -> None:
    drop_field(copies["bamba"], "model_type")
    assert_refused(copies["bamba"], config_of(copies["bamba"]), "'model_type' is missing")


@pytest.mark.parametrize("family", FAMILIES)
def test_config_with_a_missing_field_is_refused(family: str, copies: dict[str, Path]) -> None:
    config = copies[family] / "config.json"
    content = config.read_text()
    for name in (*REQUIRED_FIELDS[family], "vocab_size", "hidden_size", "num_attention_heads"):
        drop_field(copies[family], name)
        assert_refused(copies[family], f"{config}: {name!r} is missing")
        config.write_text(content)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_checkpoint_is_refused(family: str, copies: dict[str, Path]) -> None:
    set_fields(copies[family], quantization_config={"quant_method": "gptq"})
    assert_refused(copies[family], f"{config_of(copies[family])}: quantization_config=", "is not supported")


@pytest.mark.parametrize("content", ["", "[" * 100_000, "{", '{"model_type": "bamba"', "[]", '"bamba"', "null"])
def test_config_must_be_a_json_object(content: str, copies: dict[str, Path]) -> None:
    (copies["bamba"] / "config.json").write_text(content)
    assert_refused(copies["bamba"], config_of(copies["bamba"]), "JSON")


def test_directory_without_config_is_refused(copies: dict[str, Path]) -> None:
    (copies["bamba"] / "config.json").unlink()
    assert_refused(copies["bamba"], f"cannot read {config_of(copies['bamba'])}", "No such file")


def test_path_that_is_not_a_directory_is_refused(copies: dict[str, Path]) -> None:
    for source in (copies["bamba"] / "config.json", "/no/such/directory", "no-such-directory", "no/such/directory"):
        assert_refused(source, f"{source} is not a directory")


def test_unavailable_hub_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert_refused(
        "no-such-owner/no-such-model",
        f"no-such-owner/no-such-model is not a directory in {Path.cwd()}",
        "huggingface_hub cannot fetch",
    )


def test_hub_download_includes_every_file_that_loading_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = {"config.json", "model.safetensors", "merges.txt", "tokenizer.model", "chat_template.jinja"}

    def fetch(_: str, allow_patterns: list[str]) -> str:
        assert set(filter_repo_objects(read | {"model.bin"}, allow_patterns=allow_patterns)) == read
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert_refused("owner/model", str(tmp_path / "config.json"))


def test_hub_name_without_huggingface_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert_refused(
        "no-such-owner/no-such-model",
        "is not a directory",
        "huggingface_hub, which could fetch a model of that name, is not",
    )
