"""Names in Megatron checkpoints: norms that Transformer Engine fuses into linears, and a training run's own state."""

import re
from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing.utils import apply_prefix_mapping

_FUSED_NORMS = {
    # the norm before a layer's first linear → the same weights as part of that linear
    "norm.": "mixer.in_proj.layer_norm_",
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_TRAINING_STATE = re.compile(
    r"(chained_\d+\.)?optimizer\.|(rng_state|rerun_state_machine_state|opt_param_scheduler|dataloader_state)\b"
    r"|.*\._extra_state\d*\b"
)


def take_fused_names(sharded_state: dict[str, Any], num_layers: int, stored: Collection[str]) -> None:
    """Rename, in place, the norms that a checkpoint stores as part of the linear that follows them.

    Args:
        sharded_state: Sharded state dict of the model to fill.
        stored: Names of the checkpoint's tensors.
    """
    layers = (f"decoder.layers.{layer}." for layer in range(num_layers))
    names = ((f"{layer}{norm}", f"{layer}{fused}") for layer in layers for norm, fused in _FUSED_NORMS.items())
    apply_prefix_mapping(sharded_state, {norm: fused for norm, fused in names if f"{fused}weight" in stored})


def is_training_state(name: str) -> bool:
    """Return whether a stored name belongs to an optimizer, a random state or the like, not to a weight."""
    return _TRAINING_STATE.match(name) is not None
