"""Frozen, validated settings for the cache."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

_MOST_GB, _MOST_TABLE_ENTRIES = 2**20, 2**28
_SHORTEST_FOLD, _LONGEST_FOLD = 4, 16
_USUAL_GRAPH_TOKENS, _MOST_USUAL_GRAPH_TOKENS = 4096, 8192

SUMMANDS: Mapping[str, float] = MappingProxyType({"buffer_size_gb": 4.0, "prefix_caching_mamba_gb": 1.0})
"""Defaults in GiB of Megatron's two memory settings, which add up to the budget if `cache_gb` is None."""

BUDGET = ("cache_gb", *SUMMANDS)
"""Names of the settings that determine the memory for KV blocks and states."""


class _Rule(NamedTuple):
    """Allowed values of a setting: a predicate, and a description for error messages."""

    allows: Callable[[Any], bool]
    text: str


def is_encodable(text: object) -> bool:
    """Return True if `text` is a str that can be encoded as UTF-8; block keys require this."""
    try:
        return isinstance(text, str) and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def _is_gb(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value < _MOST_GB


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


_GB = _Rule(lambda value: value is None or _is_gb(value), f"a number of GiB, at least 0 and below {_MOST_GB}")
_SOME_GB = _Rule(
    lambda value: value is None or (_is_gb(value) and value > 0), f"a number of GiB, more than 0 and below {_MOST_GB}"
)
_COUNT = _Rule(lambda value: value is None or _is_count(value, 0), "None or an int of at least 0")
_STRIDE = _Rule(lambda value: value in (None, "all") or _is_count(value, 1), "None, 'all' or an int of at least 1")
_PATH = _Rule(lambda value: value is None or (value != "" and is_encodable(value)), "a non-empty path")
_TEXT = _Rule(is_encodable, "a str that can be encoded as UTF-8")

REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "chunked_prefill": "prompts of more than max_tokens tokens are always split over several steps",
        "paused_buffer_size_gb": "paused requests keep at most a quarter of the KV blocks",
        "ring_len": "a replayed state is written after at most 16 tokens, depending on block_size_tokens",
    }
)
"""Settings of earlier releases, each with a note on its replacement for the error message."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of an engine and its cache; every value is checked on construction.

    Memory sizes are in GiB (2**30 bytes) per rank. docs/settings.md describes each field and its flags.

    Args:
        block_size_tokens: Number of tokens per KV block, a multiple of the recurrence's chunk size.
        cache_gb: Memory shared by KV blocks and live, draft and cached states. None: the sum of buffer_size_gb and
            prefix_caching_mamba_gb, which are then set to None.
        host_cache_gb: Host memory for offloaded prefixes, shared by all processes on the host; None: no host tier.
        disk_cache_dir: Directory for prefixes that outlive the process; requires host_cache_gb. None: no disk tier.
        disk_cache_gb: Disk space per rank in disk_cache_dir; None: 100.
        buffer_size_gb, prefix_caching_mamba_gb: Megatron's settings, which add up to cache_gb; None: 4 and 1.
        prefix_caching: True to reuse cached prefixes of prompts.
        boundary_stride: n to cache a state at every n-th block boundary of a prompt, in addition to the boundaries that
            `select_boundaries` chooses; "all" is the same as 1. None: only those boundaries.
        decode_checkpoints: Block boundaries in a reply whose states are kept: the newest ("rolling"), "all" or "none".
        eviction: "cost" evicts the state that is expected to save the fewest prompt tokens per byte, "lru" the least
            recently used state.
        num_speculative_tokens: Maximum number of draft tokens per request and step, between 0 and 8.
        adaptive_drafts: True to verify only as many drafts as are expected to increase throughput.
        draft_states: How states after draft tokens are kept. "replay" stores the inputs of a request's newest tokens
            and applies them to its state later; "window" stores the state after each draft; "auto" selects the faster
            method.
        align_prefill_chunks: True to end a prefill chunk on the last block boundary inside the step's token budget.
        max_requests, max_tokens, max_sequence_length: Maximum numbers of running requests, of tokens per step, and of
            tokens per request; the block tables for max_requests requests must have fewer than 2**28 entries.
        max_prompt_tokens_beside_decode: Maximum number of prompt tokens in a step in which requests decode; None: no
            limit other than max_tokens.
        ssm_state_dtype, conv_state_dtype: Dtypes of live states: "model" (that of the parameters), "fp32", "bf16"; for
            SSM states also "fp16", with stochastic rounding.
        cached_state_dtype: Format of cached states: same as live states ("live"), or quantized to 8 bits ("int8").
        kv_cache_dtype: Format of cached keys and values: the dtype of the parameters ("auto"), or FP8 e4m3 ("fp8").
        record_routes: True to return the routed experts of each token of a request; see docs/routed-experts.md.
        attention_backend: Library that computes attention; "auto" selects the first one that supports the model.
        num_cuda_graphs: Number of decode batch sizes, up to max_requests, that are captured as CUDA graphs.
        cuda_graph_prefill_tokens: Maximum number of prompt tokens in a captured step; None: 4096, or more for a small
            model.
        run_ahead: True to launch a captured step before the preceding step's tokens are read by the host.
        resident_pools: True to keep the device memory and CUDA graphs of a suspended engine.
        rank_digest_steps: Number of steps between comparisons of the ranks' decisions; if decisions differ, an error is
            raised. 0: never compare.
        weights_version: Part of every block key, so that states computed by other weights are never reused.

    Raises:
        ValueError: If a value is invalid; the message names the setting, the value and the allowed values.
        TypeError: If a removed setting is given; the message names its replacement.
    """

    block_size_tokens: int = 256
    cache_gb: float | None = None
    host_cache_gb: float | None = None
    disk_cache_dir: str | None = None
    disk_cache_gb: float | None = None
    buffer_size_gb: float | None = None
    prefix_caching: bool = True
    prefix_caching_mamba_gb: float | None = None
    boundary_stride: int | Literal["all"] | None = None
    decode_checkpoints: Literal["rolling", "all", "none"] = "rolling"
    eviction: Literal["cost", "lru"] = "cost"
    num_speculative_tokens: int = 0
    adaptive_drafts: bool = True
    draft_states: Literal["auto", "replay", "window"] = "auto"
    align_prefill_chunks: bool = True
    max_requests: int = 64
    max_tokens: int = 8192
    max_sequence_length: int = 8192
    max_prompt_tokens_beside_decode: int | None = None
    ssm_state_dtype: str = "fp32"
    conv_state_dtype: str = "model"
    cached_state_dtype: Literal["live", "int8"] = "live"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    record_routes: bool = False
    attention_backend: str = "auto"
    num_cuda_graphs: int = 0
    cuda_graph_prefill_tokens: int | None = None
    run_ahead: bool = True
    resident_pools: bool = False
    rank_digest_steps: int = 0
    weights_version: str = "0"

    RULES: ClassVar[dict[str, Any]] = {
        "block_size_tokens": range(1, 2**31),
        "max_requests": range(1, 2**20),
        "max_tokens": range(1, 2**31),
        "max_sequence_length": range(1, 2**31),
        "num_speculative_tokens": range(9),
        "num_cuda_graphs": range(513),
        "rank_digest_steps": range(2**31),
        "boundary_stride": _STRIDE,
        "cuda_graph_prefill_tokens": _COUNT,
        **dict.fromkeys(("cache_gb", "host_cache_gb", "disk_cache_gb", "buffer_size_gb"), _SOME_GB),
        "prefix_caching_mamba_gb": _GB,
        "disk_cache_dir": _PATH,
        "weights_version": _TEXT,
        "decode_checkpoints": ("rolling", "all", "none"),
        "eviction": ("cost", "lru"),
        "draft_states": ("auto", "replay", "window"),
        "ssm_state_dtype": ("model", "fp32", "bf16", "fp16"),
        "conv_state_dtype": ("model", "fp32", "bf16"),
        "cached_state_dtype": ("live", "int8"),
        "kv_cache_dtype": ("auto", "fp8"),
        "attention_backend": ("auto", "flash-attn", "flashinfer", "torch-varlen", "triton", "reference"),
        **dict.fromkeys(("prefix_caching", "adaptive_drafts", "align_prefill_chunks"), bool),
        **dict.fromkeys(("run_ahead", "resident_pools", "record_routes"), bool),
    }
    """Allowed values of each setting: a range, a tuple of values, `bool`, or a `_Rule`."""

    def __new__(cls, *_: object, **settings: object) -> "CacheConfig":
        for name in settings.keys() & REMOVED.keys():
            raise TypeError(f"{name} is no longer a setting: {REMOVED[name]}; leave it out")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, allowed in self.RULES.items():
            rule, value = _rule_of(allowed), getattr(self, name)
            _require(rule.allows(value), name, value, rule.text)
        self._check_memory()
        self._check_limits()
        if self.draft_states == "replay" and self.block_size_tokens % _SHORTEST_FOLD:
            raise ValueError(
                f"draft_states is 'replay' and block_size_tokens is {self.block_size_tokens}, which is not a multiple "
                f"of {_SHORTEST_FOLD}: set --block-size to a multiple of {_SHORTEST_FOLD}, or use --draft-states window"
            )

    def resolved(self, *, prefers_replay: bool = False, most_launched: int = 0) -> "CacheConfig":
        """Return the settings with `draft_states` "auto" and `cuda_graph_prefill_tokens` None set to definite values.

        Args:
            prefers_replay: True if "auto" selects "replay", provided that the block size allows it.
            most_launched: Maximum number of prompt tokens for which launching a step takes longer than computing it.
        """
        usual = max(_USUAL_GRAPH_TOKENS, min(most_launched, self.max_tokens, _MOST_USUAL_GRAPH_TOKENS))
        tokens = usual if self.cuda_graph_prefill_tokens is None else self.cuda_graph_prefill_tokens
        form = self.draft_states
        if form == "auto":
            form = "replay" if prefers_replay and self.block_size_tokens % _SHORTEST_FOLD == 0 else "window"
        return replace(self, draft_states=form, cuda_graph_prefill_tokens=tokens)

    @property
    def budget_bytes(self) -> int:
        """Device memory for KV blocks and states in bytes."""
        assert self.cache_gb is not None
        return int(self.cache_gb * 2**30)

    @property
    def replays(self) -> bool:
        """True if states after drafts are replayed from their inputs; available only after `resolved`."""
        assert self.draft_states != "auto"
        return self.draft_states == "replay"

    @property
    def fold_len(self) -> int:
        """Number of tokens whose stored inputs are applied to a state at once; 0 if states are not replayed."""
        return math.gcd(self.block_size_tokens, _LONGEST_FOLD) if self.replays else 0

    @property
    def most_graph_tokens(self) -> int:
        """Maximum number of prompt tokens in a captured step; available only after `resolved`."""
        assert self.cuda_graph_prefill_tokens is not None
        return self.cuda_graph_prefill_tokens

    @property
    def quantizes_states(self) -> bool:
        """True if cached states are quantized; live states then have separate memory."""
        return self.cached_state_dtype != "live" and self.prefix_caching

    @property
    def num_draft_slots(self) -> int:
        """Maximum number of slots for a request's states after draft tokens; 0 if states are replayed."""
        return 0 if self.replays else self.num_speculative_tokens

    @property
    def num_running_slots(self) -> int:
        """Number of slots for the live states and draft states of `max_requests` requests."""
        return self.max_requests * (1 + self.num_draft_slots)

    @property
    def num_request_slots(self) -> int:
        """Number of slots that one request needs in the pool of cached states.

        One is for a cached state; the others are for live and draft states, unless these have separate memory.
        """
        return 1 if self.quantizes_states else 2 + self.num_draft_slots

    def _check_memory(self) -> None:
        for name in SUMMANDS if self.cache_gb is not None else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"cache_gb is {self.cache_gb!r} and {name} is {getattr(self, name)!r}, but cache_gb already "
                    f"includes {name}: leave {name} out"
                )
        if self.cache_gb is None:
            given = {name: getattr(self, name) for name in SUMMANDS}
            parts = (default if given[name] is None else given[name] for name, default in SUMMANDS.items())
            object.__setattr__(self, "cache_gb", math.fsum(parts))
        for name in SUMMANDS:
            object.__setattr__(self, name, None)
        for name, above in (("disk_cache_gb", "disk_cache_dir"), ("disk_cache_dir", "host_cache_gb")):
            if getattr(self, name) is not None and getattr(self, above) is None:
                flag = f"--{above.replace('_', '-')}"
                raise ValueError(f"{name} is {getattr(self, name)!r}, but requires {flag}: set it, or leave {name} out")
        if self.host_cache_gb is not None and not self.prefix_caching:
            raise ValueError(
                f"host_cache_gb is {self.host_cache_gb!r}, but requires prefix_caching=True: leave host_cache_gb out, "
                "or enable prefix caching"
            )

    def _check_limits(self) -> None:
        requests, tokens, length = self.max_requests, self.max_tokens, self.max_sequence_length
        drafts, block = self.num_speculative_tokens, self.block_size_tokens
        _require(drafts < block, "num_speculative_tokens", drafts, f"below block_size_tokens={block}")
        _require(requests <= tokens, "max_tokens", tokens, f"at least max_requests={requests}")
        limit = self.max_prompt_tokens_beside_decode
        is_count = type(limit) is int and 1 <= limit <= tokens
        allowed_prompt = f"None or an int from 1 to max_tokens={tokens}"
        _require(limit is None or is_count, "max_prompt_tokens_beside_decode", limit, allowed_prompt)
        num_entries = requests * -(-length // block)
        needed = f"max_requests={requests} requests of this length need {num_entries} KV blocks of {block} tokens"
        allowed_length = f"shorter, because {needed}; fewer than {_MOST_TABLE_ENTRIES} blocks are supported"
        _require(num_entries < _MOST_TABLE_ENTRIES, "max_sequence_length", length, allowed_length)


def _rule_of(rule: Any) -> _Rule:
    """Convert an entry of `CacheConfig.RULES` (a rule, a range, bool or a tuple of values) to a rule."""
    if isinstance(rule, _Rule):
        return rule
    if isinstance(rule, range):
        text = f"an int from {rule.start} to {rule.stop - 1}"
        return _Rule(lambda value: type(value) is int and value in rule, text)
    if rule is bool:
        return _Rule(lambda value: type(value) is bool, "True or False")
    return _Rule(lambda value: value in rule, f"one of {rule}")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
