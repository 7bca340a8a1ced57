"""Unsupported models are refused before anything is built for them."""

from typing import Any

import pytest
import torch

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.mcore.served_model import check_served
from megatron_mamba_cache.ranks.group import OneRank
from tests.mcore.engine_runs import EngineRun, tiny_hybrid


class FirstOfTwoStages(OneRank):
    """A rank that is also its next pipeline stage."""

    num_ranks = num_stages = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def model_with_fp32_residuals(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = tiny_hybrid().model
    monkeypatch.setattr(model.config, "fp32_residual_connection", True)
    monkeypatch.setattr(model.config, "params_dtype", dtype)
    return model


@pytest.mark.parametrize("ranks", [OneRank(), FirstOfTwoStages()])
def test_fp32_residual_connection_is_refused_in_a_bf16_model(ranks: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_fp32_residuals(torch.bfloat16, monkeypatch)
    message = r"fp32_residual_connection is True, but layers and stages exchange torch\.bfloat16 tensors"
    with pytest.raises(ValueError, match=message):
        check_served(model, ranks, 512)


@pytest.mark.parametrize("ranks", [OneRank(), FirstOfTwoStages()])
def test_fp32_residuals_are_served_in_an_fp32_model(ranks: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_fp32_residuals(torch.float32, monkeypatch)
    assert check_served(model, ranks, 512).params_dtype is torch.float32


@pytest.mark.parametrize(("length", "num_warnings"), [(512, 0), (4096, 0), (4097, 1), (100_000, 1)])
def test_max_length_beyond_the_models_positions_logs_one_warning(
    length: int, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = {"buffer_size_gb": 0.1, "prefix_caching_mamba_gb": 0.01}
    config = CacheConfig(block_size_tokens=64, max_sequence_length=length, **memory)
    run = EngineRun.start(tiny_hybrid(), config)
    found = [record.getMessage() for record in caplog.records if "positions" in record.getMessage()]
    assert len(found) == num_warnings
    assert all(f"requests may have {length} tokens, but the model has 4096 positions" in one for one in found)
    assert run.run(0, [1, 2, 3], 4) >= 0
