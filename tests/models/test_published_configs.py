"""The model sizes of benchmarks are those of the published configurations."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.models.architecture import GatedDeltaSizes, HybridArchitecture, MambaSizes
from megatron_mamba_cache.models.checkpoints.checkpoint_config import CheckpointConfig
from megatron_mamba_cache.models.checkpoints.hugging_face import read_sizes
from megatron_mamba_cache.models.families.nemotron_h import architecture_of
from megatron_mamba_cache.models.parameter_shapes import parameters_of
from megatron_mamba_cache.models.shard_shape import shard_shape
from tests.models.published_configs import NEMOTRON_3_NANO, QWEN

WEIGHTS = {
    "Qwen3-Next-80B-A3B": 79.7,
    "Qwen3.5-0.8B": 0.75,
    "Qwen3.5-4B": 4.2,
    "Qwen3.5-9B": 9.0,
    "Qwen3.6-27B": 26.9,
    "Qwen3.6-35B-A3B": 34.7,
    "Qwen3.5-397B-A17B": 396.3,
}
"""Billions of parameters, without those for images and for multi-token prediction."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def documented() -> dict[str, list[str]]:
    """Return the cells of the size table in docs/models.md, by model."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| Qwen")]
    return {name: cells for names, *cells in rows if len(cells) == 5 for name in names.split(", ")}


def test_published_nemotron_3_nano_config_gives_the_expected_architecture() -> None:
    found = architecture_of(CheckpointConfig(NEMOTRON_3_NANO, "config.json"))
    assert [found.pattern.count(symbol) for symbol in "ME*-"] == [23, 23, 6, 0]
    assert isinstance(found.recurrent, MambaSizes)
    assert (found.hidden_size, found.max_sequence_length, found.recurrent.num_heads) == (2688, 262_144, 64)
    experts = found.experts
    assert experts is not None and (experts.num_experts, experts.top_k, experts.hidden_size) == (128, 6, 1856)
    assert (experts.shared_hidden_size, experts.scaling, experts.latent_size) == (3712, 2.5, None)


def test_config_may_omit_latent_experts_and_list_its_layers() -> None:
    listed = {"M": "mamba", "E": "moe", "*": "attention"}
    fields = NEMOTRON_3_NANO | {
        "moe_latent_size": None,
        "moe_shared_expert_overlap": True,
        "mtp_layers_block_type": ["moe"],
    }
    pattern = fields.pop("hybrid_override_pattern")
    fields["layers_block_type"] = [listed[symbol] for symbol in pattern]
    found = architecture_of(CheckpointConfig(fields, "config.json"))
    assert found == architecture_of(CheckpointConfig(NEMOTRON_3_NANO, "config.json"))


@pytest.fixture(params=QWEN)
def qwen(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, HybridArchitecture]:
    """Read a directory with a published configuration."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN[request.param]))
    architecture, dtype = read_sizes(tmp_path)
    assert dtype is torch.bfloat16
    return request.param, architecture


def test_published_qwen_configs_give_the_expected_layers(qwen: tuple[str, HybridArchitecture]) -> None:
    name, found = qwen
    feed_forward = "E" if found.experts else "-"
    assert set(found.pattern[1::2]) == {feed_forward}
    assert found.pattern[::2] == "MMM*" * (len(found.pattern) // 8)
    assert found.tie_embeddings is (name in ("Qwen3.5-0.8B", "Qwen3.5-4B")) and found.zero_centered_norms
    assert isinstance(found.recurrent, GatedDeltaSizes) and found.recurrent.key_head_dim == 128
    attention = found.attention
    assert (attention.head_dim, attention.rotary_base, attention.rotary_percent) == (256, 1e7, 0.25)
    assert attention.has_output_gate and attention.has_head_norms
    weights = sum(math.prod(parameter.shape) for parameter in parameters_of(found).values())
    assert weights / 1e9 == pytest.approx(WEIGHTS[name], rel=0.01)


def test_cache_sizes_of_qwen_models_match_the_documentation(qwen: tuple[str, HybridArchitecture]) -> None:
    name, found = qwen
    shape = shard_shape(found, torch.bfloat16)
    live, quantized = (
        shape.cached_layout(CacheConfig(cached_state_dtype=dtype).resolved()).slot_bytes for dtype in ("live", "int8")
    )
    assert documented()[name] == [
        f"{found.pattern.count('M')} + {found.pattern.count('*')}",
        f"{live / 2**20:.1f}",
        f"{quantized / 2**20:.1f}",
        f"{shape.block_bytes(1):,}",
        f"{10 * 2**30 // live}",
    ]
