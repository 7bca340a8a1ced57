"""Count what the steps of a model and the passes of its head read, to estimate their times."""

from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from torch import nn

from ..config import CacheConfig
from ..ranks.group import Ranks
from ..recurrences.model_shape import HybridModelShape
from ..speculation.step_time import CPU, GPU, StepReads, StepTime
from .linear import QuantizableLinear
from .model_ranks import num_expert_ranks
from .mtp_head import MTPHead
from .stacked_experts import EXPERT_WEIGHTS, StackedExperts


def step_time_of(model: Any, shape: HybridModelShape, config: CacheConfig, ranks: Ranks) -> StepTime:
    """Return an estimator of the model's step times, equal on all of the model's ranks, which must all call this."""
    config = shape.with_forms(config)
    device = GPU if next(model.parameters()).is_cuda else CPU
    width = 1 + config.num_speculative_tokens if config.num_cuda_graphs else 0
    return StepTime(_reads_of(model, shape, config, ranks), device, width)


def head_time_of(model: Any, head: MTPHead, num_tokens: int) -> StepTime:
    """Return an estimator of the time of a pass of a head on this rank, which ends with the output layer.

    Args:
        num_tokens: Number of tokens that may be drafted, whose rows of the output layer the pass reads.
    """
    weights, settings = _weights_of(head.joining, head.decoder), model.config
    output = num_tokens * settings.hidden_size // settings.tensor_model_parallel_size
    num_experts, top_k = (settings.num_moe_experts, settings.moe_router_topk) if weights.of_expert else (0, 0)
    reads = StepReads(
        num_layers=1 + len(head.pattern),
        weights=weights.shared_bytes + output * settings.params_dtype.itemsize,
        expert=weights.expert_bytes,
        num_experts=num_experts // num_expert_ranks(),
        chosen=top_k / num_experts if num_experts else 0.0,
        num_expert_ranks=num_expert_ranks(),
        state=0,
        draft=0,
        cached_token=0,
        macs=weights.shared + output + weights.of_expert * top_k,
    )
    return StepTime(reads, GPU if next(head.parameters()).is_cuda else CPU)


def weights_of_token(model: Any) -> int:
    """Return the number of this rank's weights that one token uses, which excludes experts not chosen for the token."""
    found = _weights_of(model.decoder)
    return found.shared + (found.of_expert * model.config.moe_router_topk if found.of_expert else 0)


def _reads_of(model: Any, shape: HybridModelShape, config: CacheConfig, ranks: Ranks) -> StepReads:
    num_tensor_ranks, settings = ranks.num_ranks // ranks.num_stages, model.config
    stages = ranks.gather((_weights_of(model.decoder), "".join(shape.layer_types), _matrix_bytes(shape, config)))
    stages = stages[::num_tensor_ranks]
    layers, expert = (
        sum(weights.shared for weights, _, _ in stages),
        sum(weights.of_expert for weights, _, _ in stages),
    )
    pattern, state = "".join(symbols for _, symbols, _ in stages), sum(count for _, _, count in stages)
    output = shape.vocab_size * settings.hidden_size // num_tensor_ranks
    num_experts = settings.num_moe_experts if expert else 0
    top_k = settings.moe_router_topk if expert else 0
    kv_itemsize = shape.kv_dtype(config.kv_cache_dtype).itemsize
    return StepReads(
        num_layers=len(pattern),
        weights=sum(weights.shared_bytes for weights, _, _ in stages) + output * shape.params_dtype.itemsize,
        expert=sum(weights.expert_bytes for weights, _, _ in stages),
        num_experts=num_experts // num_expert_ranks(),
        chosen=top_k / num_experts if num_experts else 0.0,
        num_expert_ranks=num_expert_ranks(),
        state=state if config.replays else 2 * state,
        draft=0 if config.replays else state,
        cached_token=2 * pattern.count(Symbols.ATTENTION) * shape.num_kv_heads * shape.kv_channels * kv_itemsize,
        macs=layers + output + expert * top_k,
    )


def _matrix_bytes(shape: HybridModelShape, config: CacheConfig) -> int:
    """Return the size of the matrices in one state, in bytes, over all recurrent layers on this rank."""
    return sum(
        group.num_layers_of(tensor) * prod(tensor.shape) * tensor.dtype.itemsize
        for group in shape.state_groups(config)
        for tensor in group.tensors
        if tensor.is_matrix
    )


@dataclass(frozen=True, slots=True)
class _Weights:
    """Numbers and bytes of weights on this rank: those that every token uses, and those of one expert per layer."""

    shared: int
    of_expert: int
    shared_bytes: int
    expert_bytes: int


def _weights_of(*layers: nn.Module) -> _Weights:
    """Count the matrices of layers on this rank: all weights of quantized ones, too, but only the bytes they take."""
    shared = of_expert = shared_bytes = expert_bytes = 0
    for module in chain.from_iterable(part.modules() for part in layers):
        if isinstance(module, StackedExperts):
            of_expert += sum(prod(module.weight(name).shape[1:]) for name in EXPERT_WEIGHTS)
            expert_bytes += sum(parameter.nbytes for parameter in module.parameters()) // module.num_experts
            continue
        matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 2]
        shared_bytes += sum(matrix.nbytes for matrix in matrices)
        if isinstance(module, QuantizableLinear) and module.form is not None:
            shared += module.num_weights
        else:
            shared += sum(matrix.numel() for matrix in matrices)
    return _Weights(shared, of_expert, shared_bytes, expert_bytes)
