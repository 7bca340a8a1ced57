"""Compute the `HybridModelShape` of a rank's shard from the architecture, without building the model."""

import torch
from megatron.core import parallel_state

from ..recurrences.gated_delta.recurrence import GatedDelta
from ..recurrences.interface import Recurrence
from ..recurrences.mamba2.recurrence import Mamba2
from ..recurrences.model_shape import RECURRENT, HybridModelShape, RecurrentLayers, kv_heads_of_rank
from .architecture import GatedDeltaSizes, HybridArchitecture, MambaSizes
from .parameter_shapes import parameters_of
from .rank_shard import RankShard, check_ranks


def rank_shape(architecture: HybridArchitecture, dtype: torch.dtype, head_pattern: str = "") -> HybridModelShape:
    """Return the shape of this rank's shard; raise `ValueError` if the model cannot be split over the ranks.

    Args:
        head_pattern: As in `shard_shape`, for the head on the last pipeline stage.
    """
    check_ranks(architecture)
    part = RankShard.of_process(architecture)
    num_tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
    head_pattern = head_pattern if part.is_last_stage else ""
    return shard_shape(architecture, dtype, part.layers, num_tensor_ranks, head_pattern)


def shard_shape(
    architecture: HybridArchitecture,
    dtype: torch.dtype,
    layers: range | None = None,
    num_tensor_ranks: int = 1,
    head_pattern: str = "",
) -> HybridModelShape:
    """Return the shape of a shard; its fingerprint is empty, because a fingerprint needs a built model.

    Args:
        dtype: Dtype of the weights.
        layers: Layers of the shard; None for all.
        num_tensor_ranks: Number of tensor-parallel ranks, which divide the heads and groups.
        head_pattern: One symbol per layer of the multi-token prediction head on the shard; empty without one.
    """
    attention, recurrence = architecture.attention, _recurrence(architecture.recurrent, num_tensor_ranks)
    layer_types = tuple(architecture.pattern if layers is None else architecture.pattern[layers.start : layers.stop])
    return HybridModelShape(
        layer_types=layer_types,
        recurrent=(RecurrentLayers(recurrence, tuple(range(layer_types.count(RECURRENT)))),),
        num_heads=attention.num_heads // num_tensor_ranks,
        num_kv_heads=kv_heads_of_rank(attention.num_kv_heads, num_tensor_ranks),
        softmax_scale=attention.scale or attention.head_dim**-0.5,
        kv_channels=attention.head_dim,
        vocab_size=architecture.vocab_size,
        params_dtype=dtype,
        fingerprint="",
        layer_weights=_layer_weights(architecture, num_tensor_ranks),
        head_types=tuple(head_pattern),
        hidden_size=architecture.hidden_size if head_pattern else 0,
        experts_per_token=0 if architecture.experts is None else architecture.experts.top_k,
    )


def _recurrence(sizes: MambaSizes | GatedDeltaSizes, num_tensor_ranks: int) -> Recurrence:
    if isinstance(sizes, GatedDeltaSizes):
        return GatedDelta(
            num_key_heads=sizes.num_key_heads // num_tensor_ranks,
            num_value_heads=sizes.num_value_heads // num_tensor_ranks,
            key_dim=sizes.key_head_dim,
            value_dim=sizes.value_head_dim,
            d_conv=sizes.d_conv,
            grain=sizes.grain,
        )
    return Mamba2(
        num_heads=sizes.num_heads // num_tensor_ranks,
        head_dim=sizes.head_dim,
        d_state=sizes.state_dim,
        num_groups=sizes.num_groups // num_tensor_ranks,
        d_conv=sizes.d_conv,
        grain=sizes.grain,
    )


def _layer_weights(architecture: HybridArchitecture, num_tensor_ranks: int) -> int:
    """Return the mean number of matrix weights per layer that a token uses; MoE layers count `top_k` experts."""
    total = 0
    for name, whole in parameters_of(architecture).items():
        if not name.startswith("decoder.layers.") or len(whole.shape) != 2:
            continue
        if ".local_experts." in name and ".local_experts.0." not in name:
            continue
        of_rank = whole.split.local(torch.empty(whole.shape, device="meta"), 0, num_tensor_ranks).numel()
        if ".local_experts." in name:
            assert architecture.experts is not None
            of_rank *= architecture.experts.top_k
        total += of_rank
    return total // len(architecture.pattern)
