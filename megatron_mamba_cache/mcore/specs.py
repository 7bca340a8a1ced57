"""Module specs of hybrid models: swap the caching modules into any spec, and a spec that needs torch only."""

from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from .mamba_mixer import CachingMambaMixer
from .self_attention import CachingSelfAttention


def with_mamba_cache(spec: ModuleSpec) -> ModuleSpec:
    """Return a copy of a MambaStack spec with the caching mixer and self-attention in place of Megatron's.

    Everything else of the spec (linears, norms, MLPs; local, Transformer Engine or inference-optimized) stays.

    Raises:
        ValueError: If the spec has no Mamba mixer or no self-attention to replace.
    """
    layers = spec.submodules
    if not isinstance(layers, MambaStackSubmodules):
        raise ValueError(f"the spec of {spec.module} has no layers of a MambaStack; pass the spec of a hybrid model")
    return replace(
        spec,
        submodules=replace(
            layers,
            mamba_layer=_with_part(layers.mamba_layer, "mixer", MambaMixer, CachingMambaMixer),
            attention_layer=_with_part(layers.attention_layer, "self_attention", SelfAttention, CachingSelfAttention),
        ),
    )


def local_hybrid_spec(ssm_chunk_size: int = 128) -> ModuleSpec:
    """Return a MambaStack spec, caching modules included, that needs neither Transformer Engine nor apex.

    Args:
        ssm_chunk_size: Tokens in a tile of the SSM scan; the KV block size is a multiple of it.
    """
    mixer = ModuleSpec(
        module=MambaMixer,
        params={"chunk_size": ssm_chunk_size},
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    stack = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
            ),
        ),
    )
    return with_mamba_cache(ModuleSpec(module=LocalMambaStack, submodules=stack))


def check_layer_pattern(pattern: str) -> None:
    """Raise `ValueError` unless `pattern` is a hybrid of known layer symbols with Mamba and attention layers."""
    unknown = sorted(set(pattern) - Symbols.VALID)
    if unknown:
        raise ValueError(
            f"layer pattern {pattern!r} has unknown symbols {unknown}; known are {sorted(Symbols.VALID)} "
            "(M Mamba, * attention, - MLP, E mixture of experts)"
        )
    for symbol, name in ((Symbols.MAMBA, "Mamba"), (Symbols.ATTENTION, "attention")):
        if symbol not in pattern:
            raise ValueError(
                f"layer pattern {pattern!r} has no {name} layer ({symbol!r}); only hybrids of both are supported"
            )


class LocalMambaStack(MambaStack):
    """A MambaStack whose final norm is torch's: Megatron's hard-codes Transformer Engine's."""

    def __init__(self, config: Any, submodules: Any, post_layer_norm: bool = True, **settings: Any) -> None:
        super().__init__(config, submodules, post_layer_norm=False, **settings)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)


def _with_part(layer: Any, name: str, megatron_class: type, caching_class: type) -> Any:
    """Return a copy of a layer's spec with the caching class as one of its parts."""
    part = getattr(getattr(layer, "submodules", None), name, None)
    found = getattr(part, "module", None)
    if part is None or not (isinstance(found, type) and issubclass(found, megatron_class)):
        raise ValueError(f"the spec has {found}, not a {megatron_class.__name__}, where the caching module goes")
    return replace(layer, submodules=replace(layer.submodules, **{name: replace(part, module=caching_class)}))
