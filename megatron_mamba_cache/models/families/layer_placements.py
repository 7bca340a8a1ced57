"""Megatron destinations of the checkpoint tensors that all hybrid model families have."""

from collections.abc import Mapping

from torch import Tensor

from ..architecture import HybridArchitecture, MambaSizes
from ..parameter_shapes import recurrent_parameters
from ..placement import GroupedSplit, Placement, Split
from ..rank_shard import EMBEDDINGS, OUTPUT

Placements = dict[str, tuple[Placement, ...]]

_IN_PROJ = "mixer.in_proj.weight"


def mixer_placements(
    architecture: HybridArchitecture, layer: int, recurrent: str, attention: str, norm: str
) -> Placements:
    """Return the destinations of a recurrent or attention layer's tensors, except Gated DeltaNet input projections.

    Args:
        layer: Index of the Megatron layer.
        recurrent, attention: Prefix of the mixer's tensor names in the checkpoint if the layer is of this kind.
        norm: Name of the norm before the mixer in the checkpoint.
    """
    if architecture.pattern[layer] == "M":
        return _recurrent_placements(architecture, layer, recurrent, norm)
    return _attention_placements(architecture, layer, attention, norm)


def _recurrent_placements(architecture: HybridArchitecture, layer: int, prefix: str, norm: str) -> Placements:
    target, placements = f"decoder.layers.{layer}.", Placements()
    for name, parameter in recurrent_parameters(architecture).items():
        if name == "norm.weight":
            placements[norm] = (Placement(f"{target}{name}"),)
        elif name != _IN_PROJ or isinstance(architecture.recurrent, MambaSizes):
            placements[f"{prefix}{name.removeprefix('mixer.')}"] = (Placement(f"{target}{name}", parameter.split),)
    return placements


def in_proj_sections(architecture: HybridArchitecture) -> tuple[int, ...]:
    """Return the number of rows in each section of a mixer's input projection, such as q, k, v, z, b, a."""
    split = recurrent_parameters(architecture)[_IN_PROJ].split
    assert isinstance(split, Split)
    return split.sections


def _attention_placements(architecture: HybridArchitecture, layer: int, prefix: str, norm: str) -> Placements:
    """Return the destinations of an attention layer's tensors.

    Megatron groups the rows of q, k and v by KV head. In checkpoints, the rows of each head's output gate follow the
    rows of its query. In Megatron, the gates of all heads that share a KV head follow the queries of these heads.
    """
    attention, target = architecture.attention, f"decoder.layers.{layer}."
    parts_of_a_head = 2 if attention.has_output_gate else 1
    of_group = parts_of_a_head * attention.num_heads // attention.num_kv_heads + 2

    def by_group(qkv: Tensor) -> Tensor:
        num_heads = min(len(qkv) // attention.head_dim, of_group)  # smaller if several ranks share a KV head
        return qkv.view(-1, num_heads, attention.head_dim, qkv.shape[-1])

    def queries(qkv: Tensor) -> Tensor:
        return by_group(qkv)[:, :-2].unflatten(1, (parts_of_a_head, -1)).transpose(1, 2)

    def key(qkv: Tensor) -> Tensor:
        return by_group(qkv)[:, -2:-1]

    def value(qkv: Tensor) -> Tensor:
        return by_group(qkv)[:, -1:]

    qkv, by_kv_head = f"{target}self_attention.linear_qkv.weight", GroupedSplit(attention.num_kv_heads)
    placements: Placements = {
        f"{prefix}q_proj.weight": (Placement(qkv, Split(0), view=queries),),
        f"{prefix}k_proj.weight": (Placement(qkv, by_kv_head, view=key),),
        f"{prefix}v_proj.weight": (Placement(qkv, by_kv_head, view=value),),
        f"{prefix}o_proj.weight": (Placement(f"{target}self_attention.linear_proj.weight", Split(1)),),
        norm: (Placement(f"{target}input_layernorm.weight"),),
    }
    for name in ("q", "k") if attention.has_head_norms else ():
        placements[f"{prefix}{name}_norm.weight"] = (Placement(f"{target}self_attention.{name}_layernorm.weight"),)
    return placements


def mlp_norm_placement(layer: int, norm: str) -> Placements:
    """Return the destination of the norm before a feed-forward layer."""
    return {norm: (Placement(f"decoder.layers.{layer}.pre_mlp_layernorm.weight"),)}


def gated_mlp_placements(target: str, prefix: str) -> Placements:
    """Return the destinations of a gated MLP's tensors, given the name prefixes in Megatron and in the checkpoint."""
    fc1 = f"{target}linear_fc1.weight"
    return {
        f"{prefix}gate_proj.weight": (Placement(fc1, Split(0), view=lambda part: part[: len(part) // 2]),),
        f"{prefix}up_proj.weight": (Placement(fc1, Split(0), view=lambda part: part[len(part) // 2 :]),),
        f"{prefix}down_proj.weight": (Placement(f"{target}linear_fc2.weight", Split(1)),),
    }


def ends_placements(architecture: HybridArchitecture, names: Mapping[str, str]) -> Placements:
    """Return the destinations of embeddings, final norm and output weights, given their names in the checkpoint."""
    placements: Placements = {
        names["embeddings"]: (Placement(EMBEDDINGS, Split(0)),),
        names["final_norm"]: (Placement("decoder.final_norm.weight"),),
    }
    if not architecture.tie_embeddings:
        placements[names["output"]] = (Placement(OUTPUT, Split(0)),)
    return placements
