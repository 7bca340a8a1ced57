"""A hybrid model's architecture in one value, and the Megatron model it describes."""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from ..mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from ..mcore.process_groups import initialize_single_process
from ..mcore.specs import check_layer_pattern
from .memory_errors import largest_sizes_named


def squared_relu(x: Tensor) -> Tensor:
    """Return the square of what is positive; Megatron's own is compiled anew for each number of tokens."""
    return F.relu(x).square()


ACTIVATIONS = {"relu2": squared_relu, "silu": F.silu, "gelu": F.gelu}
"""Names of activations in a checkpoint's configuration."""


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Sizes of the Mamba2 mixers.

    Args:
        gated_norm_eps: Of the norm at a mixer's end; None: the model's.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    ssm_chunk_size: int
    d_conv: int = 4
    conv_bias: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    gated_norm_eps: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of the attention layers.

    Args:
        scale: Of the scores; None: 1 / sqrt(head_dim).
        rotary_base: None: no position embedding.
        rotary_percent: The part of a head's channels that is rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    rotary_base: float | None = None
    rotary_percent: float = 1.0


@dataclass(frozen=True, slots=True)
class FeedForwardShape:
    """Sizes of the dense feed-forward layers; `gated` ones multiply the activation with a second projection."""

    hidden_size: int
    activation: str  # of ACTIVATIONS
    gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes and routing of the mixture-of-experts layers.

    Args:
        score: "sigmoid" with a bias for choosing, or "softmax" over the chosen.
        num_groups, top_groups: Experts are chosen from the best groups only; 1 and 1: from all.
        scaling: Factor on the routing weights.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    shared_hidden_size: int
    score: str
    num_groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class HybridArchitecture:
    """All that a checkpoint's configuration says about a hybrid model.

    Args:
        pattern: One symbol a layer: M Mamba, * attention, - feed-forward, E mixture of experts.
        input_multiplier, residual_multiplier, output_multiplier: See `LocalSpecOptions`.
    """

    pattern: str
    vocab_size: int
    hidden_size: int
    max_sequence_length: int
    norm_eps: float
    mamba: MambaShape
    attention: AttentionShape
    feed_forward: FeedForwardShape
    experts: ExpertsShape | None = None
    tie_embeddings: bool = False
    input_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    output_multiplier: float = 1.0


def build_hybrid_model(architecture: HybridArchitecture, dtype: torch.dtype) -> MambaModel:
    """Build this rank's part of the model on the current device, in eval mode, its parameters not yet given values.

    The model is shared out to Megatron's tensor-parallel ranks; without `parallel_state`, this process is the only one.

    Raises:
        ValueError: If the layer pattern has an unknown symbol, or no Mamba or attention layer, if heads cannot be
            shared out to their groups, or the model to the ranks.
        MemoryError: Naming the largest sizes, if the weights do not fit in memory.
    """
    check_layer_pattern(architecture.pattern)
    _check_heads(architecture)
    _check_experts(architecture)
    initialize_single_process()
    _check_ranks(architecture)
    mamba, rotary_base = architecture.mamba, architecture.attention.rotary_base
    options = LocalSpecOptions(
        ssm_chunk_size=mamba.ssm_chunk_size,
        d_conv=mamba.d_conv,
        conv_bias=mamba.conv_bias,
        time_step_limit=mamba.time_step_limit,
        norm_eps=architecture.norm_eps,
        gated_norm_eps=mamba.gated_norm_eps,
        num_experts=architecture.experts.num_experts if architecture.experts else None,
        input_multiplier=architecture.input_multiplier,
        residual_multiplier=architecture.residual_multiplier,
        output_multiplier=architecture.output_multiplier,
    )
    with largest_sizes_named(asdict(architecture)):
        model = MambaModel(
            transformer_config(architecture, dtype),
            local_hybrid_spec(options),
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.max_sequence_length,
            hybrid_override_pattern=architecture.pattern,
            share_embeddings_and_output_weights=architecture.tie_embeddings,
            position_embedding_type="none" if rotary_base is None else "rope",
            rotary_base=rotary_base or 10_000,
            rotary_percent=architecture.attention.rotary_percent,
        )
        if rotary_base is not None:
            _set_rotary_frequencies(model, rotary_base)
        return model.to(torch.cuda.current_device()).eval()


def _set_rotary_frequencies(model: MambaModel, rotary_base: float) -> None:
    """Compute the frequencies on the CPU: a GPU rounds their powers otherwise, and every angle with them."""
    rotary = model.rotary_pos_emb
    dim = 2 * rotary.inv_freq.numel()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    rotary.inv_freq = (1.0 / rotary_base**exponents).to(rotary.inv_freq.device)


