"""The default settings of the cache, sized from the model. Imports neither torch nor megatron."""

import math
from typing import TYPE_CHECKING

from ..config import CacheConfig

if TYPE_CHECKING:
    from ..recurrences.model_shape import HybridModelShape

_LEAST_BLOCK = 64
_MAX_LENGTH = 32_768
_MAX_REQUESTS = 16
_MAX_TOKENS = 1024
_CACHED_STATES = 1024
_LEAST_REQUESTS, _LEAST_STATES = 2, 32
_GIB = 2**30

DEFAULTS_IN_WORDS = (
    f"Without flags, a block is the smallest multiple of the model's SSM chunk from {_LEAST_BLOCK} tokens on, and "
    f"memory is sized from the model: KV blocks for {_MAX_REQUESTS} requests of full length and {_CACHED_STATES} "
    f"states, at most 1 GiB of each, though never less than {_LEAST_REQUESTS} requests and {_LEAST_STATES} states. "
    f"A request may be as long as the model allows, up to {_MAX_LENGTH} tokens."
)


def default_settings(shape: "HybridModelShape", max_length: int) -> dict[str, int | float]:
    """Return fields of `CacheConfig` that allow every run that the model itself allows.

    Args:
        max_length: The most tokens that the model can read.
    """
    block = math.ceil(_LEAST_BLOCK / shape.grain) * shape.grain
    length = min(max_length, _MAX_LENGTH)
    keys_and_values = 2 * shape.layer_types.count("*") * shape.num_kv_heads * shape.kv_channels
    token_bytes = keys_and_values * shape.params_dtype.itemsize
    request_bytes = math.ceil(length / block) * block * token_bytes
    state_bytes = shape.state_layout(CacheConfig().resolved()).slot_bytes
    return {
        "block_size_tokens": block,
        "buffer_size_gb": _gib_for(_MAX_REQUESTS, _LEAST_REQUESTS, request_bytes),
        "prefix_caching_mamba_gb": _gib_for(_CACHED_STATES, _LEAST_STATES, state_bytes),
        "max_requests": _MAX_REQUESTS,
        "max_tokens": max(_MAX_TOKENS, block),
        "max_sequence_length": length,
    }


def _gib_for(wanted: int, least: int, size: int) -> float:
    size = max(1, size)  # 0 in a pipeline stage without such layers; settings must not be 0
    return min(wanted * size, max(_GIB, least * size)) / _GIB
