"""Build a model's multi-token prediction (MTP) head, whose layers have the sizes of the model's layers."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state

from ..mcore.mtp_head import MTPHead
from .allocation import ReplaceWeights, allocated
from .architecture import HybridArchitecture
from .hybrid_model import layer_spec, transformer_config
from .parameter_shapes import Parameters, WholeParameter, filled_of
from .placement import Placement, Split
from .rank_shard import EMBEDDINGS, RankShard

EMBEDDING_NORM, HIDDEN_NORM, JOINING = "embedding_norm.weight", "hidden_norm.weight", "joining.weight"
FINAL_NORM = "decoder.final_norm.weight"
"""Names of the parameters of a head outside its layers; its layers are `decoder.layers.0` and so on."""


def head_architecture(architecture: HybridArchitecture, pattern: str) -> HybridArchitecture:
    """Return the architecture of a head of the model: its layers are the model's, in another pattern.

    Args:
        pattern: One symbol per layer: * attention, - MLP, E mixture of experts.
    """
    return replace(architecture, pattern=pattern)


def has_own_embeddings() -> bool:
    """Return True if a head has token embeddings of its own, because the model's are on another pipeline stage."""
    return bool(parallel_state.get_pipeline_model_parallel_world_size() > 1)


def share_tied_embeddings(head: MTPHead, model: Any, architecture: HybridArchitecture) -> None:
    """Let a head read the output weights of the last stage if these are a copy of the token embeddings, once loaded."""
    if head.embedding is not None and architecture.tie_embeddings:
        head.embedding.word_embeddings.weight = model.output_layer.weight


def head_shard(head: HybridArchitecture) -> RankShard:
    """Return the shard of a head, all layers of which are on the last pipeline stage."""
    shard = RankShard.of_process(head)
    return replace(shard, layers=range(len(head.pattern)), is_first_stage=True, is_last_stage=True, is_tied=False)


def head_parameters(head: HybridArchitecture) -> Parameters:
    """Return the shapes of all tensors that are loaded for a head, by their names in `MTPHead`."""
    size = head.hidden_size
    norm = WholeParameter((size,), Split())
    layers = {name: found for name, found in filled_of(head).items() if name.startswith("decoder.")}
    own = {EMBEDDINGS: WholeParameter((head.vocab_size, size), Split(0))} if has_own_embeddings() else {}
    joining = WholeParameter((size, 2 * size), Split(0))
    return {EMBEDDING_NORM: norm, HIDDEN_NORM: norm, JOINING: joining, **own, **layers}


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

    The model must have been built before, on the same ranks, of which this one is on the last pipeline stage.

    Args:
        replace_weights: As in `build_hybrid_model`.

    Raises:
        MemoryError: If the weights do not fit in memory.
    """
    vocab_size = head.vocab_size if has_own_embeddings() else None

    def build() -> MTPHead:
        return MTPHead(transformer_config(head, dtype, num_stages=1), layer_spec(head), head.pattern, vocab_size)

    return allocated(head, build, replace_weights)
