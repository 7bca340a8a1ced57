"""Insert the caching modules into a hybrid model's spec, and check a layer pattern."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.ssm.mamba_block import MambaStackSubmodules
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from .mixers import CACHING_MIXERS
from .self_attention import CachingSelfAttention


def with_mamba_cache(spec: ModuleSpec) -> ModuleSpec:
    """Return a copy of a MambaStack spec with the caching mixer and self-attention.

    All other modules (linears, norms, MLPs; local, Transformer Engine or inference-optimized) are unchanged.

    Raises:
        ValueError: If the spec has no Mamba mixer or no self-attention to replace.
        TypeError: If `spec` is not a ModuleSpec.
    """
    if not isinstance(spec, ModuleSpec):
        raise TypeError(f"spec must be the ModuleSpec of a MambaStack, found {spec!r}")
    layers = spec.submodules
    if not isinstance(layers, MambaStackSubmodules):
        raise ValueError(f"the spec for {spec.module} has no MambaStack layers; pass the spec of a hybrid model")
    return replace(
        spec,
        submodules=replace(
            layers,
            mamba_layer=_with_part(layers.mamba_layer, "mixer", CACHING_MIXERS),
            attention_layer=_with_part(layers.attention_layer, "self_attention", {SelfAttention: CachingSelfAttention}),
        ),
    )


def check_layer_pattern(pattern: str) -> None:
    """Raise `ValueError` unless `pattern` has only known symbols, and both Mamba and attention layers."""
    unknown = sorted(set(pattern) - Symbols.VALID)
    if unknown:
        raise ValueError(
            f"layer pattern {pattern!r:.100} has unknown symbols {unknown}; the known symbols are "
            f"{sorted(Symbols.VALID)} (M Mamba, * attention, - MLP, E mixture of experts)"
        )
    for symbol, name in ((Symbols.MAMBA, "Mamba"), (Symbols.ATTENTION, "attention")):
        if symbol not in pattern:
            raise ValueError(f"layer pattern {pattern!r:.100} has no {name} layer ({symbol!r}); a hybrid needs both")


def _with_part(layer: Any, name: str, caching: Mapping[type, type]) -> Any:
    """Return a copy of a layer spec in which the submodule `name` has its caching class.

    Args:
        caching: Caching class for each class that it can replace.
    """
    part: Any = getattr(getattr(layer, "submodules", None), name, None)
    found = getattr(part, "module", None)
    if part is None or found not in (*caching, *caching.values()):
        expected = " or ".join(of_megatron.__name__ for of_megatron in caching)
        raise ValueError(
            f"the spec has {found} as its {name}, which cannot be replaced by a caching module; it must be {expected}"
        )
    part = replace(part, module=caching.get(found, found))
    return replace(layer, submodules=replace(layer.submodules, **{name: part}))
