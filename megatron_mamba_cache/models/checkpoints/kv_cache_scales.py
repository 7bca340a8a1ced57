"""Scales of FP8 keys and values: read them from a checkpoint, and set them in the model's attention layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ...kernels.attention.kv_values import KVScales
from ...mcore.self_attention import CachingSelfAttention
from ..placement import Placements
from .checkpoint_tensors import CheckpointTensors

_KINDS = {"k_scale": "key", "v_scale": "value"}
_QKV = "linear_qkv.weight"
_REMEDY = "fetch the file again, or remove the tensor, without which the scale is 1.0"


@dataclass(frozen=True, slots=True)
class KVScale:
    """Scale of an attention layer's keys or values.

    Args:
        target: Name of the layer's QKV weight in the whole model.
        kind: "key" or "value".
    """

    target: str
    kind: str
    scale: float


def read_kv_scales(files: CheckpointTensors, placements: Placements) -> list[KVScale]:
    """Read the scales of keys and values that a checkpoint stores, for all attention layers of the model.

    The tensor is `k_scale` or `v_scale`, after the name of the layer or of its key or value projection.

    Raises:
        ValueError: If a scale is not a single positive, finite value, or keys or values of a layer have two scales. The
            message names the tensor.
    """
    names: dict[tuple[str, str], str] = {}
    for name in files.other_scales:
        stem, _, ending = name.rpartition(".")
        projection = f"{ending[0]}_proj"
        weight = f"{stem.removesuffix(f'.{projection}')}.{projection}.weight"
        for placement in placements.get(weight, ()) if ending in _KINDS else ():
            key = placement.target, _KINDS[ending]
            if key in names:
                raise ValueError(f"tensors {names[key]} and {name} scale the same {key[1]}s; remove one of them")
            names[key] = name
    stored = files.as_stored(list(names.values()))
    return [KVScale(target, kind, _checked(name, stored[name])) for (target, kind), name in names.items()]


def set_kv_scales(model: nn.Module, scales: Sequence[KVScale], local_name: Callable[[str], str | None]) -> None:
    """Set `kv_scales` of the attention layers on this rank; a scale that the checkpoint lacks stays 1.0.

    Args:
        local_name: As in `ModelFiller`.
    """
    for found in scales:
        name = local_name(found.target)
        if name is not None:
            attention = model.get_submodule(name.rpartition(f".{_QKV}")[0])
            assert isinstance(attention, CachingSelfAttention)
            attention.kv_scales = replace(attention.kv_scales, **{found.kind: found.scale})


def _checked(name: str, stored: Tensor) -> float:
    if stored.numel() != 1:
        raise ValueError(
            f"tensor {name} has shape {tuple(stored.shape)}; a layer's keys or values have a single scale; {_REMEDY}"
        )
    scale = stored.float().item()
    try:
        KVScales(scale, scale)
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}; {_REMEDY}") from error
    return scale
