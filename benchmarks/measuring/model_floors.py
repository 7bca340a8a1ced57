"""Lower bounds on the time of a model's steps: the bytes that they move and the FLOPs of their GEMMs."""

from typing import Any

from torch import nn

from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.stacked_experts import StackedExperts
from megatron_mamba_cache.mcore.step_reads import weights_of_token


def step_bytes(model: Any, engine: Any, history: int, num_rows: int = 1, *, hits_all: bool = False) -> int:
    """Return the bytes of weights, states and KV that a decode step reads and writes.

    Args:
        history: Number of cached tokens per request.
        num_rows: Number of requests, each with one token.
        hits_all: If True, count the weights of all experts. Otherwise count the number of experts that are used on
            average if each token chooses among equally likely experts independently.
    """
    weights = sum(weight.nbytes for weight in model.parameters())
    if not model.share_embeddings_and_output_weights:
        weights -= model.embedding.word_embeddings.weight.nbytes
    if not hits_all:
        weights -= experts_bytes(model) - experts_bytes(model, num_rows)
    context = engine.context
    state = context.shape.state_layout(context.cache_config).slot_bytes
    return int(weights + num_rows * (2 * state + context.shape.block_bytes(1) * history))


def experts_bytes(model: Any, num_tokens: int | None = None) -> int:
    """Return the bytes of the experts that this many tokens use on average; None: of all experts."""
    stacked = sum(weight.nbytes for weight in _stacked(model))
    left_out = 0.0 if num_tokens is None else (1 - _share_of_experts(model)) ** num_tokens
    return round(stacked * (1 - left_out))


def prompt_flops(model: Any, num_tokens: int) -> float:
    """Return the FLOPs of a prompt's linear layers and attention, without those of the scan.

    Logits are computed for the last token only.
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
    """Return the fraction of a layer's experts that one token uses; 1 for a model without experts."""
    return model.config.moe_router_topk / model.config.num_moe_experts if model.config.num_moe_experts else 1.0
