"""The fewest bytes that a step of one row moves."""

from typing import Any

from megatron_mamba_cache.mcore.stacked_experts import StackedExperts


def step_bytes(model: Any, engine: Any, history: int, *, hits_all: bool = False) -> int:
    """Return the bytes that a step of one row reads and writes: weights, experts (one token's or all), state, KV."""
    weights = sum(weight.nbytes for weight in model.parameters())
    weights -= model.embedding.word_embeddings.weight.nbytes
    if model.share_embeddings_and_output_weights:
        weights += model.embedding.word_embeddings.weight.nbytes
    for module in model.modules():
        if isinstance(module, StackedExperts) and not hits_all:
            stacked = sum(weight.nbytes for weight in module.parameters())
            weights -= stacked - stacked * model.config.moe_router_topk // model.config.num_moe_experts
    context = engine.context
    state = context.shape.state_layout(context.cache_config).slot_bytes
    kv = context.shape.block_bytes(1) * history
    return int(weights + 2 * state + kv)
