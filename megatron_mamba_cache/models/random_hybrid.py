"""A small hybrid model with seeded random weights, for trying the cache out without a checkpoint."""

import math
from dataclasses import dataclass

import torch
from megatron.core.models.mamba.mamba_model import MambaModel

from .architecture import AttentionShape, FeedForwardShape, HybridArchitecture, MambaShape, build_hybrid_model

_INTO_RESIDUAL = ("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True, slots=True)
class RandomHybridConfig:
    """Sizes of a random hybrid model.

    Args:
        pattern: One symbol a layer: M Mamba, * attention, - MLP.
        use_rope: Rotary position embeddings; False: none.
        init_std: Standard deviation of the weights; large enough that tokens differ.
    """

    pattern: str = "M-M*-M-M*-"
    hidden_size: int = 64
    vocab_size: int = 256
    ssm_chunk_size: int = 64
    mamba_num_heads: int = 8
    mamba_head_dim: int = 16
    mamba_state_dim: int = 16
    mamba_num_groups: int = 2
    num_attention_heads: int = 4
    num_query_groups: int = 2
    use_rope: bool = True
    max_sequence_length: int = 8192
    init_std: float = 0.15
    dtype: torch.dtype = torch.float32
    seed: int = 0


def random_hybrid_model(shape: RandomHybridConfig | None = None) -> MambaModel:
    """Build the model on the current device, in eval mode; the same seed gives the same weights on any device.

    Raises:
        ValueError: If the pattern has an unknown symbol, or no Mamba or attention layer.
    """
    shape = shape or RandomHybridConfig()
    model = build_hybrid_model(_architecture(shape), shape.dtype)
    _randomize(model, shape)
    return model


def _architecture(shape: RandomHybridConfig) -> HybridArchitecture:
    return HybridArchitecture(
        pattern=shape.pattern,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        max_sequence_length=shape.max_sequence_length,
        norm_eps=1e-5,
        mamba=MambaShape(
            num_heads=shape.mamba_num_heads,
            head_dim=shape.mamba_head_dim,
            state_dim=shape.mamba_state_dim,
            num_groups=shape.mamba_num_groups,
            ssm_chunk_size=shape.ssm_chunk_size,
        ),
        attention=AttentionShape(
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_query_groups,
            head_dim=shape.hidden_size // shape.num_attention_heads,
            rotary_base=10_000 if shape.use_rope else None,
        ),
        feed_forward=FeedForwardShape(2 * shape.hidden_size, "gelu", gated=False),
    )


def _randomize(model: MambaModel, shape: RandomHybridConfig) -> None:
    """Draw every parameter from one CPU generator: Megatron draws some on the device, with other numbers there."""
    generator = torch.Generator().manual_seed(shape.seed)
    residual_std = shape.init_std / math.sqrt(2 * len(shape.pattern))
    for name, parameter in model.named_parameters():
        if name.endswith(_INTO_RESIDUAL):
            drawn = torch.randn(parameter.shape, generator=generator) * residual_std
        elif (bounds := _uniform_bounds(name)) is not None:
            low, high = bounds
            drawn = torch.rand(parameter.shape, generator=generator) * (high - low) + low
        else:
            drawn = torch.randn(parameter.shape, generator=generator) * shape.init_std
        parameter.data.copy_(drawn)


def _uniform_bounds(name: str) -> tuple[float, float] | None:
    """Return the range of what is no matrix; None for a matrix."""
    if "norm" in name:
        return 0.8, 1.2
    if "conv1d" in name:
        return -0.5, 0.5
    return {"A_log": (0.0, 1.5), "dt_bias": (-4.0, -1.0), "D": (0.5, 1.5)}.get(name.rsplit(".", 1)[-1])
