"""Destinations of the tensors that every hybrid family has, under the names Megatron gives them."""

from collections.abc import Callable, Mapping

from torch import Tensor

from ..architecture import HybridArchitecture, MambaSizes
from ..placement import Placement, Split
from ..rank_part import EMBEDDINGS, OUTPUT

Places = dict[str, tuple[Placement, ...]]


def mamba_places(architecture: HybridArchitecture, layer: int, prefix: str, norm: str) -> Places:
    """Return where a Mamba layer's tensors go.

    Args:
        layer: Index of the Megatron layer.
        prefix: Checkpoint name of the mixer, with the trailing dot.
        norm: Checkpoint name of the norm before it.
    """
    mamba, target = architecture.recurrent, f"decoder.layers.{layer}."
    assert isinstance(mamba, MambaSizes)
    inner, bc = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
    conv = Split(0, (inner, bc, bc))
    splits = {
        "in_proj.weight": Split(0, (inner, inner, bc, bc, mamba.num_heads)),  # z, x, B, C, dt
        "conv1d.weight": conv,
        **({"conv1d.bias": conv} if mamba.conv_bias else {}),
        "dt_bias": Split(0),
        "A_log": Split(0),
        "D": Split(0),
        "norm.weight": Split(0),
        "out_proj.weight": Split(1),
    }
    places = {f"{prefix}{name}": (Placement(f"{target}mixer.{name}", split),) for name, split in splits.items()}
    return {**places, norm: (Placement(f"{target}norm.weight"),)}


def attention_places(architecture: HybridArchitecture, layer: int, prefix: str, norm: str) -> Places:
    """Return where an attention layer's tensors go; see `mamba_places`. Megatron interleaves q, k and v by KV head."""
    attention, target = architecture.attention, f"decoder.layers.{layer}."
    per_group = attention.num_heads // attention.num_kv_heads
    shape = (-1, per_group + 2, attention.head_dim, architecture.hidden_size)

    def part(start: int, stop: int) -> Callable[[Tensor], Tensor]:
        return lambda qkv: qkv.view(shape)[:, start:stop]

    qkv = f"{target}self_attention.linear_qkv.weight"
    return {
        f"{prefix}q_proj.weight": (Placement(qkv, Split(0), view=part(0, per_group)),),
        f"{prefix}k_proj.weight": (Placement(qkv, Split(0), view=part(per_group, per_group + 1)),),
        f"{prefix}v_proj.weight": (Placement(qkv, Split(0), view=part(per_group + 1, per_group + 2)),),
        f"{prefix}o_proj.weight": (Placement(f"{target}self_attention.linear_proj.weight", Split(1)),),
        norm: (Placement(f"{target}input_layernorm.weight"),),
    }


def mlp_norm_place(layer: int, norm: str) -> Places:
    """Return where the norm before a feed-forward layer goes."""
    return {norm: (Placement(f"decoder.layers.{layer}.pre_mlp_layernorm.weight"),)}


def gate_half(fc1: Tensor) -> Tensor:
    """Return the half of a gated first projection that is activated."""
    return fc1[: fc1.shape[0] // 2]


def up_half(fc1: Tensor) -> Tensor:
    """Return the half of a gated first projection that is multiplied in."""
    return fc1[fc1.shape[0] // 2 :]


def ends_places(architecture: HybridArchitecture, names: Mapping[str, str]) -> Places:
    """Return where embeddings, final norm and output weights go.

    Args:
        names: Checkpoint names of "embeddings", "final_norm" and "output".
    """
    places: Places = {
        names["embeddings"]: (Placement(EMBEDDINGS, Split(0)),),
        names["final_norm"]: (Placement("decoder.final_norm.weight"),),
    }
    if not architecture.tie_embeddings:
        places[names["output"]] = (Placement(OUTPUT, Split(0)),)
    return places
