"""Embeddings, rotary table and output layer of a model, for parts of it that run outside its forward pass."""

from typing import Any

from megatron.core.models.mamba import MambaModel
from torch import Tensor


def embeddings_of(model: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the embeddings, [tokens, hidden], of packed tokens, [tokens] int64 ids at [tokens] int64 positions.

    Args:
        model: A MambaModel, or a module with token embeddings of its own.
    """
    found: Tensor = model.embedding(input_ids=token_ids.unsqueeze(0), position_ids=positions)
    return found.squeeze(1)


def rotary_of(model: MambaModel, num_positions: int) -> Tensor | None:
    """Return Megatron's rotary angles for positions below `num_positions`; None if the model has no rotation."""
    if model.position_embedding_type != "rope":
        return None
    found: Tensor = model.rotary_pos_emb(num_positions)
    return found


def logits_of(model: MambaModel, hidden_states: Tensor) -> Tensor:
    """Return the logits, [n, vocab], that the model's output layer computes from hidden states, [n, hidden]."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(hidden_states.unsqueeze(1), weight=weight, runtime_gather_output=True)
    found: Tensor = logits.squeeze(1)
    return found
