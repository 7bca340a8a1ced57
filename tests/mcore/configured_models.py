"""Models built from a Megatron configuration and a spec."""

from typing import Any

import torch
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from megatron_mamba_cache.mcore.model_ranks import initialize_single_process

PATTERN = "MEM*"
SETTINGS = CacheConfig(block_size_tokens=128, buffer_size_gb=0.01, max_sequence_length=256)

TINY_HYBRID: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_state_dim": 16,
    "mamba_num_groups": 1,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "use_mamba_mem_eff_path": False,
}
"""Settings of Megatron's that tests of tiny hybrid models share."""


def configured(**settings: Any) -> TransformerConfig:
    """Return the configuration of a tiny hybrid with four experts; the settings are set after Megatron's checks."""
    config = TransformerConfig(
        num_layers=len(PATTERN),
        hidden_size=64,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        **TINY_HYBRID,
    )
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def built(config: TransformerConfig, spec: ModuleSpec | None = None, **settings: Any) -> MambaModel:
    """Build the model like a user of Megatron, by default from the local spec with experts."""
    initialize_single_process()
    sizes: dict[str, Any] = {"vocab_size": 128, "max_sequence_length": 64, "hybrid_override_pattern": PATTERN}
    model = MambaModel(config, spec or spec_with_experts(), **(sizes | settings))
    return model.to(torch.cuda.current_device())


def spec_with_experts() -> ModuleSpec:
    return local_hybrid_spec(LocalSpecOptions(num_experts=4))
