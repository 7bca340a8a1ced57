"""Command-line flags for the cache settings, defined without importing torch or megatron."""

from argparse import BooleanOptionalAction, Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import BUDGET, CacheConfig

_PREFIX = "--inference-dynamic-batching-"

FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "block_size_tokens": (f"{_PREFIX}block-size", "--block-size"),
        "cache_gb": ("--cache-gb",),
        "host_cache_gb": ("--host-cache-gb",),
        "disk_cache_dir": ("--disk-cache-dir",),
        "disk_cache_gb": ("--disk-cache-gb",),
        "buffer_size_gb": (f"{_PREFIX}buffer-size-gb", "--kv-gb"),
        "prefix_caching_mamba_gb": (f"{_PREFIX}prefix-caching-mamba-gb", "--state-gb"),
        "num_cuda_graphs": (f"{_PREFIX}num-cuda-graphs", "--cuda-graphs"),
        "max_tokens": (f"{_PREFIX}max-tokens", "--max-tokens-per-step"),
        "max_prompt_tokens_beside_decode": ("--max-prompt-tokens-beside-decode",),
        "max_sequence_length": ("--inference-max-seq-length", "--max-model-len"),
        "eviction": (f"{_PREFIX}prefix-caching-eviction-policy",),
        "decode_checkpoints": ("--decode-checkpoints",),
        "num_speculative_tokens": ("--num-speculative-tokens",),
        "draft_states": ("--draft-states",),
        "ssm_state_dtype": ("--ssm-state-dtype",),
        "cached_state_dtype": ("--cached-state-dtype",),
        "kv_cache_dtype": ("--kv-cache-dtype",),
        "attention_backend": ("--attention-backend",),
    }
)
"""Field of `CacheConfig` → its flags: Megatron's name, if Megatron has the flag, then a short alias."""

_SWITCHES = {
    "adaptive_drafts": "draft only while that raises throughput; the negative form drafts in every step (default: on)",
    "prefix_caching": "reuse cached prefixes; the negative form computes every prompt from its start (default: on)",
    "record_routes": "record the routed experts of each token, for routing replay in a trainer (default: off)",
}


def add_cache_arguments(parser: Any) -> None:
    """Add the cache flags to a parser or an argument group; `config_of` reads them."""
    rules = CacheConfig.RULES

    def add(field: str, text: str, **options: Any) -> None:
        parser.add_argument(*FLAGS[field], help=text, **options)

    add("block_size_tokens", "tokens per KV block", type=int, metavar="N")
    add("cache_gb", "GiB for KV blocks and states together", type=float, metavar="G")
    add("host_cache_gb", "GiB of host memory for prefixes offloaded from the device", type=float, metavar="G")
    add("disk_cache_dir", "directory for cached prefixes that persist after the process exits", metavar="DIR")
    add("disk_cache_gb", "GiB in --disk-cache-dir for each rank (default: 100)", type=float, metavar="G")
    add("buffer_size_gb", "GiB for KV blocks, in addition to --cache-gb", type=float, metavar="G")
    add("prefix_caching_mamba_gb", "GiB for cached states, in addition to --cache-gb", type=float, metavar="G")
    add("num_cuda_graphs", "number of batch sizes captured as CUDA graphs; 0 is none", type=int, metavar="N")
    add("max_tokens", "maximum tokens processed in one step", type=int, metavar="N")
    limit = "maximum prompt tokens in a step in which requests decode (default: as many as fit)"
    add("max_prompt_tokens_beside_decode", limit, type=int, metavar="N")
    add("max_sequence_length", "maximum prompt and generated tokens per request", type=int, metavar="N")
    policy = "eviction policy: lowest expected savings first, or least recently used first (default: cost)"
    add("eviction", policy, choices=rules["eviction"])
    kept = "block boundaries in a reply at which the state is cached: the newest, all or none (default: rolling)"
    add("decode_checkpoints", kept, choices=rules["decode_checkpoints"])
    add("num_speculative_tokens", "maximum draft tokens per request and step, 0 to 8", type=int, metavar="K")
    kept_states = "state storage for drafts: replay from a ring of inputs, or one state per token (default: auto)"
    add("draft_states", kept_states, choices=rules["draft_states"])
    live = "dtype of recurrent states: the weights' (model), fp32, bf16, or fp16 rounded stochastically (default: fp32)"
    add("ssm_state_dtype", live, choices=rules["ssm_state_dtype"])
    stored = "format of cached states: like live states, or quantized to 8 bits (default: live)"
    add("cached_state_dtype", stored, choices=rules["cached_state_dtype"])
    keys = "format of cached keys and values: the dtype of the weights, or FP8 (default: auto)"
    add("kv_cache_dtype", keys, choices=rules["kv_cache_dtype"])
    add("attention_backend", "library that computes attention (default: auto)", choices=rules["attention_backend"])
    for name, text in _SWITCHES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action=BooleanOptionalAction, help=text)


def config_of(arguments: Namespace, **settings: object) -> CacheConfig:
    """Build the cache config from parsed flags, with `settings` as defaults.

    If the flags set any budget, all budgets in `settings` are ignored. An invalid value raises `ValueError`.
    """
    given = given_settings(arguments)
    if not given.keys().isdisjoint(BUDGET):
        settings = {name: value for name, value in settings.items() if name not in BUDGET}
    return CacheConfig(**(settings | given))  # type: ignore[arg-type]


def given_settings(arguments: Namespace) -> dict[str, Any]:
    """Return the fields of `CacheConfig` that the parsed flags set."""
    given = {field: getattr(arguments, argument_of(field)) for field in FLAGS}
    given |= {name: getattr(arguments, name) for name in _SWITCHES}
    return {name: value for name, value in given.items() if value is not None}


def given_budget(arguments: Namespace) -> float | None:
    """Return the cache budget that the parsed flags set, in GiB; None if they set no budget."""
    given = {name: value for name, value in given_settings(arguments).items() if name in BUDGET}
    return CacheConfig(**given).cache_gb if given else None


def argument_of(field: str) -> str:
    """Return the name that a `CacheConfig` field has in the parsed `Namespace`."""
    return FLAGS[field][0].lstrip("-").replace("-", "_")
