"""Spec for hybrid models with the caching modules; needs neither Transformer Engine nor apex."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import WrappedTensor
from torch import Tensor
from typing_extensions import override

from ..kernels.experts.routing_rule import RoutingRule
from .between_layers import LayerNorm, ResidualAdd, link_layers
from .expert_layer import ExpertLayer, MixtureOfExperts
from .expert_settings import checked_routing
from .feed_forward import DenseLayer, SharedFeedForward
from .linear import OneTokenColumnLinear, OneTokenRowLinear
from .megatron_settings import check_settings
from .mixers.gated_delta import GatedDeltaMixer
from .specs import with_mamba_cache

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # Megatron reads this name, but defines it only if Transformer Engine is installed


@dataclass(frozen=True, slots=True)
class LocalSpecOptions:
    """Options of a hybrid model that `TransformerConfig` does not have.

    Args:
        mixer: Type of the recurrent layers; "gated_delta" takes its dimensions from the TransformerConfig.
        grain: Number of tokens per chunk of the scan; the KV block size must be a multiple of it.
        d_conv, conv_bias, time_step_limit: Passed to `CachingMambaMixer`.
        norm_eps: Epsilon of the norm before a mixer, which Megatron does not read from the TransformerConfig.
        gated_norm_eps: Epsilon of the norm at a mixer's end; None uses `norm_eps`.
        has_head_norms: True if queries and keys are normalized per head; must equal `TransformerConfig.qk_layernorm`.
        num_experts: Number of experts per MoE layer; None if the model has no MoE layers.
        routing: Rule that chooses the experts for a token; None: derived from the TransformerConfig.
        input_multiplier, residual_multiplier, output_multiplier: Factors that multiply the embeddings, each layer's
            output before it is added to the residual, and the final hidden states.
    """

    mixer: Literal["mamba2", "gated_delta"] = "mamba2"
    grain: int = 128
    d_conv: int = 4
    conv_bias: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    norm_eps: float = 1e-5
    gated_norm_eps: float | None = None
    has_head_norms: bool = False
    num_experts: int | None = None
    routing: RoutingRule | None = None
    input_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    output_multiplier: float = 1.0


def local_hybrid_spec(options: LocalSpecOptions | None = None) -> ModuleSpec:
    """Return a MambaStack spec with the caching modules, fused norms and Megatron's linear layers."""
    options = options or LocalSpecOptions()
    add = ModuleSpec(module=ResidualAdd, params={"multiplier": options.residual_multiplier})
    dense = ModuleSpec(module=MLP, submodules=_linears())
    stack = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=ModuleSpec(module=LayerNorm, params={"eps": options.norm_eps}),
                mixer=_mixer(options),
                mamba_bda=add,
            ),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=LayerNorm, self_attention=_attention(options), self_attn_bda=add
            ),
        ),
        mlp_layer=ModuleSpec(module=DenseLayer, submodules=_feed_forward(dense, add)),
    )
    if options.num_experts is not None:
        experts = get_moe_module_spec(use_te=False, num_experts=options.num_experts, moe_grouped_gemm=False)
        experts.submodules.shared_experts = ModuleSpec(module=SharedFeedForward, submodules=_linears())
        mixture = ModuleSpec(
            module=MixtureOfExperts, params={"routing": options.routing}, submodules=experts.submodules
        )
        stack.moe_layer = ModuleSpec(module=ExpertLayer, submodules=_feed_forward(mixture, add))
    multipliers = {"input_multiplier": options.input_multiplier, "output_multiplier": options.output_multiplier}
    return with_mamba_cache(ModuleSpec(module=LocalHybridStack, params=multipliers, submodules=stack))


class LocalHybridStack(MambaStack):
    """MambaStack whose final norm is a `LayerNorm`; the final norm of Megatron's class needs Transformer Engine.

    Args:
        input_multiplier, output_multiplier: Same as in `LocalSpecOptions`.

    Raises:
        ValueError: If a setting of the model is not supported; raised before any layer allocates memory.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        post_layer_norm: bool = True,
        *,
        input_multiplier: float = 1.0,
        output_multiplier: float = 1.0,
        **settings: Any,
    ) -> None:
        check_settings(config)
        if Symbols.MOE in (settings.get("hybrid_override_pattern") or ""):
            _check_experts(config, submodules.moe_layer, settings["pg_collection"])
        super().__init__(config, submodules, post_layer_norm=False, **settings)
        self.post_layer_norm = post_layer_norm
        self.input_multiplier = input_multiplier
        self.output_multiplier = output_multiplier
        if self.post_process and post_layer_norm:
            self.final_norm = LayerNorm(config, config.hidden_size, config.layernorm_epsilon)
        link_layers(self.layers, getattr(self, "final_norm", None))

    @override
    def forward(self, hidden_states: Any, *args: Any, **settings: Any) -> Tensor:
        """Run the layers; see MambaStack."""
        if self.pre_process and self.input_multiplier != 1.0:
            given = hidden_states.unwrap() if isinstance(hidden_states, WrappedTensor) else hidden_states
            hidden_states = given * self.input_multiplier
        out = super().forward(hidden_states, *args, **settings)
        return out * self.output_multiplier if self.post_process and self.output_multiplier != 1.0 else out


def _check_experts(config: Any, layer: ModuleSpec | type, groups: Any) -> None:
    """Raise `ValueError` if the MoE layers cannot be built from their spec; the message names the setting."""
    if not isinstance(layer, ModuleSpec):
        raise ValueError(
            "LocalSpecOptions.num_experts is None, but hybrid_override_pattern has MoE layers (E); set num_experts"
        )
    mixture = layer.submodules.mlp
    if mixture.module is MixtureOfExperts:  # `check_expert_layers` checks Megatron's MoE layers
        checked_routing(config, groups, **mixture.params)


def _mixer(options: LocalSpecOptions) -> ModuleSpec:
    norm_eps = options.norm_eps if options.gated_norm_eps is None else options.gated_norm_eps
    linears = MambaMixerSubmodules(in_proj=OneTokenColumnLinear, out_proj=OneTokenRowLinear)
    if options.mixer == "gated_delta":
        params: dict[str, Any] = {"chunk_size": options.grain, "norm_eps": norm_eps}
        return ModuleSpec(module=GatedDeltaMixer, params=params, submodules=linears)
    return ModuleSpec(
        module=MambaMixer,
        params={
            "chunk_size": options.grain,
            "d_conv": options.d_conv,
            "conv_bias": options.conv_bias,
            "norm_eps": norm_eps,
            "time_step_limit": options.time_step_limit,
        },
        submodules=linears,
    )


def _attention(options: LocalSpecOptions) -> ModuleSpec:
    head_norm = LayerNorm if options.has_head_norms else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=OneTokenColumnLinear,
            core_attention=DotProductAttention,
            linear_proj=OneTokenRowLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=OneTokenColumnLinear, linear_fc2=OneTokenRowLinear)


def _feed_forward(mlp: ModuleSpec, add: ModuleSpec) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(pre_mlp_layernorm=LayerNorm, mlp=mlp, mlp_bda=add)
