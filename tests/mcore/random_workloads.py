"""Seeded random workloads: prompts that share, nest, diverge and repeat, arriving while others run."""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.grammars.forms import json_grammar
from megatron_mamba_cache.mcore.generated_tokens import is_reported
from megatron_mamba_cache.mcore.model_ranks import ranks_of_process
from megatron_mamba_cache.models.architecture import ExpertsSizes, GatedDeltaSizes
from megatron_mamba_cache.policy import running_requests
from megatron_mamba_cache.policy.block_growth import GrowthOutcome, grow_requests
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.speculation.drafter import Drafter
from megatron_mamba_cache.speculation.prompt_lookup import AutoDrafter
from megatron_mamba_cache.step.logits import any_changed, any_masked, any_scored
from tests.grammars.piece_tokenizer import END, PieceTokenizer
from tests.grammars.random_schemas import random_schema
from tests.mcore.engine_runs import (
    MAX_STEPS,
    EngineRun,
    Hybrid,
    OracleTally,
    add_fields,
    cache_config,
    greedy,
    tiny_hybrid,
    with_host_tier,
    with_one_budget,
)
from tests.mcore.injected_errors import ERROR_POINTS, REPORT_ERROR_POINTS, ErrorPoints, InjectedError, raise_once
from tests.mcore.mtp_drafters import with_head
from tests.mcore.reply_oracle import Asked, check_log_probs, check_reply
from tests.tiers.unreliable_copies import unreliable_copies

MODELS = (
    {"pattern": "M*M-", "ssm_chunk_size": 8},
    {"pattern": "MM*-M*", "ssm_chunk_size": 16, "use_rope": False},
    {"pattern": "*MM", "ssm_chunk_size": 16, "vocab_size": 64},
    {"pattern": "M-*M", "ssm_chunk_size": 8, "use_rope": False, "hidden_size": 48, "vocab_size": 128},
)
LATENT_EXPERTS = ExpertsSizes(
    8, 3, 24, 40, "sigmoid", num_groups=4, top_groups=2, num_scoring=2, scaling=2.5, latent_size=16
)
EXPERT_MODELS = (
    {"pattern": "MEM*E", "ssm_chunk_size": 8},
    {"pattern": "ME*EM", "ssm_chunk_size": 16, "use_rope": False, "hidden_size": 48, "num_experts": 7},
    {"pattern": "MEM*E", "ssm_chunk_size": 8, "experts": LATENT_EXPERTS},
    {"pattern": "ME*EM", "ssm_chunk_size": 16, "gated": True, "experts": ExpertsSizes(5, 3, 24, 40, "softmax")},
)
TOY_MODELS = (
    {"pattern": "MM*M", "is_toy": True},
    {"pattern": "M*MM-M", "is_toy": True, "use_rope": False, "vocab_size": 64},
    {"pattern": "*M-M*", "is_toy": True, "hidden_size": 48},
)
GATED_DELTA_MODELS = tuple(
    sizes | {"gated": True}
    for sizes in (
        {"pattern": "M-M*-", "gated_delta": GatedDeltaSizes(2, 4, 16, 24), "ssm_chunk_size": 8},
        {"pattern": "ME*EM", "gated_delta": GatedDeltaSizes(2, 6, 24, 16), "ssm_chunk_size": 16, "num_experts": 7},
        {
            "pattern": "*MM",
            "gated_delta": GatedDeltaSizes(4, 4, 16, 16, d_conv=3),
            "ssm_chunk_size": 16,
            "vocab_size": 64,
        },
        {
            "pattern": "ME*E",
            "gated_delta": GatedDeltaSizes(2, 6, 16, 20),
            "ssm_chunk_size": 8,
            "experts": ExpertsSizes(5, 3, 24, 40, "softmax", has_shared_gate=True),
            "use_rope": False,
        },
    )
)
NEIGHBOUR = 10_000
"""The id of a request that is added and cancelled; it is not part of the workload."""
RING_LENGTHS = (4, 8, 16, 32)
QUANTIZATION_MARGIN = 0.05
"""The oracle's largest margin below its best token if states were quantized."""
HALF_MARGIN, HALF_EXPERTS_MARGIN, HALF_ROUTING_MARGIN = 0.3, 0.8, 0.02
"""The margin of half-precision models, whose logits spread by 1.6, without experts and with them.

The worst of 2,000 tokens without experts was 0.06; with a wrong KV block in each step 1 to 5 in every workload. A token
whose last expert scores hardly more than the next may choose that one, and is 1.5 below: it is left out: 3 % of
tokens, 27 % with LATENT_EXPERTS. The worst of 5,000 others was 0.6.
"""
_HALF = {
    "dtype": torch.bfloat16,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "ssm_chunk_size": 16,
    "init_std": 0.1,  # with larger weights, rounding alone changes most tokens
}
MODEL_FORMS = {
    "dense": MODELS,
    "experts": EXPERT_MODELS,
    "toy": TOY_MODELS,
    "gated delta": GATED_DELTA_MODELS,
    "half": tuple(sizes | _HALF for sizes in MODELS),
    "half, gated delta": tuple(sizes | _HALF for sizes in GATED_DELTA_MODELS),
    "half, experts": tuple(sizes | _HALF for sizes in EXPERT_MODELS),
}
WITHOUT_REPLAY = ("toy",)
"""Models whose states cannot be replayed."""

