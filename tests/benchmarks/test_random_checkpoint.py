"""Benchmark models of every family have the published sizes and random weights for every checkpoint tensor."""

from importlib import import_module
from math import prod
from typing import Any

import pytest
import torch

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedMatrix
from megatron_mamba_cache.mcore.linear import QuantizableLinear
from megatron_mamba_cache.mcore.stacked_experts import StackedExperts
from megatron_mamba_cache.models.parameter_shapes import parameters_of
from megatron_mamba_cache.models.shard_shape import shard_shape
from tests.command_line.command_runs import REPOSITORY

PUBLISHED = {"8b": 8.1, "nano3": 31.6, "granite-small": 32.2, "granite-tiny": 6.9, "bamba": 9.8}
PUBLISHED |= {"qwen36-27b": 26.9, "qwen36-35b": 34.7, "qwen3-next": 79.7}
"""Billions of parameters."""
WHOLE = {"qwen3-next": {"num_hidden_layers": 48}}
"""Fields of the published model where benchmarks run fewer layers."""
SMALLER = {
    "nano3": {"hybrid_override_pattern": "ME*E", "n_routed_experts": 4, "num_experts_per_tok": 2},
    "granite-tiny": {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite-small": {"layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen36-27b": {"num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 4},
    "qwen36-35b": {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3-next": {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("loads.random_checkpoint")


def fields_of(name: str) -> dict[str, Any]:
    return import_module("loads.model_sizes").MODEL_FIELDS[name]


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_benchmark_shapes_match_the_published_models(checkpoints: Any, name: str, billions: float) -> None:
    parameters = parameters_of(checkpoints.described(fields_of(name) | WHOLE.get(name, {}))[1])
    assert sum(prod(whole.shape) for whole in parameters.values()) / 1e9 == pytest.approx(billions, abs=0.06)


def test_granite_has_the_published_multipliers_and_shared_experts(checkpoints: Any) -> None:
    small, tiny = (checkpoints.described(fields_of(f"granite-{size}"))[1] for size in ("small", "tiny"))
    for architecture in (small, tiny):
        assert (architecture.input_multiplier, architecture.residual_multiplier) == (12, 0.22)
        assert architecture.attention.scale == 1 / 128
    assert (small.output_multiplier, tiny.output_multiplier) == (1 / 16, 1 / 6)
    shared = [architecture.experts.shared_hidden_size for architecture in (small, tiny) if architecture.experts]
    assert shared == [1536, 1024]


def test_residual_projections_have_smaller_initial_weights_in_deeper_models(checkpoints: Any) -> None:
    few = {"hidden_size": 64, "vocab_size": 128, "mamba_n_heads": 2} | SMALLER["granite-tiny"]
    family, architecture = checkpoints.described(fields_of("granite-tiny") | few)
    for name, tensor in checkpoints.random_tensors(family, architecture, "cpu"):
        if name.endswith(("input_linear.weight", "output_linear.weight", "in_proj.weight", "out_proj.weight")):
            smaller = 2 if "output_linear" in name or "out_proj" in name else 1  # four layers
            assert tensor.float().std().item() == pytest.approx(checkpoints.STD / smaller, rel=0.05), name


@pytest.mark.parametrize("name", SMALLER)
def test_weights_of_every_model_family_are_initialized(checkpoints: Any, name: str) -> None:
    few = {"hidden_size": 64, "vocab_size": 128, "mamba_n_heads": 2} | SMALLER[name]
    model = checkpoints.random_model(fields_of(name) | few, torch.float32)
    tied = model.share_embeddings_and_output_weights
    assert tied == name.startswith("granite")
    for parameter_name, parameter in model.named_parameters():
        zero = parameter_name.endswith(("conv1d.bias", "expert_bias"))
        assert bool(parameter.isfinite().all()) and bool((parameter == 0).all()) == zero, parameter_name


@pytest.mark.parametrize("weights", ["fp8", "nvfp4"])
@pytest.mark.parametrize("name", ["nano3", "qwen36-27b", "qwen36-35b", "qwen3-next"])
def test_quantized_weights_have_the_spread_of_other_weights(checkpoints: Any, name: str, weights: str) -> None:
    fields = fields_of(name) | {"hidden_size": 256, "vocab_size": 128} | SMALLER[name]
    model = checkpoints.random_model(fields, torch.float32, weights)
    matrices = [found for path, module in model.named_modules() for found in matrices_of(path, module)]
    assert matrices
    depth = len(checkpoints.described(fields)[1].pattern)
    for path, matrix in matrices:
        found, is_last = matrix.dequantized(torch.float32), path.endswith(("out_proj", "linear_proj", "linear_fc2"))
        assert bool(found.isfinite().all()), path
        assert found.std().item() == pytest.approx(checkpoints.STD / (depth**0.5 if is_last else 1), rel=0.1), path
        assert abs(found.mean().item()) < 0.02 * checkpoints.STD, path


def matrices_of(path: str, module: Any) -> list[tuple[str, QuantizedMatrix]]:
    if isinstance(module, QuantizableLinear):
        return [] if module.quantized is None else [(path, module.quantized)]
    if isinstance(module, StackedExperts):
        return [(f"{path}.{name}", module.weight(name)) for name in module.forms]
    return []


def test_formats_are_those_of_published_files(checkpoints: Any) -> None:
    codes = import_module("loads.random_codes")

    def formats(name: str, weights: str) -> dict[str, str]:
        fields = fields_of(name)
        family, architecture = checkpoints.described(fields)
        names = family.placements_of(architecture)
        found = codes.formats_of(checkpoints.complete(fields)["model_type"], architecture.pattern, names, weights)
        assert found.keys() <= names.keys()
        return {name: format.name for name, format in found.items()}

    assert formats("nano3", "bf16") == {}
    blocks = formats("qwen36-27b", "fp8")
    assert set(blocks.values()) == {"FP8 in blocks of 128 x 128"} and len(blocks) == 48 * 3 + 16 * 4 + 64 * 3
    assert len(formats("qwen36-35b", "nvfp4")) == 30 * 3 + 10 * 4 + 40 * 3 * 257
    assert not any("in_proj_a" in name or "in_proj_b" in name or "gate." in name for name in blocks)
    nano, lightning, experts = formats("nano3", "fp8"), formats("nano3", "nvfp4"), 23 * 2 * 128
    assert set(nano.values()) == {"FP8 with a scale a tensor"} and len(nano) == experts + 23 * 2 + (23 - 6) * 2
    assert [*lightning.values()].count("NVFP4") == experts and len(lightning) == experts + 23 * 2 + 23 * 2
    kept = {int(name.split(".")[2]) for name in lightning.keys() - nano.keys()}
    assert kept == {4, 11, 18, 25, 32, 41}  # right before the attention layers
    with pytest.raises(ValueError, match=r"fp8 need one of the families .*, found bamba"):
        formats("bamba", "fp8")


@pytest.mark.parametrize(
    ("name", "num_tensor_ranks", "tokens"),
    [
        *((name, 1, 4096) for name in ("8b", "nano3", "granite-small", "bamba", "qwen36-27b")),
        ("granite-tiny", 1, 8192),
        ("nano3", 2, 8192),
    ],
)
def test_graphs_exceed_4096_prompt_tokens_on_a_fast_gpu(
    checkpoints: Any, name: str, num_tensor_ranks: int, tokens: int
) -> None:
    architecture = checkpoints.described(fields_of(name))[1]
    shape = shard_shape(architecture, torch.bfloat16, num_tensor_ranks=num_tensor_ranks)
    print(f"{name} on {num_tensor_ranks}: {shape.layer_weights / 1e6:.1f} million weights a layer")
    assert shape.resolved(CacheConfig()).most_graph_tokens == tokens
