"""The lower bounds of a step equal the sum over the layers of a tiny MoE model."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.models.allocation import without_memory
from megatron_mamba_cache.models.hybrid_model import build_hybrid_model
from megatron_mamba_cache.models.shard_shape import shard_shape
from tests.command_line.command_runs import REPOSITORY

HIDDEN, VOCAB, EXPERTS, TOP_K = 64, 512, 8, 3
MAMBA = 328 * HIDDEN + HIDDEN * 128  # input and output projections of the mixer
ATTENTION = (64 + 2 * 32) * HIDDEN + 64 * HIDDEN
SHARED = EXPERTS * HIDDEN + 2 * 96 * HIDDEN  # the router and the shared expert
EXPERT = 2 * 48 * HIDDEN


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("measuring.model_floors")


@pytest.fixture
def model(floors: Any) -> Any:
    fields = import_module("engine_8b").SCALES["tiny-experts"].shape.fields
    return import_module("loads.random_checkpoint").random_model(fields, torch.float32)


def test_prompt_flops_equal_the_sum_over_its_gemms(floors: Any, model: Any) -> None:
    weights = 2 * MAMBA + ATTENTION + 2 * (SHARED + TOP_K * EXPERT)
    attention = 100 * 100 // 2 * 2 * 64  # scores and weighted sums of each token over the tokens before it
    assert floors.prompt_flops(model, 100) == 2 * (100 * weights + attention + VOCAB * HIDDEN)


@pytest.mark.parametrize("num_rows", [1, 2, 64])
def test_step_bytes_include_only_weights_that_requests_use(floors: Any, model: Any, num_rows: int) -> None:
    shape, config = model_shape_of(model), CacheConfig(num_speculative_tokens=2).resolved()
    engine = SimpleNamespace(context=SimpleNamespace(shape=shape, cache_config=config))
    every = floors.step_bytes(model, engine, 50, num_rows, hits_all=True)
    not_hit = (1 - TOP_K / EXPERTS) ** num_rows * 2 * EXPERTS * EXPERT * 4
    assert floors.step_bytes(model, engine, 50, num_rows) == pytest.approx(every - not_hit, abs=1)
    of_rows = 2 * shape.state_layout(config).slot_bytes + 50 * shape.block_bytes(1)
    others = sum(weight.nbytes for weight in model.parameters()) - VOCAB * HIDDEN * 4
    assert every == others + num_rows * of_rows


@pytest.mark.parametrize(("num_rows", "gigabytes"), [(1, 7.3), (8, 28.0), (64, 125.0)])
def test_qwen3_next_step_bytes_match_the_whole_model(floors: Any, num_rows: int, gigabytes: float) -> None:
    """Each layer uses 10, 75 and 367 of 512 experts; each request has a state of 72 MiB and a convolution window."""
    fields = import_module("loads.model_sizes").MODEL_FIELDS["qwen3-next"] | {"num_hidden_layers": 48}
    architecture = import_module("loads.random_checkpoint").described(fields)[1]
    with without_memory():
        model = build_hybrid_model(architecture, torch.bfloat16)
    shape, config = shard_shape(architecture, torch.bfloat16), CacheConfig().resolved()
    assert shape.state_layout(config).slot_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    engine = SimpleNamespace(context=SimpleNamespace(shape=shape, cache_config=config))
    assert floors.step_bytes(model, engine, 0, num_rows) / 1e9 == pytest.approx(gigabytes, rel=0.03)
