"""Build a model's multi-token prediction (MTP) head, whose layers have the sizes of the model's layers."""

from dataclasses import replace

import torch
from megatron.core import parallel_state

from ..mcore.mtp_head import MTPHead
from .allocation import ReplaceWeights, allocated
from .architecture import HybridArchitecture
from .hybrid_model import layer_spec, transformer_config
from .parameter_shapes import Parameters, WholeParameter, filled_of
from .placement import Placement, Split

EMBEDDING_NORM, HIDDEN_NORM, JOINING = "embedding_norm.weight", "hidden_norm.weight", "joining.weight"
FINAL_NORM = "decoder.final_norm.weight"
"""Names of the parameters of a head outside its layers; its layers are `decoder.layers.0` and so on."""


def head_architecture(architecture: HybridArchitecture, pattern: str) -> HybridArchitecture:
    """Return the architecture of a head of the model: its layers are the model's, in another pattern.

    Args:
        pattern: One symbol per layer: * attention, - MLP, E mixture of experts.
    """
    return replace(architecture, pattern=pattern)


def head_parameters(head: HybridArchitecture) -> Parameters:
    """Return the shapes of all tensors that a checkpoint stores for a head, by their names in `MTPHead`."""
    size = head.hidden_size
    norm = WholeParameter((size,), Split())
    layers = {name: found for name, found in filled_of(head).items() if name.startswith("decoder.")}
    return {EMBEDDING_NORM: norm, HIDDEN_NORM: norm, JOINING: WholeParameter((size, 2 * size), Split(0)), **layers}


def ends_of_head(embedding_norm: str, hidden_norm: str, joining: str, final_norm: str) -> dict[str, tuple[Placement]]:
    """Return the destinations of the tensors outside the layers, given their names in the checkpoint."""
    return {
        embedding_norm: (Placement(EMBEDDING_NORM),),
        hidden_norm: (Placement(HIDDEN_NORM),),
        joining: (Placement(JOINING, Split(0)),),
        final_norm: (Placement(FINAL_NORM),),
    }


def build_mtp_head(
    head: HybridArchitecture, dtype: torch.dtype, replace_weights: ReplaceWeights | None = None
) -> MTPHead:
    """Build this rank's shard of a head, in eval mode, with uninitialized parameters.

    The model must have been built before, on the same ranks.

    Args:
        replace_weights: As in `build_hybrid_model`.

    Raises:
        ValueError: If the model has several pipeline stages.
        MemoryError: If the weights do not fit in memory.
    """
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    if num_stages > 1:
        raise ValueError(f"an MTP head needs a model with a single pipeline stage, found {num_stages} stages")

    def build() -> MTPHead:
        return MTPHead(transformer_config(head, dtype), layer_spec(head), head.pattern)

    return allocated(head, build, replace_weights)
