"""Transfers of hidden states between pipeline stages, around the forward of one of them.

Megatron's wrapper waits for the device at each transfer, which a CUDA graph cannot contain. Here a transfer is only
queued on the stream, and a captured forward runs between two transfers, over an input at a fixed address.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class WholeModel:
    """The only stage: tokens come in, logits go out."""

    def place_input(self, num_tokens: int) -> None:
        """Do nothing: the model reads tokens."""

    def receive(self, num_tokens: int) -> None:
        """Do nothing."""

    def send(self, output: Tensor) -> None:
        """Do nothing."""


class PipelineStage:
    """One of several stages; the methods are those of `WholeModel`.

    Args:
        model: This stage's part of a MambaModel.
        max_tokens: Most tokens of a step.
        dtype: Dtype of hidden states.
    """

    def __init__(self, model: Any, max_tokens: int, dtype: torch.dtype) -> None:
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._model = model
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self._is_first = stage == 0
        self._is_last = stage == parallel_state.get_pipeline_model_parallel_world_size() - 1
        shape = (0 if self._is_first else max_tokens, 1, model.config.hidden_size)
        self._input = torch.zeros(shape, dtype=dtype, device=torch.cuda.current_device())

    def place_input(self, num_tokens: int) -> None:
        """Make the model read its input, [tokens, 1, hidden], where `receive` writes."""
        if not self._is_first:
            self._model.set_input_tensor(self._input[:num_tokens])

    def receive(self, num_tokens: int) -> None:
        """Write the previous stage's hidden states to where the model reads."""
        if not self._is_first:
            before = parallel_state.get_pipeline_model_parallel_prev_rank()
            dist.recv(self._input[:num_tokens], before, group=self._group)

    def send(self, output: Tensor) -> None:
        """Send what the forward computed, [tokens, 1, hidden], to the next stage."""
        if not self._is_last:
            dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank(), group=self._group)


Stage = WholeModel | PipelineStage
