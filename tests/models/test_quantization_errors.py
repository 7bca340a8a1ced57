"""An unsupported quantized checkpoint is refused in one line, before a model is built."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face, read_sizes
from tests.command_line.command_runs import run_here
from tests.models.checkpoint_edits import assert_refused, copy_of, set_fields, tensors_of, write_tensors
from tests.models.quantized_kinds import KINDS
from tests.models.quantized_writer import Stored, quantize, read_stored, stored_as, write_files

ADVICE = "this quantization is not supported: give an FP8, NVFP4, MXFP4 or BF16 checkpoint of the same model instead"
_INT4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}

CONFIGS: dict[str, dict[str, Any]] = {
    "INT4 (compressed-tensors)": {"quant_method": "compressed-tensors", "format": "pack-quantized", **_INT4},
    "4-bit (AWQ)": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "4-bit (GPTQ)": {"quant_method": "gptq", "bits": 4, "desc_act": False},
    "8-bit (bitsandbytes)": {"load_in_4bit": False, "load_in_8bit": True},
    "4-bit (bitsandbytes)": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "hqq": {"quant_method": "hqq"},
    "an unknown kind": {"beams": 3},
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "INT4 (AWQ)": ("hf_quant_config.json", {"producer": {"name": "awq"}, "quantization": {"quant_algo": "INT4"}}),
    "4-bit (GPTQ)": ("quantize_config.json", {"bits": 4, "desc_act": True}),
    "4-bit (AWQ)": ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True}),
}


@pytest.fixture
def directory(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """Copy an unquantized checkpoint."""
    return copy_of(checkpoints["nemotron_h"], tmp_path)


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_error_names_the_unsupported_quantization(kind: str, field: str, directory: Path) -> None:
    set_fields(directory, **{field: CONFIGS[kind]})
    assert_refused(directory, f"{directory / 'config.json'}: {field}={kind} is not supported; {ADVICE}")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("kind", FILES)
def test_error_names_a_separate_quantization_file(kind: str, directory: Path) -> None:
    name, content = FILES[kind]
    (directory / name).write_text(json.dumps(content))
    assert_refused(directory, f"{directory / name} declares {kind}; {ADVICE}")


@pytest.mark.usefixtures("no_model_is_built")
def test_error_for_a_gguf_directory_names_the_format(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-Q4_K_M.gguf")
    assert_refused(directory, f"{directory / 'model-Q4_K_M.gguf'} is a GGUF file; {ADVICE}")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize(
    ("dtype", "message"),
    [(torch.float8_e4m3fn, "F8_E4M3 (FP8)"), (torch.float8_e5m2, "F8_E5M2 (FP8)"), (torch.uint8, "U8 (packed NVFP4")],
    ids=str,
)
def test_error_names_a_tensor_with_an_unsupported_8_bit_dtype(
    dtype: torch.dtype, message: str, directory: Path
) -> None:
    tensors, name = tensors_of(directory), "backbone.layers.0.mixer.in_proj.weight"
    write_tensors(directory, tensors | {name: tensors[name].to(dtype)})
    assert_refused(directory, f"tensor {name} is of type {message}", "config.json has no quantization_config")


def test_command_with_an_unsupported_checkpoint_exits_with_status_2(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_fields(directory, quantization_config=CONFIGS["4-bit (AWQ)"])
    lines = directory.parent / "lines.jsonl"
    lines.write_text('{"prompt_tokens": [1, 2, 3]}\n')
    finished = run_here(capsys, "--hf-model", directory, "--prompts", lines)
    assert finished.status == 2 and finished.stderr.count("\n") == 1
    assert "4-bit (AWQ) is not supported" in finished.stderr and ADVICE in finished.stderr


def test_unquantized_config_is_accepted(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_fields(directory, quantization_config=None)
    lines = directory.parent / "lines.jsonl"
    lines.write_text('{"prompt_tokens": [1, 2, 3], "num_tokens_to_generate": 2}\n')
    finished = run_here(capsys, "--hf-model", directory, "--prompts", lines, "--no-prefix-caching")
    assert finished.status == 0, finished.stderr


VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "fmt='e5m2'": ("transformers F32", {"fmt": "e5m2"}),
    "scale_fmt='e3m4'": ("transformers F32", {"scale_fmt": "e3m4"}),
    "expert_dtype='fp4'": ("transformers F32", {"expert_dtype": "fp4"}),
    "weight_block_size=[128]": ("transformers F32", {"weight_block_size": [128]}),
    "weight_block_size=[0, 128]": ("transformers F32", {"weight_block_size": [0, 128]}),
    "quant_algo='NVFP4_AWQ'": ("modelopt NVFP4", {"quant_algo": "NVFP4_AWQ"}),
    "group_size=32": ("modelopt NVFP4", {"group_size": 32}),
    "quantized_layers.a.quant_algo='W4A8_AWQ'": (
        "modelopt mixed",
        {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
    ),
    "quantized_layers.a='FP8'": ("modelopt mixed", {"quantized_layers": {"a": "FP8"}}),
    "format='marlin-24'": ("compressed-tensors FP8 a row", {"format": "marlin-24"}),
    "sparsity_config.format='sparse-24-bitmask'": (
        "compressed-tensors FP8 a row",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
    ),
    "transform_config={'config_groups': {}}": (
        "compressed-tensors FP8 a row",
        {"transform_config": {"config_groups": {}}},
    ),
}
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "num_bits=6": ("compressed-tensors NVFP4", {"num_bits": 6}),
    "group_size=64": ("compressed-tensors NVFP4", {"group_size": 64}),
    "type='nf4'": ("compressed-tensors NVFP4", {"type": "nf4"}),
    "symmetric=False": ("compressed-tensors FP8 a row", {"symmetric": False}),
    "dynamic=True": ("compressed-tensors FP8 a row", {"dynamic": True}),
    "strategy='token'": ("compressed-tensors FP8 a row", {"strategy": "token"}),
    "block_structure='128x128'": ("compressed-tensors FP8 in blocks", {"block_structure": "128x128"}),
}


@pytest.mark.parametrize("message", VALUES)
def test_error_names_field_and_value_of_an_unknown_quantization(message: str, directory: Path) -> None:
    kind, fields = VALUES[message]
    config = KINDS[kind].config
    assert config is not None
    set_fields(directory, quantization_config={**config, **fields})
    assert_refused(directory, f"{directory / 'config.json'}: quantization_config.{message}")


@pytest.mark.parametrize("message", WEIGHTS)
def test_error_names_field_and_value_in_a_quantization_group(message: str, directory: Path) -> None:
    kind, fields = WEIGHTS[message]
    config = KINDS[kind].config
    assert config is not None
    group = config["config_groups"]["group_0"]
    groups = {"group_0": group | {"weights": group["weights"] | fields}}
    set_fields(directory, quantization_config={**config, "config_groups": groups})
    assert_refused(
        directory, f"{directory / 'config.json'}: quantization_config.config_groups.group_0.weights.{message}"
    )


def test_error_names_field_and_value_in_a_separate_file(directory: Path) -> None:
    file = directory / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    assert_refused(directory, f"{file}: quantization.quant_algo='W4A16_AWQ' is not supported, only 'FP8'")


def test_reading_the_architecture_refuses_an_unsupported_quantization(directory: Path) -> None:
    set_fields(directory, quantization_config=CONFIGS["4-bit (GPTQ)"])
    with pytest.raises(ValueError, match=re.escape("4-bit (GPTQ) is not supported")):
        read_sizes(directory)


X = "backbone.layers.0.mixer.out_proj.weight"
Edit = Callable[[dict[str, Stored]], object]


def _shaped(name: str, cut: Callable[[Any], Any]) -> Edit:
    return lambda stored: stored.update({name: Stored(stored[name].type, cut(stored[name].bits))})


def _typed(name: str, type_: str) -> Edit:
    return lambda stored: stored.update({name: Stored(type_, np.zeros(stored[name].bits.shape, np.uint32))})


DAMAGES: dict[str, tuple[str, Edit]] = {
    f"tensor {X} lacks its scale (FP8 in blocks of 128 x 128), such as {X}_scale_inv or {X}_scale": (
        "transformers F32",
        lambda stored: stored.pop(f"{X}_scale_inv"),
    ),
    f"tensor {X}_scale_inv has shape (2,), but {X} of ": ("transformers F32", _shaped(f"{X}_scale_inv", np.ravel)),
    f"tensor {X}_scale_inv has shape (1, 1), but {X} of ": (
        "transformers F32",
        _shaped(f"{X}_scale_inv", lambda scale: scale[:1, :1]),
    ),
    f"tensor {X}_scale_inv is of type I32, but {X} needs BF16 or F16 or F32 or F8_E8M0": (
        "transformers F32",
        _typed(f"{X}_scale_inv", "I32"),
    ),
    f"tensor {X} has both {X}_scale_inv and {X}_scale": (
        "transformers F32",
        lambda stored: stored.update({f"{X}_scale": stored[f"{X}_scale_inv"]}),
    ),
    f"tensor {X}_scale_2 is not used by FP8 in blocks of 128 x 128": (
        "transformers F32",
        lambda stored: stored.update({f"{X}_scale_2": stored_as("F32", 1.0)}),
    ),
    f"tensor {X} is of type BF16, but has the scale {X}_scale_inv": (
        "transformers F32",
        lambda stored: stored.update({X: stored_as("BF16", np.zeros(stored[X].bits.shape))}),
    ),
    f"tensor {X} is of type F8_E5M2, which is not supported: ": ("transformers F32", _typed(X, "F8_E5M2")),
    f"tensor {X} is of type U8, which is not supported: ": ("transformers F32", _typed(X, "U8")),
    f"tensor {X} has shape (8,), but a quantized": ("transformers F32", _shaped(X, lambda codes: codes.ravel()[:8])),
    f"tensor {X}_packed lacks its global scale (NVFP4), such as {X}_scale_2 or {X}_global_scale": (
        "compressed-tensors NVFP4",
        lambda stored: stored.pop(f"{X}_global_scale"),
    ),
    f"tensor {X}_scale_2 has shape (3,), but {X} needs a single value": (
        "modelopt NVFP4",
        _shaped(f"{X}_scale_2", lambda factor: np.repeat(factor, 3)),
    ),
    f"tensor {X}_scale_2 is of type I32, but {X} needs F32": ("modelopt NVFP4", _typed(f"{X}_scale_2", "I32")),
    f"tensor {X}_scale has shape ": ("modelopt NVFP4", _shaped(f"{X}_scale", lambda scale: scale[:, :-1])),
    f"tensor {X}_packed is the same weight as {X}_blocks; remove one of them": (
        "compressed-tensors MXFP4",
        lambda stored: stored.update({f"{X}_blocks": stored[f"{X}_packed"]}),
    ),
    f"1 tensors: {X}_scale, which the model does not have": (
        "modelopt FP8",
        lambda stored: stored.pop(X),
    ),
}


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("message", DAMAGES)
def test_error_names_damaged_codes_or_scales_before_building_a_model(message: str, wide: Path, tmp_path: Path) -> None:
    kind, damage = DAMAGES[message]
    directory = copy_of(wide, tmp_path)
    quantize(directory, KINDS[kind], num_shards=1)
    stored = read_stored(directory / "model.safetensors")
    damage(stored)
    write_files(directory, stored, num_shards=1)
    assert_refused(directory, message)


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf])
def test_error_names_a_weight_whose_activation_scale_is_unusable(scale: float, wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    quantize(directory, KINDS["modelopt FP8"], num_shards=1)
    stored = read_stored(directory / "model.safetensors")
    stored[f"{X.removesuffix('weight')}input_scale"] = stored_as("F32", scale)
    write_files(directory, stored, num_shards=1)
    message = f"tensor {X}: the scale of its activations must be positive and finite, found {scale}; fetch"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_hugging_face(directory)
    assert load_hugging_face(directory, activation_dtype="bf16").num_kept


@pytest.mark.usefixtures("no_model_is_built")
def test_error_names_a_truncated_file(wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    quantize(directory, KINDS["transformers F32"])
    file = directory / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused(directory, f"{file} is damaged or incomplete")


@pytest.mark.usefixtures("no_model_is_built")
def test_error_for_codes_that_do_not_match_the_config_names_the_config(wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    quantize(directory, KINDS["compressed-tensors NVFP4"])
    set_fields(directory, hidden_size=96)
    assert_refused(directory, ", but the model needs ", str(directory / "config.json"))
