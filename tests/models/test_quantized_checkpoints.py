"""Quantized checkpoints load as their dequantized weights, bit for bit."""

import json
import logging
import math
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_mamba_cache.kernels.attention.kv_values import KVScales
from megatron_mamba_cache.mcore.linear import QuantizableLinear
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.self_attention import CachingSelfAttention
from megatron_mamba_cache.mcore.stacked_experts import StackedExperts
from megatron_mamba_cache.models.checkpoints import checkpoint_tensors
from megatron_mamba_cache.models.checkpoints.checkpoint_tensors import SafetensorsFiles
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face, read_sizes
from tests.models.checkpoint_edits import copy_of, tensors_of, write_tensors
from tests.models.counting_file import CountingFile
from tests.models.kept_weights import assert_means
from tests.models.quantized_kinds import KEPT, KINDS
from tests.models.quantized_writer import Kind, fp8, quantize, read_stored, write_files, write_plain
from tests.models.tensor_parallel_worker import assert_same_weights
from tests.models.tiny_checkpoints import wide_checkpoint

STACKED = (
    "transformers BF16",
    "transformers, a tensor",
    "modelopt FP8 a row",
    "modelopt NVFP4",
    "modelopt NVFP4 of a stack",
    "compressed-tensors NVFP4",
    "MXFP4 in blocks",
)
QWEN = ("qwen3_next-0", "qwen3_5-0", "qwen3_5-1", "qwen3_5_whole-1", "qwen3_5_moe-0", "qwen3_5_moe_whole-0")
STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}