def transformer_config(architecture: HybridArchitecture, dtype: torch.dtype) -> TransformerConfig:
    """Return Megatron's configuration of the architecture, for the tensor-parallel ranks that there are."""
    mamba, attention, experts = architecture.mamba, architecture.attention, architecture.experts
    feed_forward = architecture.feed_forward
    routing = {} if experts is None else _routing(experts)
    return TransformerConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        num_layers=len(architecture.pattern),
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=feed_forward.hidden_size,
        activation_func=ACTIVATIONS[feed_forward.activation],
        gated_linear_unit=feed_forward.gated,
        num_attention_heads=attention.num_heads,
        num_query_groups=attention.num_kv_heads,
        kv_channels=attention.head_dim,
        softmax_scale=attention.scale,
        mamba_num_heads=mamba.num_heads,
        mamba_head_dim=mamba.head_dim,
        mamba_state_dim=mamba.state_dim,
        mamba_num_groups=mamba.num_groups,
        use_mamba_mem_eff_path=False,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **routing,
    )


def _check_heads(architecture: HybridArchitecture) -> None:
    attention, mamba = architecture.attention, architecture.mamba
    if attention.num_heads % attention.num_kv_heads:
        raise ValueError(f"{attention.num_heads} attention heads do not divide by {attention.num_kv_heads} KV heads")
    if mamba.num_heads % mamba.num_groups:
        raise ValueError(f"{mamba.num_heads} Mamba heads do not divide by {mamba.num_groups} groups")
    rotated = attention.head_dim * attention.rotary_percent
    if attention.rotary_base is not None and (int(rotated) % 2 or not 2 <= rotated <= attention.head_dim):
        raise ValueError(f"{rotated:g} of {attention.head_dim} channels of a head cannot be rotated in pairs")


def _check_experts(architecture: HybridArchitecture) -> None:
    experts = architecture.experts
    if "E" not in architecture.pattern:
        return
    if experts is None:
        raise ValueError(f"layer pattern {architecture.pattern!r} has experts (E), but their sizes are not given")
    if experts.top_k > experts.num_experts:
        raise ValueError(f"{experts.top_k} experts a token are more than the {experts.num_experts} that there are")
    if experts.top_k < 2 and experts.score == "softmax":
        raise ValueError("1 expert a token with softmax scores is more than Megatron routes; 2 are the fewest")
    if experts.num_experts % experts.num_groups or experts.top_groups > experts.num_groups:
        raise ValueError(
            f"{experts.num_experts} experts cannot be chosen from {experts.top_groups} of {experts.num_groups} groups"
        )


def _check_ranks(architecture: HybridArchitecture) -> None:
    size = parallel_state.get_tensor_model_parallel_world_size()
    others = {
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }
    for name, other in others.items():
        if other > 1:
            raise ValueError(f"{name} parallel size is {other}; a model is shared out by tensor parallelism only")
    if (for_experts := parallel_state.get_expert_tensor_parallel_world_size()) != size:
        raise ValueError(f"expert tensor parallel size is {for_experts}, but must be the others' {size}")
    for name, count in _shared_out(architecture).items():
        if count % size:
            raise ValueError(f"{name} {count} does not divide by {size} tensor-parallel ranks")


def _shared_out(architecture: HybridArchitecture) -> dict[str, int]:
    """Return what tensor-parallel ranks share."""
    mamba, attention, experts = architecture.mamba, architecture.attention, architecture.experts
    shared = {
        "vocab_size": architecture.vocab_size,
        "number of Mamba heads": mamba.num_heads,
        "number of Mamba groups": mamba.num_groups,
        "number of attention heads": attention.num_heads,
        "number of KV heads": attention.num_kv_heads,
    }
    if "-" in architecture.pattern:
        shared["feed-forward size"] = architecture.feed_forward.hidden_size
    if "E" in architecture.pattern and experts is not None:
        shared |= {"expert size": experts.hidden_size, "shared expert size": experts.shared_hidden_size}
    return shared


def _routing(experts: ExpertsShape) -> dict[str, object]:
    grouped = experts.num_groups > 1
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_hidden_size,
        "moe_router_score_function": experts.score,
        "moe_router_enable_expert_bias": experts.score == "sigmoid",
        "moe_router_topk_scaling_factor": experts.scaling if experts.score == "sigmoid" else None,
        "moe_router_num_groups": experts.num_groups if grouped else None,
        "moe_router_group_topk": experts.top_groups if grouped else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",  # the one that needs no CUDA stream
        "moe_grouped_gemm": False,
    }
