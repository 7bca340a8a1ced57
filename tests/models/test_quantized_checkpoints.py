"""A quantized checkpoint is refused in one line: what it is, that it is not supported, what to give instead."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line.command_runs import run_here
from tests.models.checkpoint_edits import assert_refused, copy_of, set_fields, tensors_of, write_tensors

ADVICE = "quantized checkpoints are not supported: give the BF16 checkpoint of the same model instead"
_FLOAT8 = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}}}
_INT4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}

CONFIGS: dict[str, dict[str, Any]] = {
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    "FP8 (modelopt)": {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}, **_FLOAT8},
    "NVFP4 (modelopt)": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}},
    "FP8 (compressed-tensors)": {"quant_method": "compressed-tensors", "format": "float-quantized", **_FLOAT8},
    "NVFP4 (compressed-tensors)": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "INT4 (compressed-tensors)": {"quant_method": "compressed-tensors", "format": "pack-quantized", **_INT4},
    "4-bit (AWQ)": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "4-bit (GPTQ)": {"quant_method": "gptq", "bits": 4, "desc_act": False},
    "8-bit (bitsandbytes)": {"load_in_4bit": False, "load_in_8bit": True},
    "4-bit (bitsandbytes)": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "MXFP4": {"quant_method": "mxfp4"},
    "FP8 KV cache (modelopt)": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    "hqq": {"quant_method": "hqq"},
    "an unknown kind": {"beams": 3},
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "NVFP4 (modelopt)": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}},
    ),
    "FP8": ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
    "4-bit (GPTQ)": ("quantize_config.json", {"bits": 4, "desc_act": True}),
    "4-bit (AWQ)": ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True}),
}


@pytest.fixture
def directory(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """Copy a checkpoint that is not quantized."""
    return copy_of(checkpoints["nemotron_h"], tmp_path)


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_configuration_is_named(kind: str, field: str, directory: Path) -> None:
    set_fields(directory, **{field: CONFIGS[kind]})
    assert_refused(directory, f"{directory / 'config.json'}: {field}={kind} is not supported; {ADVICE}")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_says_so_beside_the_configuration_is_named(kind: str, directory: Path) -> None:
    name, content = FILES[kind]
    (directory / name).write_text(json.dumps(content))
    assert_refused(directory, f"{directory / name}: {kind}; {ADVICE}")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.float8_e4m3fn, "F8_E4M3 (FP8)"), (torch.float8_e5m2, "F8_E5M2 (FP8)"), (torch.uint8, "U8 (packed NVFP4")],
    ids=str,
)
def test_a_tensor_of_eight_bits_is_named_with_its_type(dtype: torch.dtype, said: str, directory: Path) -> None:
    tensors, name = tensors_of(directory), "backbone.layers.0.mixer.in_proj.weight"
    write_tensors(directory, tensors | {name: tensors[name].to(dtype)})
    assert_refused(directory, f"tensor {name} is of type {said}", ADVICE)


def test_the_command_ends_with_that_line_and_status_2(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_fields(directory, quantization_config=CONFIGS["NVFP4 (modelopt)"])
    lines = directory.parent / "lines.jsonl"
    lines.write_text('{"prompt_tokens": [1, 2, 3]}\n')
    finished = run_here(capsys, "--hf-model", directory, "--prompts", lines)
    assert finished.status == 2 and finished.stderr.count("\n") == 1
    assert "NVFP4 (modelopt) is not supported" in finished.stderr and ADVICE in finished.stderr


def test_a_configuration_without_quantization_is_not_refused(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_fields(directory, quantization_config=None)
    lines = directory.parent / "lines.jsonl"
    lines.write_text('{"prompt_tokens": [1, 2, 3], "num_tokens_to_generate": 2}\n')
    finished = run_here(capsys, "--hf-model", directory, "--prompts", lines, "--no-prefix-caching")
    assert finished.status == 0, finished.stderr