def assert_loads_exactly(directory: Path, kind: str, keep: str = "$^", dtype: torch.dtype = torch.bfloat16) -> str:
    """Quantize a checkpoint, load it, compare it with the dequantized weights, and return its log line."""
    means = quantize(directory, KINDS[kind], keep)
    loaded = load_hugging_face(directory, dtype, dequantizes=True)
    assert_means(load_hugging_face(directory, dtype), loaded)
    write_plain(directory, means, STORED[dtype])
    assert_same_weights(loaded, load_hugging_face(directory, dtype))
    return loaded.quantized


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("transformers F32", 0.56),
        ("modelopt FP8", 0.56),
        ("compressed-tensors FP8 a row", 0.56),
        ("modelopt NVFP4", 0.85),
        ("modelopt MXFP4", 0.85),
        ("modelopt mixed", 0.85),
        ("modelopt MXFP8", 1.0),
        ("transformers, edge blocks", 1.0),
    ],
)
def test_quantized_layers_stay_small(kind: str, share: float, wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    quantize(directory, KINDS[kind])
    kept, dequantized = load_hugging_face(directory).model, load_hugging_face(directory, dequantizes=True).model
    layers = [module for module in kept.modules() if isinstance(module, QuantizableLinear | StackedExperts)]
    found = sum(parameter.nbytes for layer in layers for parameter in layer.parameters(recurse=False))
    names = {name for name, module in kept.named_modules() if module in layers}
    whole = sum(
        parameter.nbytes for name, parameter in dequantized.named_parameters() if name.rpartition(".")[0] in names
    )
    assert found <= share * whole


def number_quantized(directory: Path, ending: str) -> int:
    """Return the number of tensors in a directory with this name suffix."""
    return sum(name.endswith(ending) for name in SafetensorsFiles(directory).names)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_weight_is_code_times_scale_cast_only_once(
    kind: str, dtype: torch.dtype, wide: Path, tmp_path: Path
) -> None:
    logged = assert_loads_exactly(copy_of(wide, tmp_path), kind, dtype=dtype)
    assert " quantized tensors (" in logged and " bytes in the files)" in logged


@pytest.mark.parametrize("kind", ["transformers, edge blocks", "modelopt mixed", "compressed-tensors NVFP4"])
def test_unquantized_weights_of_a_checkpoint_are_read_unchanged(kind: str, wide: Path, tmp_path: Path) -> None:
    logged = assert_loads_exactly(copy_of(wide, tmp_path), kind, KEPT)
    everything = assert_loads_exactly(copy_of(wide, tmp_path / "all"), kind)
    assert 0 < int(logged.split()[0]) < int(everything.split()[0])


@pytest.mark.parametrize("kind", STACKED)
@pytest.mark.parametrize("name", ["granite_moe-0", "nemotron_h_moe-0", "qwen3_5_moe-1"])
def test_stacked_experts_have_their_own_scales(name: str, kind: str, tmp_path: Path) -> None:
    case = wide_checkpoint(name)
    case.model().save_pretrained(tmp_path, save_original_format=False)
    assert any(tensor.dim() == 3 and "conv" not in found for found, tensor in tensors_of(tmp_path).items())
    assert_loads_exactly(tmp_path, kind)


@pytest.mark.parametrize("kind", ["transformers F16", "compressed-tensors FP8 a row", "compressed-tensors NVFP4"])
@pytest.mark.parametrize("name", ["bamba-2", "granite-0", "granite-1", *QWEN])
def test_every_family_loads_its_quantized_weights(name: str, kind: str, tmp_path: Path) -> None:
    case = wide_checkpoint(name)
    case.write(case.model(), tmp_path)
    assert_loads_exactly(tmp_path, kind)


def test_quantized_embeddings_of_a_tied_checkpoint_are_used(tmp_path: Path) -> None:
    case = wide_checkpoint("granite-1")
    case.config.tie_word_embeddings = True
    case.write(case.model(), tmp_path)
    embeddings = tensors_of(tmp_path)["model.embed_tokens.weight"].float().numpy()
    means = quantize(tmp_path, KINDS["transformers F32"])
    encoded = fp8(128, 128, ending="_scale_inv")(embeddings, np.random.default_rng(1))
    stored = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        stored |= read_stored(file)
    stored |= {f"lm_head.weight{ending}": part for ending, part in encoded.parts.items()}
    write_files(tmp_path, stored, num_shards=2)
    loaded = load_hugging_face(tmp_path, dequantizes=True)
    assert_means(load_hugging_face(tmp_path), loaded)
    assert not loaded.architecture.tie_embeddings
    write_plain(tmp_path, means | {"lm_head.weight": encoded.values}, "BF16")
    assert_same_weights(loaded, load_hugging_face(tmp_path))


def test_quantized_language_model_of_a_multimodal_checkpoint_loads(wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    names = {f"language_model.{name}": tensor for name, tensor in tensors_of(directory).items()}
    extra = {
        "vision.layers.0.fc.weight": torch.randn(8, 32),
        "language_model.mtp.layers.0.fc.weight": torch.randn(8, 32),
    }
    write_tensors(directory, names | extra)
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "larger", "text_config": text}))
    means = quantize(directory, KINDS["modelopt NVFP4"])
    assert number_quantized(directory, "vision.layers.0.fc.weight_scale_2") == 1
    loaded = load_hugging_face(directory, dequantizes=True)
    assert_means(load_hugging_face(directory), loaded)
    write_plain(directory, means, "BF16")
    assert_same_weights(loaded, load_hugging_face(directory))