_REQUESTED: tuple[dict[str, Any], ...] = (
    {},
    {"return_log_probs": True, "skip_prompt_log_probs": True},
    {"return_log_probs": True},
    {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 2},
    {"return_log_probs": True, "top_n_logprobs": 3},
)

_SAMPLED: tuple[dict[str, Any], ...] = (
    {"top_k": 0, "temperature": 0.8},
    {"top_k": 7, "temperature": 1.5},
    {"top_k": 0, "top_p": 0.9, "temperature": 1.0},
    {"top_k": 20, "top_p": 0.8, "temperature": 1.2},
)


_CHANGED: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"logit_bias": [[3, 2.0], [5, -4.0]]},
    {"logit_bias": [[token, 1.5] for token in range(0, 60, 3)], "frequency_penalty": 0.3, "min_tokens": 5},
    {"min_tokens": 6},
    {"min_p": 0.2, "presence_penalty": -0.5},
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at a step; one that `follows` another is the next turn of its text."""

    step: int
    prompt: tuple[int, ...]
    num_tokens: int
    follows: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    requested: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)  # for which Megatron has no field
    seed: int | None = None

    def asked(self, request_id: int) -> Asked:
        """Return the settings that the oracle needs; a request without a seed uses its id, as in `build_engine`."""
        requested = {"top_k": 1} | self.requested
        return Asked(
            seed=request_id if self.seed is None else self.seed,
            **{name: requested[name] for name in ("temperature", "top_k", "top_p") if name in requested},
            logits=self.attributes.get("logits", {}),
            grammar=self.attributes.get("grammar", ""),
            ends=tuple(word[0] for word in self.stop_words if len(word) == 1),
        )

    @property
    def sampling(self) -> SamplingParams:
        """Return parameters: ends by length, stop words or single tokens; greedy unless `requested` says otherwise."""
        single = [word[0] for word in self.stop_words if len(word) == 1]
        longer = [" ".join(map(str, word)) for word in self.stop_words if len(word) > 1]
        end = single[0] if single else -1
        params = greedy(self.num_tokens, termination_id=end, stop_words=longer or None, **self.requested)
        add_fields(params, **(self.attributes | ({"stop_token_ids": single[1:]} if single[1:] else {})))
        return params

    @property
    def is_greedy(self) -> bool:
        """True if its tokens must equal the oracle's."""
        return "temperature" not in self.requested and "logits" not in self.attributes

    def assert_ends_right(self, tokens: list[int]) -> None:
        """Assert that a reply ends where it must and not before."""
        ends = [
            count
            for count in range(1, len(tokens) + 1)
            if count == self.num_tokens or any(tuple(tokens[:count][-len(word) :]) == word for word in self.stop_words)
        ]
        assert ends == [len(tokens)], (tokens, self)


@dataclass(frozen=True, slots=True)
class Workload:
    """One engine's settings and all arrivals; an arrival's index is its request id."""

    subject: Hybrid
    config: CacheConfig
    arrivals: tuple[Arrival, ...]
    disturbed_share: float = 0.0  # of the steps: a flush, a suspend or an error comes before or in them
    has_log_probs: bool = False  # then reports may fail too
    disturbances: tuple[str, ...] = ("flush", "suspend", "error", "error")
    disk_gb: float | None = None  # of a directory that `run_workload` makes
    keeps_all_logits: bool = False  # as log-probs need; a graph's logits are then those of every token
    scores_prompts: bool = False  # apart from steps, so that log-probs do not need all logits

    @property
    def has_grammars(self) -> bool:
        """True if some requests have a grammar, over the vocabulary of `PieceTokenizer`."""
        return any("grammar" in arrival.attributes for arrival in self.arrivals)

    def error_points(self, rng: random.Random) -> ErrorPoints:
        """Return the calls in which a step may fail."""
        return REPORT_ERROR_POINTS if self.has_log_probs and rng.random() < 0.7 else ERROR_POINTS


