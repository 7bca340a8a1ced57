"""Cache facts in a model directory's configuration. Imports torch."""

from pathlib import Path

from ..config import CacheConfig
from ..models.checkpoints.hugging_face import read_sizes
from ..models.part_shape import part_shape


def model_needs(directory: Path) -> str:
    """Return one line: layers, positions, and the bytes of a token and of a state.

    Raises:
        ValueError, OSError: If the configuration cannot be read, or describes no model that is served.
    """
    architecture, dtype = read_sizes(directory)
    pattern = architecture.pattern
    if not ("M" in pattern and "*" in pattern):
        raise ValueError(f"{directory}: layer pattern {pattern} has no Mamba or no attention layer")
    shape = part_shape(architecture, dtype)
    state = shape.cached_layout(CacheConfig().resolved())
    return (
        f"{directory}: layers {pattern}, {architecture.max_sequence_length:,} positions, SSM chunk of "
        f"{shape.grain} tokens; {shape.block_bytes(1):,} bytes of KV a token and {state.slot_bytes:,} bytes a "
        "state, all ranks together"
    )
