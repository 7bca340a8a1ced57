"""Benchmark models of every family have the published sizes and random weights for every checkpoint tensor."""

from importlib import import_module
from math import prod
from typing import Any

import pytest
import torch

from megatron_mamba_cache import CacheConfig
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
