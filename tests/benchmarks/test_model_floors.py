"""What a step of a model cannot avoid, counted layer by layer for a tiny model with experts."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from tests.command_line.command_runs import REPOSITORY

HIDDEN, VOCAB, EXPERTS, TOP_K = 64, 512, 8, 3
MAMBA = 328 * HIDDEN + HIDDEN * 128  # into the mixer and out of it
ATTENTION = (64 + 2 * 32) * HIDDEN + 64 * HIDDEN
SHARED = EXPERTS * HIDDEN + 2 * 96 * HIDDEN  # the router, and the shared expert
EXPERT = 2 * 48 * HIDDEN


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("measuring.model_floors")


@pytest.fixture
def model(floors: Any) -> Any:
    fields = import_module("engine_8b").SCALES["tiny-experts"].shape.fields
    return import_module("loads.random_checkpoint").random_model(fields, torch.float32)


def test_flops_of_a_prompt_are_those_of_its_products(floors: Any, model: Any) -> None:
    weights = 2 * MAMBA + ATTENTION + 2 * (SHARED + TOP_K * EXPERT)
    attention = 100 * 100 // 2 * 2 * 64  # scores and sums, of a token with those before it
    assert floors.prompt_flops(model, 100) == 2 * (100 * weights + attention + VOCAB * HIDDEN)


@pytest.mark.parametrize("num_rows", [1, 2, 64])
def test_bytes_of_a_step_are_those_of_what_its_rows_hit(floors: Any, model: Any, num_rows: int) -> None:
    shape, config = model_shape_of(model), CacheConfig(num_speculative_tokens=2).resolved()
    engine = SimpleNamespace(context=SimpleNamespace(shape=shape, cache_config=config))
    every = floors.step_bytes(model, engine, 50, num_rows, hits_all=True)
    not_hit = (1 - TOP_K / EXPERTS) ** num_rows * 2 * EXPERTS * EXPERT * 4
    assert floors.step_bytes(model, engine, 50, num_rows) == pytest.approx(every - not_hit, abs=1)
    of_rows = 2 * shape.state_layout(config).slot_bytes + 50 * shape.block_bytes(1)
    others = sum(weight.nbytes for weight in model.parameters()) - VOCAB * HIDDEN * 4
    assert every == others + num_rows * of_rows