def test_loading_logs_format_count_and_bytes_of_quantized_tensors(wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    quantize(directory, KINDS["modelopt mixed"])
    files = SafetensorsFiles(directory)
    of_experts = number_quantized(directory, "weight_scale_2")
    rest = number_quantized(directory, "weight_scale") - of_experts
    parts = [name for name in files.names if re.search("_scale(_2)?$", name) or files.types[name] in ("U8", "F8_E4M3")]
    size = {"F32": 4, "U8": 1, "F8_E4M3": 1}
    num_bytes = sum(math.prod(files.shapes[name]) * size[files.types[name]] for name in parts)
    assert of_experts and rest
    assert load_hugging_face(directory).quantized == (
        f"{of_experts + rest} quantized tensors ({rest} of FP8 with a scale a tensor, {of_experts} of NVFP4; "
        f"{num_bytes:,} bytes in the files)"
    )


def test_unused_scales_are_counted_in_one_warning(wide: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = copy_of(wide, tmp_path)
    quantize(directory, KINDS["modelopt FP8"])
    count = sum(number_quantized(directory, ending) for ending in (".k_scale", ".v_scale"))
    count -= sum(number_quantized(directory, ending) for ending in ("k_proj.k_scale", "v_proj.v_scale"))  # are used
    with caplog.at_level(logging.WARNING):
        load_hugging_face(directory)
    logged = f"scales of activations or of the KV cache, which are not used; their {count} tensors are left out"
    assert count and [record.getMessage() for record in caplog.records if logged in record.getMessage()]


SCALE_NAMES = {"of the projections": ("k_proj.k_scale", "v_proj.v_scale"), "of the layer": ("k_scale", "v_scale")}


def attention_prefixes(directory: Path) -> list[str]:
    """Return what the names of the attention layers' tensors begin with, in layer order."""
    names = [name for name in SafetensorsFiles(directory).names if name.endswith(".k_proj.weight")]
    return sorted((name.removesuffix("k_proj.weight") for name in names), key=lambda name: int(name.split(".")[-3]))


def add_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to a checkpoint of one file, whose configuration says that only the KV cache is quantized."""
    quantize(directory, Kind({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, {}))
    write_tensors(directory, tensors_of(directory) | tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", SCALE_NAMES.values(), ids=SCALE_NAMES.keys())
def test_attention_layers_get_their_kv_scales(
    names: tuple[str, str], dtype: torch.dtype, wide: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(wide, tmp_path)
    prefixes, wanted, stored = attention_prefixes(directory), [], {}
    for number, prefix in enumerate(prefixes):
        scales = KVScales(0.25 + number, 1.0 if number else 0.125)
        wanted.append(scales)
        stored[prefix + names[0]] = torch.tensor(scales.key, dtype=dtype)
        if scales.value != 1.0:
            stored[prefix + names[1]] = torch.tensor([scales.value], dtype=dtype)
    add_tensors(directory, stored)
    with caplog.at_level(logging.WARNING):
        loaded = load_hugging_face(directory)
    found = [module.kv_scales for module in loaded.model.modules() if isinstance(module, CachingSelfAttention)]
    assert found == wanted and prefixes
    assert model_shape_of(loaded.model).kv_scales == tuple(wanted)
    assert not [record for record in caplog.records if "which are not used" in record.getMessage()]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"k_proj.k_scale": torch.ones(2)},
            r"k_proj.k_scale has shape \(2,\); .* have a single scale; fetch the file again, or",
        ),
        (
            {"v_scale": torch.tensor(0.0)},
            "v_scale: .* must be positive and finite, found 0.0; fetch the file again, or",
        ),
        ({"k_proj.k_scale": torch.ones(()), "k_scale": torch.ones(())}, "scale the same keys; remove one of them"),
    ],
)
def test_unusable_kv_scale_is_refused_by_name(
    tensors: dict[str, torch.Tensor], message: str, wide: Path, tmp_path: Path
) -> None:
    directory = copy_of(wide, tmp_path)
    add_tensors(directory, {attention_prefixes(directory)[0] + name: tensor for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match=message):
        load_hugging_face(directory)


@pytest.mark.parametrize("kind", ["transformers F32", "modelopt FP8 in a file"])
def test_quantized_weights_load_as_bf16_for_any_config_dtype(kind: str, wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    assert read_sizes(directory)[1] is torch.float32
    quantize(directory, KINDS[kind])
    assert read_sizes(directory)[1] is torch.bfloat16
    assert load_hugging_face(directory, None).model.config.params_dtype is torch.bfloat16


def test_checkpoint_with_only_a_quantized_kv_cache_loads(wide: Path, tmp_path: Path) -> None:
    directory = copy_of(wide, tmp_path)
    quantize(directory, Kind({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, {}))
    assert load_hugging_face(directory).quantized == ""


def test_only_one_weight_is_in_memory_at_a_time(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copy_of(wide, tmp_path)
    num_weights = len(quantize(directory, KINDS["modelopt NVFP4"], num_shards=4))
    alive: weakref.WeakSet = weakref.WeakSet()
    counts: list[int] = []
    opened = checkpoint_tensors._opened
    monkeypatch.setattr(checkpoint_tensors, "_opened", lambda path: CountingFile(opened(path), alive, counts))
    load_hugging_face(directory)
    assert max(counts) <= 2 and counts.count(0) >= num_weights  # codes, and scales of theirs
