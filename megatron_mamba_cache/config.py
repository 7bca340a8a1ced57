"""The settings of the cache: one frozen, validated value, and its command-line arguments."""

import math
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

_MOST_GB = 2**20
_MOST_TABLE_ENTRIES = 2**28
_FOLD_LENGTHS = (4, 8, 16, 32)
_LONGEST_USUAL_FOLD = 16
_USUAL_GRAPH_TOKENS = 4096
_MOST_USUAL_GRAPH_TOKENS = 8192
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
        "cached_state_dtype": ("--cached-state-dtype",),
        "attention_backend": ("--attention-backend",),
    }
)
"""The flags of a field: Megatron's name first, then a short alias."""

SPLIT = ("buffer_size_gb", "prefix_caching_mamba_gb")
"""The fields that split the memory which `cache_gb` leaves in one."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of a `MambaCacheContext`; every value is checked on construction.

    Sizes are GiB (2**30 bytes) of one rank. `FLAGS` names the flags; docs/settings.md has more about each field.

    Args:
        block_size_tokens: Tokens in a KV block; a multiple of the recurrences' grain.
        cache_gb: One memory for KV blocks and for live, draft and cached states, which take room from each other by
            priority. None: the memory is split by buffer_size_gb and prefix_caching_mamba_gb.
        host_cache_gb: The host's memory for prefixes without room on the device, of all processes of the host together;
            needs cache_gb. None: no host tier.
        disk_cache_dir: Directory in which prefixes outlive the process; needs host_cache_gb. None: no disk tier.
        disk_cache_gb: What each rank may keep there; None: 100.
        buffer_size_gb: Memory for KV blocks; None: 4, unless cache_gb is set.
        paused_buffer_size_gb: The share of the KV blocks that paused requests may keep; None: a quarter.
        prefix_caching: True if prompts reuse cached prefixes.
        prefix_caching_mamba_gb: Memory for cached states; None: 1, unless cache_gb is set.
        boundary_stride: None caches the boundaries that a prompt suggests; n adds every n-th block boundary, "all"
            every one.
        decode_checkpoints: Block boundaries inside a reply that keep a state: the newest ("rolling"), "all" or "none".
        eviction: "cost" evicts the state expected to save the fewest tokens for its bytes, "lru" the least recently
            used one.
        num_speculative_tokens: Most drafts that a step verifies per request, 0 to 8.
        adaptive_drafts: True if steps have only drafts that are likely to bring more tokens a second.
        draft_states: How a decode step keeps states. "replay": it reads each state once and writes none; inputs of the
            newest tokens are in a ring of the request. "window": it writes the state after each token into a slot.
            "auto": "replay" on a Hopper GPU for more than 2 requests, or if a rank's part of a layer's states after all
            drafts takes more than 8 MiB, else "window".
        ring_len: With "replay", tokens after which a state is written; None: 16, or the largest divisor of the block
            size below.
        align_prefill_chunks: True to end a prefill chunk on the last block boundary inside the step's token budget.
        max_requests, max_tokens, max_sequence_length: Limits of a step and of a request; the block tables of
            max_requests requests must have fewer than 2**28 entries.
        max_prompt_tokens_beside_decode: Most prompt tokens of a step in which requests decode; needs chunked_prefill.
            None: what max_tokens leaves.
        chunked_prefill: True if a prompt may be prefilled over several steps.
        ssm_state_dtype, conv_state_dtype: "model" (the parameters' dtype), "fp32" or "bf16".
        cached_state_dtype: How cached states are stored, on the device, the host and the disk. "live": as live ones
            are, so that a hit changes no token. "int8": quantized to 8 bits, with a scale for each channel of a head;
            hits and preempted requests continue from a quantized state. Live states and those after drafts stay exact.
        attention_backend: Library that computes attention; "auto" takes the first that supports the model.
        num_cuda_graphs: How many row counts, up to max_requests, have decode steps captured as CUDA graphs.
        cuda_graph_prefill_tokens: With CUDA graphs, most prompt tokens of a captured step; None: 4096, and up to 8192
            and max_tokens for a model whose steps the host takes longer to launch than the GPU to compute.
        run_ahead: True to launch a captured step before the tokens of the step before are read, where it depends on
            nothing else.
        resident_pools: True if a suspended engine keeps its device memory and CUDA graphs.
        rank_digest_steps: Steps between comparisons of all ranks' decisions, which raise if they differ; 0: never.
        weights_version: Part of every block key; states of other weights are never found.

    Raises:
        ValueError: Naming the setting, the value and what is allowed.
    """

    block_size_tokens: int = 256
    cache_gb: float | None = None
    host_cache_gb: float | None = None
    disk_cache_dir: str | None = None
    disk_cache_gb: float | None = None
    buffer_size_gb: float | None = None
    paused_buffer_size_gb: float | None = None
    prefix_caching: bool = True
    prefix_caching_mamba_gb: float | None = None
    boundary_stride: int | Literal["all"] | None = None
    decode_checkpoints: Literal["rolling", "all", "none"] = "rolling"
    eviction: Literal["cost", "lru"] = "cost"
    num_speculative_tokens: int = 0
    adaptive_drafts: bool = True
    draft_states: Literal["auto", "replay", "window"] = "auto"
    ring_len: int | None = None
    align_prefill_chunks: bool = True
    max_requests: int = 64
    max_tokens: int = 8192
    max_sequence_length: int = 8192
    max_prompt_tokens_beside_decode: int | None = None
    chunked_prefill: bool = True
    ssm_state_dtype: str = "fp32"
    conv_state_dtype: str = "model"
    cached_state_dtype: Literal["live", "int8"] = "live"
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
        **dict.fromkeys(("cache_gb", "host_cache_gb", "disk_cache_gb", "buffer_size_gb"), "more than 0 and"),
        "prefix_caching_mamba_gb": "from 0 to",
        "decode_checkpoints": ("rolling", "all", "none"),
        "eviction": ("cost", "lru"),
        "draft_states": ("auto", "replay", "window"),
        **dict.fromkeys(("ssm_state_dtype", "conv_state_dtype"), ("model", "fp32", "bf16")),
        "cached_state_dtype": ("live", "int8"),
        "attention_backend": ("auto", "flash-attn", "flashinfer", "torch-varlen", "reference"),
        **dict.fromkeys(("prefix_caching", "adaptive_drafts", "align_prefill_chunks", "chunked_prefill"), bool),
        **dict.fromkeys(("run_ahead", "resident_pools"), bool),
    }
    """Allowed values of each setting by itself: ints, words, a bool, GiB from a minimum, or None."""

    def __post_init__(self) -> None:
        if self.cache_gb is None:
            for name, default in (("buffer_size_gb", 4.0), ("prefix_caching_mamba_gb", 1.0)):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)
        for name, rule in self.RULES.items():
            value = getattr(self, name)
            _require(_follows(rule, value), name, value, _text_of(rule))
        stride, tokens, directory = self.boundary_stride, self.cuda_graph_prefill_tokens, self.disk_cache_dir
        is_stride = stride in (None, "all") or (type(stride) is int and stride >= 1)
        _require(is_stride, "boundary_stride", stride, "None, 'all' or an int of at least 1")
        is_limit = tokens is None or (type(tokens) is int and tokens >= 0)
        _require(is_limit, "cuda_graph_prefill_tokens", tokens, "None or an int of at least 0")
        is_path = directory is None or (directory != "" and is_encodable(directory))
        _require(is_path, "disk_cache_dir", directory, "a path")
        _require(is_encodable(self.weights_version), "weights_version", self.weights_version, "Unicode text")
        self._check_memory()
        self._check_limits()
        self._check_draft_states()

    def _check_draft_states(self) -> None:
        form, length, block = self.draft_states, self.ring_len, self.block_size_tokens
        allowed = f"None or one of {_FOLD_LENGTHS} that divides block_size_tokens={block}"
        is_length = type(length) is int and length in _FOLD_LENGTHS and block % length == 0
        _require(length is None or is_length, "ring_len", length, allowed)
        if length is not None and form == "window":
            raise ValueError(
                f"ring_len is {length} and draft_states is 'window', which has no rings; leave ring_len out"
            )
        shortest = _FOLD_LENGTHS[0]
        if form == "replay" and block % shortest:
            raise ValueError(
                f"draft_states is 'replay' and block_size_tokens is {block}, which is not a multiple of {shortest}: "
                "set --inference-dynamic-batching-block-size to a multiple of it, or --draft-states window"
            )

    def resolved(self, *, prefers_replay: bool = False, most_launched: int = 0) -> "CacheConfig":
        """Return the settings with what "auto" draft states and their ring length stand for, and the graphs' tokens.

        Args:
            prefers_replay: Whether "auto" stands for "replay", where the block size allows that.
            most_launched: Prompt tokens up to which the host takes longer to launch a step than a GPU to compute it.
        """
        usual = max(_USUAL_GRAPH_TOKENS, min(most_launched, self.max_tokens, _MOST_USUAL_GRAPH_TOKENS))
        tokens = usual if self.cuda_graph_prefill_tokens is None else self.cuda_graph_prefill_tokens
        can_replay = self.block_size_tokens % _FOLD_LENGTHS[0] == 0
        form, ring_len = self.draft_states, self.ring_len or math.gcd(self.block_size_tokens, _LONGEST_USUAL_FOLD)
        if form == "auto":
            form = "replay" if prefers_replay and can_replay else "window"
        return replace(
            self,
            draft_states=form,
            ring_len=ring_len if form == "replay" else None,
            cuda_graph_prefill_tokens=tokens,
        )

    @property
    def replays(self) -> bool:
        """True when states are replayed; `resolved` says what "auto" stands for."""
        assert self.draft_states != "auto"
        return self.draft_states == "replay"

    @property
    def most_graph_tokens(self) -> int:
        """The most prompt tokens of a captured step; `resolved` says what None stands for."""
        assert self.cuda_graph_prefill_tokens is not None
        return self.cuda_graph_prefill_tokens

    @property
    def quantizes_states(self) -> bool:
        """True when cached states are quantized, so that live states have slots of their own."""
        return self.cached_state_dtype != "live" and self.prefix_caching

    @property
    def num_draft_slots(self) -> int:
        """The most slots that the drafts of a request take."""
        return 0 if self.replays else self.num_speculative_tokens

    @property
    def num_running_slots(self) -> int:
        """The live slots and draft slots of all requests, where these have places of their own."""
        return self.max_requests * (1 + self.num_draft_slots)

    @property
    def num_request_slots(self) -> int:
        """The places for cached states that one request needs: one to cache, and what it runs with where they share."""
        return 1 if self.quantizes_states else 2 + self.num_draft_slots

    def _check_memory(self) -> None:
        for name in SPLIT if self.cache_gb is not None else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"cache_gb is {self.cache_gb!r} and {name} is {getattr(self, name)!r}: set the one budget or the "
                    f"split, not both; leave {FLAGS[name][0]} out"
                )
        self._check_tiers()
        paused = self.paused_buffer_size_gb
        _require(paused is None or _is_number(paused), "paused_buffer_size_gb", paused, "a number of GiB")
        total = self.buffer_size_gb if self.cache_gb is None else self.cache_gb
        is_part = paused is None or total is None or 0 <= paused < total
        _require(is_part, "paused_buffer_size_gb", paused, f"from 0 to below {total}")

    def _check_tiers(self) -> None:
        for name, above in (("disk_cache_gb", "disk_cache_dir"), ("disk_cache_dir", "host_cache_gb")):
            if getattr(self, name) is not None and getattr(self, above) is None:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, which needs {FLAGS[above][0]}; set it, or leave {name} out"
                )
        if self.host_cache_gb is not None and (self.cache_gb is None or not self.prefix_caching):
            one_memory = (
                f"one memory, {FLAGS['cache_gb'][0]} G, in the place of {' and '.join(FLAGS[n][-1] for n in SPLIT)}"
            )
            needs = "prefix caching" if self.cache_gb is not None else one_memory
            raise ValueError(f"host_cache_gb is {self.host_cache_gb!r}, which needs {needs}; set it or leave it out")

    def _check_limits(self) -> None:
        requests, tokens, length = self.max_requests, self.max_tokens, self.max_sequence_length
        drafts, block = self.num_speculative_tokens, self.block_size_tokens
        _require(drafts < block, "num_speculative_tokens", drafts, f"below block_size_tokens={block}")
        _require(requests <= tokens, "max_tokens", tokens, f"at least max_requests={requests}")
        beside = self.max_prompt_tokens_beside_decode
        is_count = type(beside) is int and 1 <= beside <= tokens
        allowed_beside = f"an int from 1 to max_tokens={tokens}, or left out"
        _require(beside is None or is_count, "max_prompt_tokens_beside_decode", beside, allowed_beside)
        in_chunks = beside is None or self.chunked_prefill
        _require(in_chunks, "chunked_prefill", False, "True where max_prompt_tokens_beside_decode is set")
        num_entries = requests * -(-length // block)
        entries = f"the {num_entries} KV blocks of max_requests={requests} at block_size_tokens={block}"
        allowed_length = f"so short that it has {entries} below {_MOST_TABLE_ENTRIES}"
        _require(num_entries < _MOST_TABLE_ENTRIES, "max_sequence_length", length, allowed_length)

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add the flags that `from_arguments` reads."""

        def add(field: str, text: str, **options: Any) -> None:
            parser.add_argument(*FLAGS[field], help=text, **options)

        add("block_size_tokens", "tokens in a KV block", type=int, metavar="N")
        add("cache_gb", "GiB for KV blocks and states together, in the place of the two below", type=float, metavar="G")
        add("host_cache_gb", "GiB of the host's memory for what has no room on the device", type=float, metavar="G")
        add("disk_cache_dir", "directory for prefixes that outlive the process", metavar="DIR")
        add("disk_cache_gb", "GiB that each rank may keep there (default: 100)", type=float, metavar="G")
        add("buffer_size_gb", "GiB for KV blocks", type=float, metavar="G")
        add("prefix_caching_mamba_gb", "GiB for cached states", type=float, metavar="G")
        add("num_cuda_graphs", "numbers of rows that have CUDA graphs; 0 is none", type=int, metavar="N")
        add("max_tokens", "tokens that a step computes at most", type=int, metavar="N")
        beside = "prompt tokens of a step in which requests decode at most (default: as many as fit)"
        add("max_prompt_tokens_beside_decode", beside, type=int, metavar="N")
        add("max_sequence_length", "prompt and generated tokens of a request at most", type=int, metavar="N")
        add("eviction", "what makes room (default: cost)", choices=CacheConfig.RULES["eviction"])
        kept = "block boundaries inside a reply that keep a state: the newest, all or none (default: rolling)"
        add("decode_checkpoints", kept, choices=CacheConfig.RULES["decode_checkpoints"])
        add("num_speculative_tokens", "drafts a step verifies, 0 to 8", type=int, metavar="K")
        kept_states = "how a decode step keeps states: replayed from a ring, or one state a token (default: auto)"
        add("draft_states", kept_states, choices=CacheConfig.RULES["draft_states"])
        stored = "how cached states are stored: as live ones, or quantized to 8 bits (default: live)"
        add("cached_state_dtype", stored, choices=CacheConfig.RULES["cached_state_dtype"])
        add(
            "attention_backend",
            "what computes attention (default: auto)",
            choices=CacheConfig.RULES["attention_backend"],
        )
        for flag, text in (
            ("--adaptive-drafts", "draft only where it pays, or in every step (default: where it pays)"),
            ("--prefix-caching", "reuse cached prefixes, or compute every prompt from its start (default: reuse)"),
        ):
            parser.add_argument(flag, action=BooleanOptionalAction, help=text)

    @staticmethod
    def from_arguments(arguments: Namespace, **settings: object) -> "CacheConfig":
        """Build the config from parsed flags; a flag that was not given leaves `settings` or the default.

        One budget among the flags takes the place of the split in `settings`.

        Raises:
            ValueError: As the constructor does.
        """
        given = given_settings(arguments)
        if "cache_gb" in given:
            settings = {name: value for name, value in settings.items() if name not in SPLIT}
        return CacheConfig(**(settings | given))  # type: ignore[arg-type]


def given_settings(arguments: Namespace) -> dict[str, object]:
    """Return the fields of `CacheConfig` that parsed flags set."""
    given = {field: getattr(arguments, argument_of(field)) for field in FLAGS}
    given |= {name: getattr(arguments, name) for name in ("prefix_caching", "adaptive_drafts")}
    return {name: value for name, value in given.items() if value is not None}


def argument_of(field: str) -> str:
    """Return the name of a field in a parsed `Namespace`: that of its first flag."""
    return FLAGS[field][0].lstrip("-").replace("-", "_")


def is_encodable(text: object) -> bool:
    """Return whether `text` is a str that UTF-8 can encode, as block keys require."""
    try:
        return isinstance(text, str) and bool(text.encode() or True)
    except UnicodeEncodeError:
        return False


def _follows(rule: Any, value: Any) -> bool:
    if isinstance(rule, str):
        return value is None or (_is_number(value) and 0 <= value < _MOST_GB and (value > 0 or rule == "from 0 to"))
    if isinstance(rule, range):
        return type(value) is int and value in rule
    return type(value) is bool if rule is bool else value in rule


def _text_of(rule: Any) -> str:
    if isinstance(rule, str):
        return f"{rule} below {_MOST_GB}, a number of GiB"
    if isinstance(rule, range):
        return f"an int of at least 1 and below {rule.stop}" if rule.start else f"an int from 0 to {rule.stop - 1}"
    return "True or False" if rule is bool else f"one of {rule}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