@dataclass(frozen=True, slots=True)
class Flavour:
    """A kind of workload, and the counters that must become positive in it.

    Args:
        settings: From a random generator, the block size and the most blocks of a request to cache settings.
        gaps: Options for the steps between two arrivals.
        is_disturbed: True if steps fail, and caches are flushed and suspended.
        num_texts: Texts that share nothing; each later request is the next turn of an earlier one. None: most requests
            share a beginning with others.
    """

    name: str
    settings: Callable[[random.Random, int, int], dict[str, Any]]
    exercises: tuple[str, ...]
    gaps: tuple[int, ...] = (0, 0, 0, 1, 4, 15)
    is_disturbed: bool = False
    num_texts: int | None = None


def _roomy(rng: random.Random, block: int, _request_blocks: int) -> dict[str, Any]:
    return {
        "max_requests": 6,
        "max_tokens": rng.choice([3 * block, 8 * block, 256]),
        "max_prompt_tokens_beside_decode": rng.choice([None, block + 3, 2 * block]),
    }


def _tight_blocks(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return {
        "kv_blocks": request_blocks + rng.randrange(3),
        "paused_blocks": rng.randrange(0, request_blocks),
        "cached_states": rng.choice([2, 8, 30]),
        "max_requests": rng.randrange(3, 7),
        "max_tokens": rng.choice([2 * block, 4 * block]),
    }


def _few_states(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return {
        "cached_states": rng.randrange(1, 3),
        "kv_blocks": 3 * request_blocks,
        "max_requests": rng.randrange(2, 4),
        "max_tokens": rng.choice([2 * block, 6 * block]),
        "boundary_stride": rng.choice([None, 1]),
    }


def _small_steps(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return {
        "kv_blocks": rng.choice([2, 6]) * request_blocks,
        "max_requests": 4,
        "max_tokens": rng.randrange(6, block + 4),
        "align_prefill_chunks": rng.random() < 0.5,
    }


def _strides(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return {
        "boundary_stride": rng.choice([1, 2]),
        "kv_blocks": 2 * request_blocks + rng.randrange(4),
        "cached_states": rng.choice([4, 12]),
        "max_requests": rng.randrange(2, 7),
        "max_tokens": rng.choice([block + 3, 3 * block + 1, 128]),
        "align_prefill_chunks": rng.random() < 0.7,
    }


def _whole_prompts(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return {
        "kv_blocks": rng.choice([request_blocks + 1, 4 * request_blocks]),
        "paused_blocks": rng.randrange(0, request_blocks),
        "cached_states": rng.choice([2, 30]),
        "boundary_stride": rng.choice([None, 1]),
        "max_requests": 6,
        "max_tokens": request_blocks * block + rng.randrange(block),  # one request of any length and little more
    }


def _uncached(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    tight = rng.random() < 0.7
    return {
        "prefix_caching": False,
        "kv_blocks": request_blocks + 1 if tight else 4 * request_blocks,
        "paused_blocks": 1,
        "max_requests": 5,
        "max_tokens": rng.choice([block, 3 * block]),
    }


def _disturbed(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return {
        "kv_blocks": rng.choice([request_blocks + 1, 4 * request_blocks]),
        "paused_blocks": 1,
        "cached_states": rng.choice([2, 20]),
        "boundary_stride": rng.choice([None, 1]),
        "max_requests": rng.randrange(2, 7),
        "max_tokens": rng.choice([block + 3, 4 * block]),
        "resident_pools": rng.random() < 0.5,
        "max_prompt_tokens_beside_decode": rng.choice([None, block // 2]),
    }


def _one_budget(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return {
        "spare_slabs": rng.choice([0, 1, 3, 8]),
        "paused_blocks": None,
        "boundary_stride": rng.choice([None, None, 1]),
        "max_requests": rng.randrange(2, 7),
        "max_tokens": rng.choice([2 * block, 4 * block + 1, 256]),
        "eviction": rng.choice(["cost", "cost", "lru"]),
    }


def _host_tier(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    small = {"spare_slabs": rng.choice([0, 1, 3]), "host_slabs": rng.choice([2, 5, 12, 60])}
    return _one_budget(rng, block, request_blocks) | small | {"max_requests": rng.randrange(1, 4)}


def _disk_tier(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    disk = {"host_slabs": rng.choice([2, 4, 8])}
    return _disturbed_tiers(rng, block, request_blocks) | disk | {"disk_gb": rng.choice([2, 8, 50]) * 2**-14}


def _disturbed_tiers(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return _disturbed_budget(rng, block, request_blocks) | _host_tier(rng, block, request_blocks)


def _disturbed_budget(rng: random.Random, block: int, request_blocks: int) -> dict[str, Any]:
    return _disturbed(rng, block, request_blocks) | _one_budget(rng, block, request_blocks)


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("roomy", _roomy, ("prompt_tokens_skipped", "states_restored", "admissions_deferred")),
        Flavour(
            "tight_blocks",
            _tight_blocks,
            ("prompt_tokens_skipped", "requests_paused", "requests_evicted", "kv_blocks_evicted", "chunked_steps"),
        ),
        Flavour("few_states", _few_states, ("prompt_tokens_skipped", "states_skipped_no_room", "states_evicted")),
        Flavour("small_steps", _small_steps, ("prompt_tokens_skipped", "unaligned_chunks", "short_chunks")),
        Flavour("strides", _strides, ("prompt_tokens_skipped", "states_evicted", "kv_blocks_evicted", "chunked_steps")),
        Flavour("whole_prompts", _whole_prompts, ("prompt_tokens_skipped", "requests_evicted"), gaps=(0,)),
        Flavour("uncached", _uncached, ("requests_evicted", "chunked_steps")),
        Flavour(
            "disturbed",
            _disturbed,
            ("prompt_tokens_skipped", "steps_aborted", "suspends", "flushes"),
            is_disturbed=True,
        ),
        Flavour(
            "one_budget",
            _one_budget,
            ("prompt_tokens_skipped", "states_evicted", "kv_blocks_evicted", "requests_evicted", "chunked_steps"),
        ),
        Flavour(
            "disturbed_budget",
            _disturbed_budget,
            ("prompt_tokens_skipped", "steps_aborted", "suspends", "flushes", "states_evicted"),
            is_disturbed=True,
        ),
        Flavour(
            "host_tier",
            _host_tier,
            ("prompt_tokens_from_host", "states_written_to_host", "states_evicted", "copies_failed", "copies_late"),
            num_texts=6,
        ),
        Flavour(
            "disturbed_tiers",
            _disturbed_tiers,
            ("prompt_tokens_from_host", "steps_aborted", "suspends", "flushes", "copies_failed", "copies_late"),
            is_disturbed=True,
            num_texts=6,
        ),
        Flavour(
            "disk_tier",
            _disk_tier,
            ("prompt_tokens_from_disk", "states_written_to_disk", "steps_aborted", "suspends", "copies_failed"),
            is_disturbed=True,
            num_texts=6,
        ),
    )
}


def make_workload(
    flavour: Flavour,
    seed: int,
    num_drafts: int = 0,
    *,
    has_log_probs: bool = False,
    sampled_share: float = 0.0,
    changed_share: float = 0.0,
    has_grammars: bool = False,
    models: Sequence[dict[str, Any]] | None = None,
    replays: bool = False,
    cached_form: str = "live",
    kv_cache_dtype: str = "auto",
    has_head: bool = False,
    record_routes: bool = False,
) -> Workload:
    """Return the workload of a flavour and a seed; with drafts, and sometimes without, requests have stop words.

    Args:
        has_log_probs: True if most requests want log-probs, and steps are disturbed whatever the flavour.
        sampled_share: Share of the requests that sample.
        changed_share: Share of those that change their logits.
        has_grammars: True if about half of the requests have to follow a grammar, and no others have stop words.
        models: Sizes of models to choose from; None: MODELS.
        replays: True if states are replayed, from rings of some length; else what the device's default is.
        cached_form: How cached states are stored.
        kv_cache_dtype: How keys and values are stored.
        has_head: True if a multi-token prediction head drafts.
        record_routes: True if routed experts are recorded.
    """
    rng = random.Random(f"{flavour.name} {seed}")
    sizes = rng.choice(MODELS if models is None else models)
    subject = tiny_hybrid(**sizes | ({"vocab_size": PieceTokenizer().vocab_size} if has_grammars else {}))
    if has_head:
        subject = with_head(subject)
    block = subject.sizes.ssm_chunk_size * rng.choice([1, 2, 4])
    max_prompt = rng.choice([3, 4, 6]) * block if block <= 32 else 3 * block
    max_tokens = rng.randrange(8, 30)
    request_blocks = -(-(max_prompt + max_tokens) // block)
    settings = {"block_size_tokens": block, "max_sequence_length": max_prompt + max_tokens}
    settings |= flavour.settings(rng, block, request_blocks)
    arrivals = _arrivals(rng, subject, block, max_prompt, max_tokens, flavour)
    settings["decode_checkpoints"] = rng.choice(["rolling", "rolling", "all", "none"])
    if num_drafts:
        settings["num_speculative_tokens"] = num_drafts = min(num_drafts, block - 1)
        settings["cached_states"] = max(settings.get("cached_states", 50), num_drafts)
        settings["adaptive_drafts"] = seed % 2 == 0  # others draft in every step
    if num_drafts or rng.random() < 0.3:
        arrivals = tuple(replace(arrival, stop_words=_stop_words(rng, subject)) for arrival in arrivals)
    if has_log_probs:
        arrivals = tuple(replace(arrival, requested=rng.choice(_REQUESTED)) for arrival in arrivals)
    if sampled_share:
        arrivals = tuple(
            replace(arrival, requested=arrival.requested | rng.choice(_SAMPLED))
            if rng.random() < sampled_share
            else arrival
            for arrival in arrivals
        )
    if has_grammars:
        arrivals = _with_grammars(random.Random(f"{flavour.name} {seed} grammars"), arrivals)
    if changed_share:
        arrivals = tuple(
            replace(arrival, attributes=arrival.attributes | {"logits": _changes(rng, arrival)})
            if rng.random() < changed_share
            else arrival
            for arrival in arrivals
        )
    arrivals = _with_breakpoints(random.Random(f"{flavour.name} {seed} breakpoints"), arrivals)
    disturbed_share = 0.3 if has_log_probs else 0.15 if flavour.is_disturbed else 0.0
    if replays:
        lengths = [length for length in RING_LENGTHS if block % length == 0]
        settings |= {"draft_states": "replay", "fold_every": random.Random(seed).choice(lengths)}
    if cached_form != "live":
        settings["cached_state_dtype"] = cached_form
    if record_routes:
        settings["record_routes"] = True
    if kv_cache_dtype != "auto":
        settings["kv_cache_dtype"] = kv_cache_dtype
    spare_slabs, host_slabs = settings.pop("spare_slabs", None), settings.pop("host_slabs", None)
    disk_gb = settings.pop("disk_gb", None)
    config = cache_config(subject.sizes, **settings)
    if spare_slabs is not None:
        config = with_one_budget(config, subject.shape, spare_slabs)
    if host_slabs is not None:
        config = with_host_tier(config, subject.shape, host_slabs)
    return Workload(subject, config, arrivals, disturbed_share, has_log_probs, disk_gb=disk_gb)


def with_likely_ends(work: Workload, replies: Sequence[Sequence[int]], rng: random.Random) -> Workload:
    """Return requests of which most end at some tokens of their replies, and some have seeds.

    Those with a least number of tokens would end before they have it.

    Args:
        replies: Without these ends.
    """
    arrivals = []
    for arrival, reply in zip(work.arrivals, replies, strict=True):
        ends: tuple[tuple[int, ...], ...] = ()
        if arrival.attributes.get("logits", {}).get("min_tokens"):
            ends = ((rng.choice(reply[1:6] or reply),),)
        elif "grammar" not in arrival.attributes and rng.random() < 0.5:
            point = rng.randrange(len(reply) // 2, len(reply))
            ends = (tuple(reply[max(0, point - rng.choice([0, 1])) : point + 1]),)
        if work.has_grammars:  # whose tokenizer spells texts, not token ids
            ends = tuple(word[-1:] for word in ends)
        seed = rng.randrange(2**40) if rng.random() < 0.3 and arrival.is_greedy else None
        arrivals.append(replace(arrival, stop_words=(*arrival.stop_words, *ends), seed=seed))
    return replace(work, arrivals=tuple(arrivals))


def undisturbed(work: Workload) -> Workload:
    """Return the same requests, all arriving at once, with room for each."""
    config, num_requests = work.config, len(work.arrivals)
    block = config.block_size_tokens
    num_blocks = num_requests * -(-config.max_sequence_length // block)
    roomy = {"kv_blocks": num_blocks, "max_requests": num_requests, "max_tokens": max(block, 256)}
    limits = {"block_size_tokens": block, "max_sequence_length": config.max_sequence_length}
    arrivals = tuple(replace(arrival, step=0) for arrival in work.arrivals)
    settings = cache_config(work.subject.sizes, **limits, **roomy)
    return Workload(work.subject, settings, arrivals, has_log_probs=work.has_log_probs)


@dataclass(frozen=True, slots=True)
class WorkloadOutcome:
    """The outcome of a workload: counters, the oracle's tally, and each request's text."""

    seen: Counter[str]
    tally: OracleTally
    texts: dict[int, list[int]]  # prompt and generated tokens
    run: EngineRun


def run_workload(work: Workload, drafter: Drafter | AutoDrafter | None = None) -> WorkloadOutcome:
    """Run a workload to its end with all assertions; copies between tiers fail or are late on any rank."""
    with (
        unreliable_copies(len(work.arrivals) + 1000 * ranks_of_process().index) as copies,
        tempfile.TemporaryDirectory() as directory,
    ):
        if work.disk_gb is not None:
            disk = {"disk_cache_dir": directory, "disk_cache_gb": work.disk_gb}
            work = replace(work, config=replace(work.config, **disk))
        outcome = _run_workload(work, drafter)
        outcome.run.engine.close()
    outcome.seen.update(copies.seen)
    return outcome


def _run_workload(work: Workload, drafter: Drafter | AutoDrafter | None) -> WorkloadOutcome:
    only_last = work.scores_prompts or not (work.has_log_probs or work.keeps_all_logits)
    settings: dict[str, Any] = {"tokenizer": PieceTokenizer()} if work.has_grammars else {}
    if work.scores_prompts:
        settings["scores_prompts"] = True
    run = EngineRun.start(
        work.subject, work.config, drafter=drafter, materialize_only_last_token_logits=only_last, **settings
    )
    seen = Counter(requests=len(work.arrivals))
    pending = dict(enumerate(work.arrivals))
    rng = random.Random(len(work.arrivals))
    groups = run.context.memory.state_pool.groups
    windows_of = [tensor.shape[0] for group in groups for tensor in group.tensors if tensor.motion == "window"]
    window_len = max(windows_of, default=0)
    while pending or run.engine.has_unfinished_requests():
        assert run.num_steps < MAX_STEPS, run.context.snapshot()
        if not pending and run.engine.requests.keys() == {NEIGHBOUR}:
            run.engine.cancel_request(NEIGHBOUR)
            continue
        add_due(work, run, pending)
        before, windows = (
            _prefilling(run),
            {request.request_id: request.cursor.accepted for request in run.context.running_requests},
        )
        if run.context.overlapped_step is not None:
            seen["early steps"] += 1
            seen["early steps that are scored"] += any_scored(run.context.running_requests)
            seen["early steps that need the host"] += any_masked(run.context.running_requests) or any_changed(
                run.context.running_requests
            )
        if rng.random() < work.disturbed_share:
            disturbed_step(rng, run, seen, work.error_points(rng), work.disturbances)
        else:
            run.step()
        run.finished.pop(NEIGHBOUR, None)
        assert all(
            is_reported(request, run.engine.get_request(request.request_id)) for request in run.context.running_requests
        )
        for request_id, computed in _prefilling(run).items():
            seen["chunked_steps"] += 1
            seen["unaligned_chunks"] += computed % work.config.block_size_tokens > 0
            seen["short_chunks"] += computed - before.get(request_id, 0) <= window_len
        after = {
            request.request_id: request.cursor.accepted
            for request in run.context.running_requests
            if not request.is_prefilling
        }
        seen["windows_changed"] += sum(windows.get(request_id, size) != size for request_id, size in after.items())
    _assert_all_finished(work, run)
    seen.update({name: count for name, count in run.context.snapshot().as_dict().items() if isinstance(count, int)})
    if work.subject.sizes.dtype != torch.float32:
        margin = HALF_EXPERTS_MARGIN if "E" in work.subject.sizes.pattern else HALF_MARGIN
        tally = run.assert_near_oracle(_greedy_ones(work), margin, HALF_ROUTING_MARGIN)
    elif work.config.quantizes_states:
        tally = run.assert_near_oracle(_greedy_ones(work), QUANTIZATION_MARGIN)
    else:
        tally = assert_replies_are_the_oracles(work, run)
    texts = {request_id: run.prompts[request_id] + run.tokens(request_id) for request_id in run.finished}
    assert run.context.runner._changes.masks._requests == {} and run.context.runner._changes._seen.is_empty
    seen["ended by a grammar"] = sum(
        "grammar" in work.arrivals[request_id].attributes and run.tokens(request_id)[-1] == END
        for request_id in run.finished
    )
    seen["tokens"] = sum(len(run.tokens(request_id)) for request_id in run.finished)
    return WorkloadOutcome(seen, tally, texts, run)


def add_due(work: Workload, run: EngineRun, pending: dict[int, Arrival]) -> None:
    """Add the pending requests that are due."""
    for request_id in [i for i, arrival in pending.items() if _is_due(arrival, run)]:
        _add(run, request_id, pending.pop(request_id), work.config.max_sequence_length)


def _prefilling(run: EngineRun) -> dict[int, int]:
    """Return the computed tokens of each prefilling request."""
    return {request.request_id: request.computed for request in run.context.running_requests if request.is_prefilling}


def disturbed_step(
    rng: random.Random, run: EngineRun, seen: Counter[str], points: ErrorPoints, disturbances: Sequence[str]
) -> None:
    """Run a step after a flush or a suspend, or with an error in it."""
    disturbance = rng.choice(disturbances)
    if disturbance == "flush":
        run.engine.flush()
        seen["flushes"] += 1
    elif disturbance == "suspend":
        run.engine.suspend()
        run.engine.resume()
        seen["suspends"] += 1
    elif disturbance == "neighbour":
        seen["neighbours cancelled"] += _cancel_or_add_neighbour(rng, run)
    with pytest.MonkeyPatch.context() as patch:
        if disturbance == "error":
            point = rng.choice(sorted(points))
            raise_once(patch, *points[point](run), call=rng.randrange(1, 4))
        elif disturbance == "evict":
            patch.setattr(running_requests, "grow_requests", _grow_requests_and_evict)
        try:
            run.step()
        except InjectedError:
            seen["errors in reports"] += point in REPORT_ERROR_POINTS


def _cancel_or_add_neighbour(rng: random.Random, run: EngineRun) -> bool:
    """Cancel the request outside of the workload, or else add it; return True if it was there."""
    if run.engine.cancel_request(NEIGHBOUR):
        return True
    prompt = rng.choice(list(run.prompts.values()) or [[1, 2, 3]])
    params = greedy(run.context.cache_config.max_sequence_length - len(prompt))
    add_fields(params, logits={"presence_penalty": 1.0})
    run.engine.add_request(NEIGHBOUR, prompt, params)
    return False


def _grow_requests_and_evict(
    requests: list[RunningRequest],
    cache: PrefixCache,
    paused_capacity: int,
    release: Callable[[RunningRequest], object],
) -> GrowthOutcome:
    """Grow requests, and evict the youngest decoding one even if there is room for it."""
    outcome = grow_requests(requests, cache, paused_capacity, release)
    left = [
        request
        for request in requests
        if not request.is_prefilling and all(request is not other for other in outcome.evicted)
    ]
    if not left:
        return outcome
    youngest = max(left, key=lambda request: request.age)
    release(youngest)
    paused = tuple(request for request in outcome.paused if request is not youngest)
    return GrowthOutcome(paused, (*outcome.evicted, youngest))


def _is_due(arrival: Arrival, run: EngineRun) -> bool:
    return arrival.step <= run.num_steps and (arrival.follows is None or arrival.follows in run.finished)


def _add(run: EngineRun, request_id: int, arrival: Arrival, max_len: int) -> None:
    prompt = list(arrival.prompt)
    if arrival.follows is not None:
        earlier = run.prompts[arrival.follows] + run.tokens(arrival.follows)
        prompt = (earlier + prompt)[: max_len - arrival.num_tokens]
    run.add(request_id, prompt, arrival.sampling, seed=arrival.seed)


def _assert_all_finished(work: Workload, run: EngineRun) -> None:
    run.assert_nothing_held()
    counters, block = run.counters, work.config.block_size_tokens
    for request_id, arrival in enumerate(work.arrivals):
        arrival.assert_ends_right(run.tokens(request_id))
        cached = run.engine.cached_tokens(request_id)
        assert cached % block == 0 and cached < len(run.prompts[request_id])
        assert cached == 0 or work.config.prefix_caching
    prompt_tokens = sum(map(len, run.prompts.values()))
    if not (counters.requests_evicted or work.disturbed_share):  # nothing is prefilled twice
        assert counters.prompt_tokens_skipped + counters.prefill_tokens_computed == prompt_tokens
    run.engine.flush()
    kinds = run.context.snapshot().kv_blocks
    assert kinds == {"free": run.context.cache.kv.num_blocks, "cached": 0, "in_use": 0}
    assert run.context.snapshot().state_slots["cached"] == 0


def _greedy_ones(work: Workload) -> list[int]:
    return [request_id for request_id, arrival in enumerate(work.arrivals) if arrival.is_greedy]


def assert_replies_are_the_oracles(work: Workload, run: EngineRun) -> OracleTally:
    """Assert that all tokens and log-probs equal those of whole sequences in fp64, without a cache."""
    tally, oracle = OracleTally(), run.subject.oracle
    for request_id, arrival in enumerate(work.arrivals):
        prompt, reply = run.prompts[request_id], run.tokens(request_id)
        try:
            tally.add(check_reply(oracle, prompt, reply, arrival.asked(request_id)))
            check_log_probs(oracle, prompt, run.finished[request_id])
        except AssertionError as error:
            cached = run.engine.cached_tokens(request_id)
            error.add_note(f"request {request_id}, {cached} of its {len(prompt)} prompt tokens cached: {arrival}")
            raise
    return tally


def _arrivals(
    rng: random.Random, subject: Hybrid, block: int, max_prompt: int, max_tokens: int, flavour: Flavour
) -> tuple[Arrival, ...]:
    vocab, chunk = subject.sizes.vocab_size, subject.sizes.ssm_chunk_size
    if flavour.num_texts is not None:
        return _turns(rng, vocab, max_prompt, max_tokens, flavour.num_texts)
    base = tuple(rng.randrange(vocab) for _ in range(max_prompt))
    prompts: list[tuple[int, ...]] = [base]
    arrivals: list[Arrival] = []
    step = 0
    for request_id in range(rng.randrange(6, 12)):
        step += rng.choice(flavour.gaps)
        num_tokens = rng.randrange(1, max_tokens + 1)
        if request_id and rng.random() < 0.2:
            turn = tuple(rng.randrange(vocab) for _ in range(rng.randrange(1, block)))
            arrivals.append(Arrival(step, turn, num_tokens, follows=rng.randrange(request_id)))
            continue
        prompt = _prompt(rng, prompts, vocab, rng.choice([block, chunk]))[:max_prompt]
        prompts.append(prompt)
        arrivals.append(Arrival(step, prompt, num_tokens))
    return tuple(arrivals)


def _turns(rng: random.Random, vocab: int, max_prompt: int, max_tokens: int, num_texts: int) -> tuple[Arrival, ...]:
    """Return requests of texts that take turns; some texts branch at the end of an earlier turn."""
    arrivals, step = [], 0
    for request_id in range(3 * num_texts):
        is_first = request_id < num_texts
        step += rng.choice([0, 1, 4, 10])
        num_new = rng.randrange(max_prompt // 3, 2 * max_prompt // 3) if is_first else rng.randrange(1, max_prompt // 4)
        new = tuple(rng.randrange(vocab) for _ in range(num_new))
        num_tokens = rng.randrange(1, max_tokens + 1)
        follows = None if is_first else rng.randrange(max(0, request_id - 2 * num_texts), request_id)
        arrivals.append(Arrival(step, new, num_tokens, follows))
    return tuple(arrivals)


def _with_grammars(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return arrivals of which the first and about half of the others follow a random JSON schema to its end."""
    found: list[Arrival] = []
    for arrival in arrivals:
        grammar = json_grammar(random_schema(rng)).text if not found or rng.random() < 0.5 else ""
        ends, attributes = (((END,),), {"grammar": grammar}) if grammar else ((), {})
        found.append(replace(arrival, stop_words=ends, attributes=attributes))
    return tuple(found)


def _changes(rng: random.Random, arrival: Arrival) -> dict[str, Any]:
    """Return changes of logits; with a grammar, without a minimum number of tokens."""
    changes = rng.choice(_CHANGED)
    return changes if "grammar" not in arrival.attributes else {**changes, "min_tokens": 0}


def _with_breakpoints(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return arrivals, some with breakpoints that are kept for some seconds; each is stamped with a time."""
    found = []
    for arrival in arrivals:
        points = [[rng.randrange(1, 1 + len(arrival.prompt)), rng.choice([0, 5, 60])] for _ in range(rng.randrange(3))]
        stamped = {
            "arrived_s": 1000 + arrival.step + rng.randrange(3),
            "breakpoints": points if rng.random() < 0.5 else [],
        }
        found.append(replace(arrival, attributes={**arrival.attributes, **stamped}))
    return tuple(found)


def _stop_words(rng: random.Random, subject: Hybrid) -> tuple[tuple[int, ...], ...]:
    """Return mostly no stop words, else some that are likely to be generated; random texts repeat few tokens."""
    vocab = subject.sizes.vocab_size
    if rng.random() < 0.7:
        return ()
    return tuple(tuple(rng.randrange(vocab) for _ in range(length)) for length in (1, 2, 2, 2))


def _prompt(rng: random.Random, earlier: list[tuple[int, ...]], vocab: int, unit: int) -> tuple[int, ...]:
    """Return a new prompt, or one made from an earlier one; lengths cluster around multiples of `unit`."""
    base, latest = earlier[0], rng.choice(earlier)
    near = max(1, unit * rng.randrange(0, len(base) // unit + 1) + rng.choice([-1, 0, 0, 1]))
    some = tuple(rng.randrange(vocab) for _ in range(rng.choice([0, 1, 2, 5, unit, unit + 1])))
    kind = rng.choice(["fresh", "short", "shared", "shared", "nested", "divergent", "repeat", "repeat"])
    if kind == "fresh":
        return tuple(rng.randrange(vocab) for _ in range(near))
    if kind == "short":
        return base[: rng.randrange(1, 4)]
    if kind == "shared":
        return base[:near] + some
    if kind == "nested":
        return latest + some
    if kind == "divergent":
        at = min(near, len(latest)) - 1
        return (*latest[:at], (latest[at] + 1) % vocab, *latest[at + 1 :])
    return latest
