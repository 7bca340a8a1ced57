"""Read the shape and the fingerprint of a model from its parts on all ranks."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from ..kernels.attention.kv_values import UNSCALED
from ..ranks.group import OneRank, Ranks, on_all_ranks
from ..recurrences.interface import Recurrence
from ..recurrences.model_shape import HybridModelShape, RecurrentLayers, kv_heads_of_rank
from .expert_layer import waits_for_experts
from .linear import QuantizableLinear
from .mtp_head import MTPHead, RemoteHead
from .self_attention import CachingSelfAttention
from .specs import check_layer_pattern
from .stacked_experts import StackedExperts
from .step_reads import weights_of_token

_PACKAGE = __name__.partition(".")[0]
_NO_FACTS = ("training", "max_sequence_length", "first_expert", "_copy", "exchange")
_OF_RANKS = ("rank", "group", "local_expert")
_Fact = tuple[str, str]


@runtime_checkable
class RecurrentMixer(Protocol):
    """Interface of the mixer of a recurrent layer whose states are in slots."""

    recurrence: Recurrence

    @property
    def facts(self) -> tuple[Any, ...]:
        """Settings that determine the output for given weights: numbers, strings, dtypes, or dataclasses of these."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Description of one rank's part of a model."""

    layer_types: tuple[str, ...]
    num_weights: int  # number of weights used per token, in all layers
    recurrences: tuple[Recurrence, ...]  # one entry per recurrent layer
    waits_for_experts: bool
    has_quantized_weights: bool
    fingerprint: str


def model_shape_of(
    model: Any, ranks: Ranks | None = None, head: MTPHead | RemoteHead | None = None
) -> HybridModelShape:
    """Read the shape of a MambaModel that was built from a `with_mamba_cache` spec; all its ranks must call this.

    Args:
        head: Multi-token prediction head that drafts for the model; its keys and values are in the model's KV blocks.
        ranks: Ranks that hold the model; None if this rank holds all of it.

    Raises:
        ValueError: If the model is not a hybrid of Mamba and attention layers, was built without the caching modules,
            has KV heads that cannot be divided between the ranks, or has different mixers on tensor-parallel ranks.
    """
    ranks, head = ranks or OneRank(), head if isinstance(head, MTPHead) else None
    parts = ranks.gather(on_all_ranks(ranks, lambda: _part_of(model, head)))
    num_tensor_ranks = ranks.num_ranks // ranks.num_stages
    stages = parts[::num_tensor_ranks]
    check_layer_pattern("".join(symbol for part in stages for symbol in part.layer_types))
    recurrences = _agreed_recurrences(parts, num_tensor_ranks)
    config, layer_types = model.config, parts[ranks.index].layer_types
    modules = chain(model.modules(), () if head is None else head.modules())
    kv_scales = tuple(module.kv_scales for module in modules if isinstance(module, CachingSelfAttention))
    mine = parts[ranks.index].recurrences
    return HybridModelShape(
        layer_types=layer_types,
        recurrent=tuple(
            RecurrentLayers(recurrence, tuple(index for index, own in enumerate(mine) if own == recurrence))
            for recurrence in recurrences
        ),
        num_heads=config.num_attention_heads // num_tensor_ranks,
        num_kv_heads=kv_heads_of_rank(config.num_query_groups, num_tensor_ranks),
        softmax_scale=config.kv_channels**-0.5 if config.softmax_scale is None else config.softmax_scale,
        kv_channels=config.kv_channels,
        vocab_size=model.vocab_size,
        params_dtype=config.params_dtype,
        fingerprint=_agreed_fingerprint(parts),
        layer_weights=sum(part.num_weights for part in stages) // sum(len(part.layer_types) for part in stages),
        waits_for_experts=parts[ranks.index].waits_for_experts,
        kv_scales=kv_scales if any(scales != UNSCALED for scales in kv_scales) else (),
        has_quantized_weights=any(part.has_quantized_weights for part in parts),
        head_types=() if head is None else tuple(head.pattern),
        hidden_size=0 if head is None else config.hidden_size,
        experts_per_token=config.moe_router_topk if config.num_moe_experts else 0,
    )


