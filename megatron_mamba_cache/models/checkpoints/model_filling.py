"""Build this rank's shard of a model, and fill it from checkpoint files; weights stay quantized if possible."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from ..allocation import ReplaceWeights
from ..kept_form import Ranks
from ..placement import ModelFiller, Placements
from ..quantized_targets import QuantizedFiller
from ..rank_shard import RankShard
from .checkpoint_tensors import CheckpointTensors
from .loading_progress import loading_progress

Model = TypeVar("Model", bound=nn.Module)


class ModelFilling(Generic[Model]):
    """This rank's shard of a model or of its MTP head, and its fillers.

    Args:
        build: Builds the model; the argument is as in `build_hybrid_model`.
        shard: Determines which parameters are on this rank.
        placements: Name of each tensor in the files → its placements in the model.
        keeps_quantized: True to keep weights quantized if possible; False to dequantize all weights.
        quantizes_activations: As in `QuantizedFiller`.

    Attributes:
        model: The model; its weights are uninitialized until `fill` returns.
        num_kept: Number of quantized tensors in the files that stay quantized.

    Raises:
        ValueError, MemoryError: As `build_hybrid_model`.
    """

    def __init__(
        self,
        build: Callable[[ReplaceWeights | None], Model],
        shard: RankShard,
        placements: Placements,
        files: CheckpointTensors,
        *,
        keeps_quantized: bool,
        quantizes_activations: bool,
    ) -> None:
        self._files = files
        self._quantized: QuantizedFiller | None = None
        local_name = shard.local_name
        tensor_ranks = Ranks(
            parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        )
        formats = {name: weight.format for name, weight in files.quantized.items()} if keeps_quantized else {}

        def keep_quantized(model: nn.Module, device: torch.device) -> None:
            self._quantized = QuantizedFiller(
                model,
                placements,
                formats,
                files.shapes,
                tensor_ranks,
                local_name,
                device,
                quantizes_activations=quantizes_activations,
            )

        self.model = build(keep_quantized if formats else None)
        kept = {name for name in placements if self._quantized is not None and self._quantized.takes(name)}
        others = {name: placed for name, placed in placements.items() if name not in kept}
        self._others = ModelFiller(self.model, others, tensor_ranks.rank, tensor_ranks.size, local_name)
        self.num_kept = sum(name in formats for name in kept)
        self._kept, self._wanted = kept, kept | {name for name in others if self._others.wants(name)}

    def fill(self) -> None:
        """Read the tensors that this rank needs, and copy each to the model before the next is read.

        Raises:
            ValueError: If the shape of a tensor does not match the model; the message names file and tensor.
        """
        with loading_progress(len(self._wanted)) as advance:
            for name, tensor in self._files.tensors(self._wanted, self._others.target, self._coded_on):
                try:
                    if self._quantized is not None and name in self._kept:
                        self._quantized.fill(name, tensor)
                    else:
                        assert isinstance(tensor, Tensor)
                        self._others.fill(name, tensor)
                except ValueError as error:
                    raise ValueError(f"{self._files.names[name]}: {error}") from error
                del tensor  # otherwise this tensor stays in memory while the next is read
                advance()

    def unfilled(self) -> list[str]:
        """Return the names of the weights that have not been filled completely."""
        return [*self._others.unfilled(), *([] if self._quantized is None else self._quantized.unfilled())]

    def _coded_on(self, name: str) -> torch.device | None:
        return self._quantized.device if self._quantized is not None and name in self._kept else None
