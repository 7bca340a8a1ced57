"""Which models are refused before anything is built for them."""

from typing import Any

import pytest
import torch

from megatron_mamba_cache.mcore.served_model import check_served
from megatron_mamba_cache.ranks.group import OneRank
from tests.mcore.engine_runs import tiny_hybrid


class FirstOfTwoStages(OneRank):
    """A rank whose twin is the stage behind it."""

    num_ranks = num_stages = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


def model_with_fp32_residuals(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = tiny_hybrid().model
    monkeypatch.setattr(model.config, "fp32_residual_connection", True)
    monkeypatch.setattr(model.config, "params_dtype", dtype)
    return model


def test_fp32_residuals_that_a_stage_would_hand_on_as_bf16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_fp32_residuals(torch.bfloat16, monkeypatch)
    with pytest.raises(ValueError, match=r"fp32_residual_connection is True, and stages hand torch\.bfloat16 on"):
        check_served(model, FirstOfTwoStages())


@pytest.mark.parametrize(("dtype", "ranks"), [(torch.bfloat16, OneRank()), (torch.float32, FirstOfTwoStages())])
def test_fp32_residuals_are_served_where_no_stage_or_none_of_another_dtype_follows(
    dtype: torch.dtype, ranks: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with_fp32_residuals(dtype, monkeypatch)
    assert check_served(model, ranks).params_dtype is dtype