def _part_of(model: Any, head: MTPHead | None) -> _Part:
    layer_types = tuple(model.decoder.layer_type_list)
    for symbol, layer in zip(layer_types, model.decoder.layers, strict=True):
        if isinstance(layer, IdentityOp):
            raise ValueError(
                f"the model's layer pattern contains {symbol!r}, but its spec has no layer of this type, so Megatron "
                "left such layers out; build the model from a spec with this layer type"
            )
    found: dict[str, list[Any]] = {
        Symbols.MAMBA: [module for module in model.modules() if isinstance(module, RecurrentMixer)],
        Symbols.ATTENTION: [module for module in model.modules() if isinstance(module, CachingSelfAttention)],
    }
    if any(not modules and symbol in layer_types for symbol, modules in found.items()):
        raise ValueError(
            "the model was built without the caching modules; build it from with_mamba_cache(spec) instead of spec"
        )
    recurrences = tuple(mixer.recurrence for mixer in found[Symbols.MAMBA])
    return _Part(
        layer_types,
        weights_of_token(model),
        recurrences,
        waits_for_experts(model),
        _has_quantized_weights(model) or (head is not None and _has_quantized_weights(head)),
        _fingerprint(model) if head is None else f"{_fingerprint(model)} {_fingerprint(head)}",
    )


def _has_quantized_weights(model: Any) -> bool:
    return any(
        module.form is not None if isinstance(module, QuantizableLinear) else bool(module.forms)
        for module in model.modules()
        if isinstance(module, QuantizableLinear | StackedExperts)
    )


def _agreed_recurrences(parts: Sequence[_Part], num_tensor_ranks: int) -> tuple[Recurrence, ...]:
    """Return the distinct recurrences of all stages, in layer order; raise if tensor-parallel ranks differ."""
    stages = [parts[first : first + num_tensor_ranks] for first in range(0, len(parts), num_tensor_ranks)]
    for stage in stages:
        found = {part.recurrences for part in stage}
        if len(found) > 1:
            raise ValueError(
                f"the recurrent mixers of tensor-parallel ranks differ: {sorted(map(repr, found))}; build all parts "
                "of the model with the same sizes"
            )
    return tuple(dict.fromkeys(recurrence for first, *_ in stages for recurrence in first.recurrences))


def _agreed_fingerprint(parts: Sequence[_Part]) -> str:
    """Return one fingerprint for the whole model; if it has a single part, that part's fingerprint."""
    if len(parts) == 1:
        return parts[0].fingerprint
    return hashlib.sha256(repr([part.fingerprint for part in parts]).encode()).hexdigest()


def _fingerprint(model: Any) -> str:
    described = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    return hashlib.sha256(repr((described, facts_of(model))).encode()).hexdigest()


def facts_of(model: nn.Module) -> list[_Fact]:
    """Return the names and values of all settings that affect the model's output, in a reproducible order.

    A recurrent mixer lists its own settings. For other modules, all simple attributes are included: numbers, strings,
    dtypes, function names, tensors that are not weights, and tuples, dataclasses and objects of this package that
    consist of these. Attributes that differ between ranks are left out.
    """
    found = [("config", text) for text in _fields_of(model.config)]
    for path, module in model.named_modules():
        if isinstance(module, RecurrentMixer):
            found.append((path, _text_of(module.facts)))
        else:
            found += [(f"{path}.{name}", text) for name, text in _attributes_of(module)]
        for name in sorted(module._non_persistent_buffers_set):
            found.append((f"{path}.{name}", _bits_of(module._buffers[name])))
    return found


def _attributes_of(owner: Any) -> Iterator[_Fact]:
    for name, value in sorted(vars(owner).items()):
        if value is None or name in _NO_FACTS or any(part in name for part in _OF_RANKS):
            continue
        if type(value).__module__.startswith(_PACKAGE) and not isinstance(value, nn.Module) and not _is_simple(value):
            yield from ((f"{name}.{inner}", text) for inner, text in _attributes_of(value))
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield name, _bits_of(value)
        elif _is_simple(value):
            yield name, _text_of(value)


def _fields_of(config: Any) -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        if "rank" not in field.name and _is_simple(value):
            yield f"{field.name}={_text_of(value)}"


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_simple(getattr(value, field.name)) for field in fields(value))
    return value is None or isinstance(value, int | float | str | Enum | torch.dtype) or hasattr(value, "__qualname__")


def _text_of(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text_of, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}{_text_of([getattr(value, field.name) for field in fields(value)])}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def _bits_of(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(octets.numpy().tobytes()).hexdigest()}"
