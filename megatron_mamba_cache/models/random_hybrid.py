"""A small hybrid model with seeded random weights, for trying the cache out without a checkpoint."""

import math
from dataclasses import dataclass

import torch
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer import TransformerConfig

from ..mcore.process_groups import initialize_single_process
from ..mcore.specs import check_layer_pattern, local_hybrid_spec

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
    check_layer_pattern(shape.pattern)
    initialize_single_process()
    config = TransformerConfig(
        num_layers=len(shape.pattern),
        hidden_size=shape.hidden_size,
        ffn_hidden_size=2 * shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        mamba_num_heads=shape.mamba_num_heads,
        mamba_head_dim=shape.mamba_head_dim,
        mamba_state_dim=shape.mamba_state_dim,
        mamba_num_groups=shape.mamba_num_groups,
        use_mamba_mem_eff_path=False,
        use_cpu_initialization=True,
        params_dtype=shape.dtype,
        bf16=shape.dtype is torch.bfloat16,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        init_method_std=shape.init_std,
    )
    model = MambaModel(
        config,
        local_hybrid_spec(shape.ssm_chunk_size),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_sequence_length,
        hybrid_override_pattern=shape.pattern,
        position_embedding_type="rope" if shape.use_rope else "none",
    )
    _randomize(model, shape)
    return model.to(torch.cuda.current_device()).eval()


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
