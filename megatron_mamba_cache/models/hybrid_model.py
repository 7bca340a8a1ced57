"""Build this rank's shard of the Megatron model that an architecture describes."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from ..mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from ..mcore.model_ranks import initialize_single_process
from .allocation import ReplaceWeights, allocated
from .architecture import ACTIVATIONS, ExpertsSizes, GatedDeltaSizes, HybridArchitecture, MambaSizes, check_architecture
from .rank_shard import RankShard, check_ranks, stage_lengths


def build_hybrid_model(
    architecture: HybridArchitecture, dtype: torch.dtype, replace_weights: ReplaceWeights | None = None
) -> MambaModel:
    """Build this rank's shard of the model, in eval mode, with uninitialized parameters.

    The model is split over Megatron's tensor-, pipeline- and expert-parallel ranks. If `parallel_state` is not
    initialized, the whole model is built.

    Args:
        replace_weights: Called before matrices have memory, so replaced ones never take memory. None: replace nothing.

    Raises:
        ValueError: If the layer pattern has an unknown symbol or lacks recurrent or attention layers, or if a
            dimension is not divisible by the number of heads or ranks that divide it.
        MemoryError: If the weights do not fit in memory; the message gives the largest dimensions.
    """
    check_buildable(architecture)
    part = RankShard.of_process(architecture)
    rotary_base = architecture.attention.rotary_base

    def build() -> MambaModel:
        return MambaModel(
            transformer_config(architecture, dtype),
            layer_spec(architecture),
            vocab_size=architecture.vocab_size,
            pre_process=part.is_first_stage,
            post_process=part.is_last_stage,
            max_sequence_length=architecture.max_sequence_length,
            hybrid_override_pattern=architecture.pattern,
            share_embeddings_and_output_weights=part.is_tied and part.is_first_stage and part.is_last_stage,
            position_embedding_type="none" if rotary_base is None else "rope",
            rotary_base=rotary_base or 10_000,
            rotary_percent=architecture.attention.rotary_percent,
        )

    model = allocated(architecture, build, replace_weights)
    if rotary_base is not None:
        _set_rotary_frequencies(model, rotary_base)
    return model


def layer_spec(architecture: HybridArchitecture) -> ModuleSpec:
    """Return the spec of the stack of layers."""
    experts = architecture.experts
    return local_hybrid_spec(
        LocalSpecOptions(
            **_mixer_options(architecture.recurrent),
            norm_eps=architecture.norm_eps,
            has_head_norms=architecture.attention.has_head_norms,
            num_experts=experts.num_experts if experts else None,
            routing=experts.rule if experts else None,
            input_multiplier=architecture.input_multiplier,
            residual_multiplier=architecture.residual_multiplier,
            output_multiplier=architecture.output_multiplier,
        )
    )


def check_buildable(architecture: HybridArchitecture) -> None:
    """Raise the `ValueError` of `build_hybrid_model` if the model cannot be split over Megatron's current ranks."""
    check_architecture(architecture)
    initialize_single_process()
    check_ranks(architecture)


def _set_rotary_frequencies(model: MambaModel, rotary_base: float) -> None:
    """Set the model's rotary frequencies to values computed on the CPU; a GPU would round the powers differently."""
    rotary = model.rotary_pos_emb
    dim = 2 * rotary.inv_freq.numel()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    rotary.inv_freq = (1.0 / rotary_base**exponents).to(rotary.inv_freq.device)


def transformer_config(
    architecture: HybridArchitecture, dtype: torch.dtype, num_stages: int | None = None
) -> TransformerConfig:
    """Return Megatron's configuration for the architecture, split over Megatron's current ranks.

    Args:
        num_stages: Number of pipeline stages; None for that of Megatron's current ranks.
    """
    attention, experts = architecture.attention, architecture.experts
    feed_forward = architecture.feed_forward
    routing = {} if experts is None else _routing(experts)
    return TransformerConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        **_stages(architecture, dtype, num_stages),
        num_layers=len(architecture.pattern),
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=feed_forward.hidden_size,
        activation_func=ACTIVATIONS[feed_forward.activation],
        gated_linear_unit=feed_forward.gated,
        num_attention_heads=attention.num_heads,
        num_query_groups=attention.num_kv_heads,
        kv_channels=attention.head_dim,
        softmax_scale=attention.scale,
        attention_output_gate=attention.has_output_gate,
        qk_layernorm=attention.has_head_norms,
        **_mixer_settings(architecture.recurrent),
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        layernorm_zero_centered_gamma=architecture.zero_centered_norms,
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


def _mixer_options(sizes: MambaSizes | GatedDeltaSizes) -> dict[str, Any]:
    """Return the fields of `LocalSpecOptions` for the mixers."""
    if isinstance(sizes, GatedDeltaSizes):
        return {"mixer": "gated_delta", "grain": sizes.grain}
    return {
        "grain": sizes.grain,
        "d_conv": sizes.d_conv,
        "conv_bias": sizes.conv_bias,
        "time_step_limit": sizes.time_step_limit,
        "gated_norm_eps": sizes.gated_norm_eps,
    }


def _mixer_settings(sizes: MambaSizes | GatedDeltaSizes) -> dict[str, object]:
    """Return the fields of Megatron's configuration for the mixers."""
    if isinstance(sizes, GatedDeltaSizes):
        return {
            "linear_num_key_heads": sizes.num_key_heads,
            "linear_num_value_heads": sizes.num_value_heads,
            "linear_key_head_dim": sizes.key_head_dim,
            "linear_value_head_dim": sizes.value_head_dim,
            "linear_conv_kernel_dim": sizes.d_conv,
        }
    return {
        "mamba_num_heads": sizes.num_heads,
        "mamba_head_dim": sizes.head_dim,
        "mamba_state_dim": sizes.state_dim,
        "mamba_num_groups": sizes.num_groups,
        "use_mamba_mem_eff_path": False,
    }


def _stages(architecture: HybridArchitecture, dtype: torch.dtype, num_stages: int | None) -> dict[str, object]:
    """Return the fields of Megatron's configuration for pipeline stages; empty for a single stage."""
    num_stages = num_stages or parallel_state.get_pipeline_model_parallel_world_size()
    if num_stages == 1:
        return {}
    return {
        "pipeline_model_parallel_size": num_stages,
        "pipeline_dtype": dtype,
        "num_layers_in_last_pipeline_stage": stage_lengths(len(architecture.pattern), num_stages)[-1],
    }


def _routing(experts: ExpertsSizes) -> dict[str, object]:
    """Return the fields of Megatron's configuration for MoE layers; the layer spec has the full routing rule."""
    return {
        "num_moe_experts": experts.num_experts,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_hidden_size,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_score_function": experts.score,
        "moe_router_enable_expert_bias": experts.score == "sigmoid",
        "moe_router_pre_softmax": experts.score == "softmax"
        and experts.top_k == 1,  # Megatron rejects top_k=1 without this flag
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_latent_size": experts.latent_size,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",  # the only dispatcher that works without a CUDA stream
        "moe_grouped_gemm": False,
    }
