"""CUDA graphs where there is no CUDA: steps padded to the same shapes, computed again instead of replayed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.mcore import cuda_graphs

Compute = Callable[[], tuple[Tensor, ...]]


class ComputesAgain:
    """Takes the place of `CudaRecorder`: results lie at fixed addresses, and a replay fills them anew."""

    def num_bytes(self) -> int:
        return 0

    def record(self, compute: Compute) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        results = tuple(result.clone() for result in compute())

        @torch.inference_mode()
        def replay() -> None:
            for result, again in zip(results, compute(), strict=True):
                result.copy_(again)

        return results, replay


def capture_without_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU capture what would be captured on a GPU; nothing happens where CUDA is."""
    if torch.cuda.is_available():
        return
    patch.setattr(cuda_graphs, "CudaRecorder", ComputesAgain)
    patch.setattr(cuda_graphs, "device_reason", lambda context: None)
