"""Choose default cache settings for a model and its draft model, without importing torch or megatron.

`default_settings` derives the settings from the model alone; `card_settings` fills the free GPU memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..config import CacheConfig
from ..recurrences.slab_shape import SlabShape
from .flag_sources import UsageError

if TYPE_CHECKING:
    from ..ranks.group import Ranks
    from ..recurrences.model_shape import HybridModelShape

_GIB = 2**30
_LEAST_BLOCK = 64
_MAX_LENGTH = 32_768
_MAX_REQUESTS = 16
_MAX_TOKENS = 1024
_CACHED_STATES = 1024
_LEAST_REQUESTS, _LEAST_STATES = 2, 32

_CARD_LEAST_BLOCK = 256  # minimum for flash-attn 2; larger blocks also need less bookkeeping per step
_CARD_MAX_TOKENS = 8192
_CARD_MAX_REQUESTS = 256
NUM_CUDA_GRAPHS = 9  # without graphs, the host takes several times as long to launch a step as the GPU takes to run it
_TOKENS_A_REQUEST = 2048
_SIZES_OF_STATES = (
    *("num_speculative_tokens", "draft_states", "cached_state_dtype", "ssm_state_dtype"),
    *("conv_state_dtype", "prefix_caching", "kv_cache_dtype", "record_routes"),
)
_MOST_LIVE = 0.8  # maximum fraction of the budget for live states, replay rings and draft logits
_LEAST_GB = 1e-6  # minimum budget, because a budget must not be 0

_FIXED_BYTES = 2 * _GIB  # CUDA graphs, library workspaces, fragmentation
_WIDEST_LAYERS = 4  # number of activations, each as wide as the widest layer, that are in memory at the same time
_BYTES_A_LOGIT = 12  # one bf16 and two float32 copies; 10 bytes measured, see `server_defaults.md`
_BYTES_A_SAMPLED_LOGIT = 24  # includes draft-model logits and the logits that verify the drafts

DRAFTER_SHARE = 0.15
"""Fraction of the memory for KV blocks and states that goes to a draft model, if there is one."""

DRAFTER_STATES: dict[str, Any] = {"num_speculative_tokens": 1, "draft_states": "window"}
"""Settings for a draft model's cache: each request has a live state and the state after its newest draft token."""

DEFAULTS_IN_WORDS = (
    f"By default a block is the smallest multiple of the recurrence's chunk with at least {_LEAST_BLOCK} tokens, and "
    f"memory is sized from the model: KV blocks for {_MAX_REQUESTS} requests of full length and {_CACHED_STATES} "
    f"states, at most 1 GiB of each but at least {_LEAST_REQUESTS} requests and {_LEAST_STATES} states, in addition to "
    "the states of running requests. "
    f"A request may be as long as the model allows, up to {_MAX_LENGTH} tokens."
)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's free memory, and the properties of a model that determine how much memory its steps need."""

    free_bytes: int  # free bytes after loading the weights; minimum over the model's ranks
    fraction: float  # maximum fraction of the free bytes for KV blocks and states
    widest_layer: int  # output width of the widest linear layer on this rank, excluding the output layer
    share: float = 1.0  # the model's fraction of the memory for KV blocks and states; the rest is for a draft model

    @property
    def bytes_a_logit(self) -> int:
        """Bytes of memory that a step needs per logit (one vocabulary entry of one sampled token)."""
        return _BYTES_A_SAMPLED_LOGIT if self.share < 1 else _BYTES_A_LOGIT


def default_settings(shape: "HybridModelShape", max_length: int) -> dict[str, int | float]:
    """Return default `CacheConfig` fields for a model; `max_length` is its maximum sequence length in tokens."""
    block = math.ceil(_LEAST_BLOCK / shape.grain) * shape.grain
    length = min(max_length, _MAX_LENGTH)
    request_bytes = math.ceil(length / block) * shape.block_bytes(block)
    sizes = CacheConfig(max_requests=_MAX_REQUESTS).resolved()
    state_bytes, live_bytes = shape.state_layout(sizes).slot_bytes, _live_bytes(shape, sizes)
    memory = (
        _gib_for(_MAX_REQUESTS, _LEAST_REQUESTS, request_bytes),
        _gib_for(_CACHED_STATES, _LEAST_STATES, state_bytes),
        _MAX_REQUESTS * live_bytes / _GIB,
    )
    return {
        "block_size_tokens": block,
        "cache_gb": math.fsum(memory),
        "max_requests": _MAX_REQUESTS,
        "max_tokens": max(_MAX_TOKENS, block),
        "max_sequence_length": length,
    }


