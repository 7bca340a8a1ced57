"""Evaluate models entirely in float64, even where their code requests float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel
from tests.models.served_run import full_sequence_logits


class _Float64(TorchDispatchMode):
    """Function mode that replaces float32 by float64 in every operation."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **settings)


def transformers_in_float64(model: PreTrainedModel, sequences: Tensor) -> Tensor:
    """Return the logits [batch, tokens, vocab] of one forward pass over whole sequences."""
    copy = deepcopy(model)
    copy.set_experts_implementation("eager")  # grouped products of matrices have no float64
    with _in_float64(copy), torch.inference_mode():
        return copy(sequences).logits


def ours_in_float64(loaded: LoadedModel, sequences: Tensor) -> Tensor:
    """Return the logits [batch, tokens, vocab] of one forward pass without an engine, on the CPU."""
    with _in_float64(loaded.model):
        return full_sequence_logits(loaded, sequences)


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    RotaryEmbedding.forward.cache_clear()  # of angles in the other precision
    model.double()
    with _Float64():
        yield
    model.float()  # the very bits it had
    RotaryEmbedding.forward.cache_clear()


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
