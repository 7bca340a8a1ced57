"""Lower bounds of a model's steps: the bytes that they move, and the FLOPs of their GEMMs."""

from typing import Any

from torch import nn

from megatron_mamba_cache.mcore.model_reading import model_shape_of, weights_of_token
from megatron_mamba_cache.mcore.stacked_experts import StackedExperts


def step_bytes(model: Any, engine: Any, history: int, num_rows: int = 1, *, hits_all: bool = False) -> int:
    """Return the bytes that a step reads and writes: weights, experts, states, KV.

    Args:
        history: Tokens of a row whose KV is read.
        num_rows: Rows of a token each.
        hits_all: True if all experts are hit; otherwise those that the tokens hit on average if each chooses
            among equally likely ones by itself.
    """
    weights = sum(weight.nbytes for weight in model.parameters())
    if not model.share_embeddings_and_output_weights:
        weights -= model.embedding.word_embeddings.weight.nbytes
    if not hits_all:
        stacked = sum(weight.nbytes for weight in _stacked(model))
        weights -= round(stacked * (1 - _share_of_experts(model)) ** num_rows)
    context = engine.context
    state = context.shape.state_layout(context.cache_config).slot_bytes
    return int(weights + num_rows * (2 * state + context.shape.block_bytes(1) * history))


def prompt_flops(model: Any, num_tokens: int) -> float:
    """Return the FLOPs of a prompt's GEMMs: weights and attention, without the scan's.

    Only the last token's logits are computed.
    """
    shape = model_shape_of(model)
    attention = 2 * shape.num_attention_layers * shape.num_heads * shape.kv_channels * num_tokens
    logits = 2 * shape.vocab_size * model.config.hidden_size
    return float(num_tokens * (2 * weights_of_token(model) + attention) + logits)


def _stacked(model: Any) -> list[nn.Parameter]:
    return [
        weight for module in model.modules() if isinstance(module, StackedExperts) for weight in module.parameters()
    ]


def _share_of_experts(model: Any) -> float:
    """Return the share of a layer's experts that one token hits; 1 for a model without experts."""
    return model.config.moe_router_topk / model.config.num_moe_experts if model.config.num_moe_experts else 1.0
