"""Settings of Megatron's configuration with which a step would compute something else than Megatron's forward."""

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer import TransformerConfig

_SUPPORTED: Mapping[str, Any] = {
    # Attention over the paged cache is computed by kernels that know none of these.
    "window_size": None,
    "softmax_type": "vanilla",
    "multi_latent_attention": False,
    # Megatron's forward asks a context of its own for what these need.
    "flash_decode": False,
    "fp8": None,
    "fp4": None,
    # It cuts a step, which has tokens of several requests, and adds a bias once for each part.
    "mlp_chunks_for_prefill": 1,
}


def check_settings(config: TransformerConfig) -> None:
    """Raise `ValueError` naming the setting if no model that is configured so can be served."""
    require_settings(config, _SUPPORTED)


def require_settings(config: TransformerConfig, supported: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless each of these settings has its one supported value."""
    for name, value in supported.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{name} is {found!r}; only {value!r} is supported")