def _gib_for(wanted: int, least: int, size: int) -> float:
    size = max(1, size)  # 0 for a pipeline stage without such layers, but a budget must not be 0
    return min(wanted * size, max(_GIB, least * size)) / _GIB


def card_settings(
    shape: "HybridModelShape", max_length: int, card: Card, given: Mapping[str, Any], ranks: "Ranks"
) -> dict[str, Any]:
    """Return `CacheConfig` fields that fill a GPU; collective over the model's ranks.

    KV blocks and states share one budget: `fraction` of the free memory, or the memory that the largest step leaves if
    that is less. By default, as many requests run concurrently as fit in half of the budget, but at most 256;
    each needs a live state and KV blocks for 2,048 tokens. If draft states are replayed, drafts usually do not lower
    that number.

    Args:
        max_length: Maximum sequence length of the model, which is reduced if memory is short.
        given: Fields that flags set; they are not changed. A given budget replaces the GPU's free memory.

    Raises:
        UsageError: If the live states leave no memory for the cache.
    """
    block = given.get("block_size_tokens") or math.ceil(_CARD_LEAST_BLOCK / shape.grain) * shape.grain
    drafts, asked = (given.get(name) or 0 for name in ("num_speculative_tokens", "max_requests"))
    sizes = _without_memory(shape, block, given)
    live_bytes = _live_bytes(shape, sizes)
    max_tokens = given.get("max_tokens") or max(_CARD_MAX_TOKENS, block, asked)
    given_gb = given.get("cache_gb")
    step_bytes = _step_bytes(card, shape, sizes, max_tokens, max(asked, _CARD_MAX_REQUESTS))
    budget = _budget(card, shape, step_bytes, max(asked, _CARD_MAX_REQUESTS), given_gb)
    drafts_bytes = 0 if given_gb is not None else int(card.share * drafts * card.bytes_a_logit * shape.vocab_size)
    fitting = _num_fitting(shape, sizes, budget, drafts_bytes)
    max_requests = asked or max(1, min(_CARD_MAX_REQUESTS, max_tokens, fitting))
    budget = _budget(card, shape, step_bytes, max(max_requests * (1 + drafts), _CARD_MAX_REQUESTS), given_gb)
    rest = budget - max_requests * live_bytes
    least = 2 * shape.unit_bytes(sizes).block + _least_states(shape, sizes, max_requests)
    if given_gb is None and rest < least:
        raise UsageError(_no_room(card, budget, max_requests, live_bytes))
    form = {} if "draft_states" in given else {"draft_states": sizes.draft_states}  # the value that these sizes assume
    limits: dict[str, Any] = {"max_requests": max_requests, "max_tokens": max_tokens, **form}
    max_length = min(max_length, longest_request(shape, replace(sizes, **limits), budget, ranks))
    return {
        "block_size_tokens": block,
        "cache_gb": budget / _GIB,
        **limits,
        "max_sequence_length": given.get("max_sequence_length") or max_length,
        "num_cuda_graphs": NUM_CUDA_GRAPHS,
    }


def _step_bytes(card: Card, shape: "HybridModelShape", sizes: CacheConfig, max_tokens: int, max_requests: int) -> int:
    """Return the peak bytes of a step: activations, including those in CUDA graphs, and scan buffers."""
    num_live = max_tokens + min(sizes.most_graph_tokens, max_tokens)
    activations = _WIDEST_LAYERS * card.widest_layer * num_live * shape.params_dtype.itemsize
    return activations + shape.scan_bytes(max_tokens, max_requests)


def _budget(card: Card, shape: "HybridModelShape", step_bytes: int, num_sampled: int, given_gb: float | None) -> float:
    """Return the bytes for a model's KV blocks and states: from the given budget, or the memory that steps leave free.

    Args:
        step_bytes: Peak bytes of a step, excluding logits.
        num_sampled: Number of tokens whose logits a step computes.
    """
    if given_gb is not None:
        return card.share * given_gb * _GIB
    logits = card.bytes_a_logit * shape.vocab_size * num_sampled
    whole = min(card.fraction * card.free_bytes, card.free_bytes - step_bytes - logits - _FIXED_BYTES)
    return max(card.share * whole, 0.0)


