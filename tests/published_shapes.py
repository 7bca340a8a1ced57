"""Shapes of models as they are published."""

from dataclasses import replace
from typing import Any

import torch

from megatron_mamba_cache.recurrences.mamba2.recurrence import Mamba2
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape, RecurrentLayers

_MAMBA_8B = Mamba2(num_heads=128, head_dim=64, d_state=128, num_groups=8, d_conv=4, grain=128)


def shape_of(pattern: str, recurrence: Mamba2 = _MAMBA_8B, **sizes: Any) -> HybridModelShape:
    """Return a shape of Nemotron-H 8B's sizes, but for the layers."""
    whole = HybridModelShape(
        layer_types=tuple(pattern),
        recurrent=(RecurrentLayers(recurrence, tuple(range(pattern.count("M")))),),
        num_heads=32,
        num_kv_heads=8,
        softmax_scale=1.0,
        kv_channels=128,
        vocab_size=131_072,
        params_dtype=torch.bfloat16,
        fingerprint="",
    )
    return replace(whole, **sizes)


DENSE_8B = shape_of("M" * 24 + "*" * 4 + "-" * 24)
NANO_30B = shape_of("M" * 23 + "*" * 6 + "E" * 23, replace(_MAMBA_8B, num_heads=64), num_kv_heads=2)
