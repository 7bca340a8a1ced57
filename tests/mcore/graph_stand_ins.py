"""Stand-ins for CUDA graphs without CUDA: steps are padded to the same shapes and computed again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.models.drafting import mtp_drafter
from megatron_mamba_cache.step import graphs as cuda_graphs
from megatron_mamba_cache.step.recorder import Compute, Prepare, Replay, nothing


class ComputesAgain:
    """Stands in for `CudaRecorder`: results have fixed addresses, and a replay overwrites them."""

    def num_bytes(self) -> int:
        return 0

    def split(self) -> None:
        pass

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        results = tuple(result.clone() for result in compute())

        @torch.inference_mode()
        def replay() -> None:
            prepare()
            for result, again in zip(results, compute(), strict=True):
                result.copy_(again)

        return results, Replay(nothing, replay)


class ReadsWeightsWhereTheyLay(ComputesAgain):
    """Like a graph, a replay reads the memory of the model's parameters at the recording."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        results, compute_again = super().record(compute, prepare)
        lay = [parameter.data for parameter in self._model.parameters()]

        def replay() -> None:
            with self._parameters_at(lay):
                compute_again()

        return results, Replay(nothing, replay)

    @contextmanager
    def _parameters_at(self, memory: list[Tensor]) -> Iterator[None]:
        parameters = list(self._model.parameters())
        lie = [parameter.data for parameter in parameters]
        try:
            for parameter, data in zip(parameters, memory, strict=True):
                parameter.data = data
            yield
        finally:
            for parameter, data in zip(parameters, lie, strict=True):
                parameter.data = data


def capture_without_cuda(
    patch: pytest.MonkeyPatch, model: Any = None, recorder: Callable[[], ComputesAgain] = ComputesAgain
) -> None:
    """Let engines on a CPU capture what would be captured on a GPU; with CUDA, do nothing.

    Args:
        model: Of the engines, if its weights are going to move.
        recorder: Of the engines whose weights stay.
    """
    if torch.cuda.is_available():
        return
    recorder = recorder if model is None else lambda: ReadsWeightsWhereTheyLay(model)
    for module in (cuda_graphs, mtp_drafter):
        patch.setattr(module, "CudaRecorder", recorder)
        patch.setattr(module, "device_reason", lambda memory: None)


def with_graphs(config: CacheConfig, count: int = 3, prefill_tokens: int | None = 40) -> CacheConfig:
    return replace(config, num_cuda_graphs=count, cuda_graph_prefill_tokens=prefill_tokens)