def _num_fitting(shape: "HybridModelShape", sizes: CacheConfig, budget: float, drafts_bytes: int) -> int:
    """Return the number of requests with 2,048 tokens each that fit in half of the budget.

    Draft states are included if each has its own slot. If draft states are replayed, drafts need only small ring
    buffers and their logits (`drafts_bytes` per request), which use the other half of the budget. Drafts then reduce
    the number of requests only if less than a fifth of the budget would remain.
    """
    most = budget / max(_live_bytes(shape, sizes) + drafts_bytes, 1)
    num_blocks = math.ceil(_TOKENS_A_REQUEST / sizes.block_size_tokens)
    request_bytes = num_blocks * shape.unit_bytes(sizes).block
    request_bytes += _live_bytes(shape, replace(sizes, num_speculative_tokens=0) if sizes.replays else sizes)
    request_bytes += sizes.num_draft_slots * shape.state_layout(sizes).slot_bytes
    return int(min(_MOST_LIVE * most, budget / 2 / max(request_bytes, 1)))


def _least_states(shape: "HybridModelShape", sizes: CacheConfig, max_requests: int) -> int:
    """Return the minimum bytes that must remain for cached states and draft slots."""
    slot_bytes, num_drafts = shape.state_layout(sizes).slot_bytes, sizes.num_draft_slots
    if sizes.quantizes_states:
        return shape.cached_layout(sizes).slot_bytes + max_requests * num_drafts * slot_bytes
    return max(num_drafts, int(sizes.prefix_caching)) * slot_bytes


def _live_bytes(shape: "HybridModelShape", sizes: CacheConfig) -> int:
    """Return the bytes of one request's live state and buffers."""
    return shape.state_layout(sizes).slot_bytes + shape.request_buffer_bytes(sizes)


def longest_request(shape: "HybridModelShape", config: CacheConfig, budget: float, ranks: "Ranks") -> int:
    """Return the maximum request length, in tokens, that fits in `budget` bytes, at least one block; collective."""
    config = shape.resolved(replace(config, cache_gb=max(budget / _GIB, _LEAST_GB)))
    unit = shape.unit_bytes(config)
    slab = SlabShape.fitting(ranks.gather(unit))
    other_bytes = shape.buffers_bytes(config) + shape.running_bytes(config)
    (num_slabs,) = ranks.least([slab.slabs_in(int(budget) - other_bytes, unit)])
    return max(slab.blocks_of_request(num_slabs, config.num_request_slots), 1) * config.block_size_tokens


def _no_room(card: Card, budget: float, max_requests: int, state_bytes: int) -> str:
    """Return the error message for a GPU with too little memory for the live states."""
    return (
        f"the weights leave {card.free_bytes / _GIB:.1f} GiB of the GPU free, and the largest step leaves "
        f"{budget / _GIB:.1f} GiB of that for the cache, but the live states of {max_requests} requests need "
        f"{max_requests * state_bytes / _GIB:.1f} GiB; lower --max-running-requests or --max-tokens-per-step, "
        "or split the model with --tensor-model-parallel-size"
    )


def _without_memory(shape: "HybridModelShape", block: int, given: Mapping[str, Any]) -> CacheConfig:
    """Return a config from which the bytes of a request and of a state can be computed; it sets no pool sizes."""
    asked = given.get("max_requests") or _CARD_MAX_REQUESTS
    forms = {name: given[name] for name in _SIZES_OF_STATES if given.get(name) is not None}
    most_tokens = max(_CARD_MAX_TOKENS, block, asked, given.get("max_tokens") or 0)
    return shape.resolved(CacheConfig(block_size_tokens=block, max_requests=asked, max_tokens=most_tokens, **forms))


def default_draft_settings(
    shape: "HybridModelShape", max_length: int, given_gb: float | None, ranks: "Ranks"
) -> dict[str, Any]:
    """Return default `CacheConfig` fields for a draft model; `given_gb` is a budget for both models in GiB, or None."""
    fields = default_settings(shape, max_length)
    if given_gb is None:
        return fields
    budget_gb = DRAFTER_SHARE * given_gb
    config = CacheConfig(**fields | DRAFTER_STATES)
    longest = longest_request(shape, config, budget_gb * 2**30, ranks)
    return fields | {"cache_gb": budget_gb, "max_sequence_length": min(config.max_sequence_length, longest)}


def card_draft_settings(
    shape: "HybridModelShape", max_length: int, engine: CacheConfig, card: Card, given_gb: float | None, ranks: "Ranks"
) -> dict[str, Any]:
    """Return `CacheConfig` fields that fill the draft model's fraction of a GPU, for as many requests as `engine` runs.

    `engine` is the config of the engine that verifies the drafts. `given_gb` is the budget for both models in GiB;
    if it is None, both models share the free memory of the GPU.
    """
    given = {"max_requests": engine.max_requests, "max_tokens": engine.max_tokens, "cache_gb": given_gb}
    length = min(max_length, engine.max_sequence_length)
    return card_settings(shape, length, replace(card, share=DRAFTER_SHARE), given | DRAFTER_STATES, ranks)
