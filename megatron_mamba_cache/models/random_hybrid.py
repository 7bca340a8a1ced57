"""Build a small hybrid model with seeded random weights, for use without a checkpoint."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.models.mamba.mamba_model import MambaModel
from torch import Tensor

from .architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    GatedDeltaSizes,
    HybridArchitecture,
    MambaSizes,
)
from .hybrid_model import build_hybrid_model
from .parameter_shapes import filled_of
from .placement import ModelFiller, Placement
from .rank_shard import RankShard

_INTO_RESIDUAL = ("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True, slots=True)
class RandomHybridConfig:
    """Configuration of a hybrid model with random weights.

    Args:
        pattern: One symbol per layer: M recurrent, * attention, - MLP, E mixture of experts.
        ssm_chunk_size: Chunk size of the scan in recurrent layers, in tokens.
        gated_delta: Dimensions of Gated DeltaNet layers; None for Mamba layers. A Gated DeltaNet model also gets
            zero-centered norms, a gated shared expert, and gated attention that normalizes each head and rotates a
            quarter of its channels.
        use_rope: True for rotary position embeddings, False for none.
        num_experts: Number of experts in each E layer; a softmax router selects 2 of them for each token.
        experts: Dimensions and routing of the E layers, used instead of `num_experts` if given. A sigmoid router gets
            a random selection bias.
        gated: True for gated feed-forward layers and experts.
        init_std: Standard deviation of the weights; the default is large enough for varied output.
    """

    pattern: str = "M-M*-M-M*-"
    hidden_size: int = 64
    vocab_size: int = 256
    ssm_chunk_size: int = 64
    mamba_num_heads: int = 8
    mamba_head_dim: int = 16
    mamba_state_dim: int = 16
    mamba_num_groups: int = 2
    gated_delta: GatedDeltaSizes | None = None
    num_attention_heads: int = 4
    num_query_groups: int = 2
    num_experts: int = 4
    experts: ExpertsSizes | None = None
    gated: bool = False
    use_rope: bool = True
    max_sequence_length: int = 8192
    init_std: float = 0.15
    dtype: torch.dtype = torch.float32
    seed: int = 0


def random_hybrid_model(shape: RandomHybridConfig | None = None) -> MambaModel:
    """Build this rank's shard of the model on the current device, in eval mode.

    The same seed gives the same weights on any device and for any number of ranks. The errors raised are those of
    `build_hybrid_model`.
    """
    shape = shape or RandomHybridConfig()
    architecture = random_architecture(shape)
    model = build_hybrid_model(architecture, shape.dtype)
    splits = {name: (Placement(name, whole.split),) for name, whole in filled_of(architecture).items()}
    filler = ModelFiller(
        model,
        splits,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        RankShard.of_process(architecture).local_name,
    )
    for name, values in random_weights(shape):
        filler.fill(name, values)
    return model


def random_weights(shape: RandomHybridConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and float32 values of each parameter and selection bias in the whole model.

    All values come from one CPU generator, because generators on other devices give other values for the same seed.
    """
    generator = torch.Generator().manual_seed(shape.seed)
    residual_std = shape.init_std / math.sqrt(2 * len(shape.pattern))
    for name, whole in filled_of(random_architecture(shape)).items():
        if name.endswith(_INTO_RESIDUAL):
            yield name, torch.randn(whole.shape, generator=generator) * residual_std
        elif (bounds := _uniform_bounds(name, shape)) is not None:
            low, high = bounds
            yield name, torch.rand(whole.shape, generator=generator) * (high - low) + low
        else:
            yield name, torch.randn(whole.shape, generator=generator) * shape.init_std


def random_architecture(shape: RandomHybridConfig) -> HybridArchitecture:
    """Return the architecture of a model with this configuration."""
    is_gated_delta = shape.gated_delta is not None
    experts = shape.experts or ExpertsSizes(
        num_experts=shape.num_experts,
        top_k=2,
        hidden_size=shape.hidden_size,
        shared_hidden_size=shape.hidden_size,
        score="softmax",
        has_shared_gate=is_gated_delta,
    )
    return HybridArchitecture(
        pattern=shape.pattern,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        max_sequence_length=shape.max_sequence_length,
        norm_eps=1e-5,
        recurrent=_recurrent(shape),
        attention=AttentionSizes(
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_query_groups,
            head_dim=shape.hidden_size // shape.num_attention_heads,
            rotary_base=10_000 if shape.use_rope else None,
            rotary_percent=0.25 if is_gated_delta else 1.0,
            has_output_gate=is_gated_delta,
            has_head_norms=is_gated_delta,
        ),
        feed_forward=FeedForwardSizes(2 * shape.hidden_size, "silu" if shape.gated else "gelu", gated=shape.gated),
        experts=experts if "E" in shape.pattern else None,
        zero_centered_norms=is_gated_delta,
    )


def _recurrent(shape: RandomHybridConfig) -> MambaSizes | GatedDeltaSizes:
    if shape.gated_delta is not None:
        return replace(shape.gated_delta, chunk_size=shape.ssm_chunk_size)
    return MambaSizes(
        num_heads=shape.mamba_num_heads,
        head_dim=shape.mamba_head_dim,
        state_dim=shape.mamba_state_dim,
        num_groups=shape.mamba_num_groups,
        ssm_chunk_size=shape.ssm_chunk_size,
    )


def _uniform_bounds(name: str, shape: RandomHybridConfig) -> tuple[float, float] | None:
    """Return the bounds of a parameter with a uniform distribution; None for one with a normal distribution."""
    if "norm" in name:
        is_zero_centered = shape.gated_delta is not None and "mixer.norm" not in name
        return (-0.2, 0.2) if is_zero_centered else (0.8, 1.2)
    if "conv1d" in name:
        return -0.5, 0.5
    return {"A_log": (0.0, 1.5), "dt_bias": (-4.0, -1.0), "D": (0.5, 1.5)}.get(name.rsplit(".", 1)[-1])
