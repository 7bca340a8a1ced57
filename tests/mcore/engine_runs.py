"""Engines over tiny random models: run requests step by step, check every step, compare tokens with the oracle."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, Self

import pytest
import torch
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.mcore.engine import MambaCacheEngine
from megatron_mamba_cache.mcore.model_ranks import ranks_of_process
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.request_spec import SPEC
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_hybrid_model
from megatron_mamba_cache.policy.tiers.cache_tiers import HostTier
from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape
from megatron_mamba_cache.recurrences.slab_shape import SlabShape
from megatron_mamba_cache.tiers.host_budget import processes_of_host
from tests.grammars.allowed_tokens import allowed_tokens
from tests.mcore.split_memory import SplitConfig
from tests.mcore.toy_models import ToyHybridConfig, put_toys, toy_state_bytes
from tests.oracle import HybridOracle

GIB = 2**30
ORACLE_MARGIN = 1e-5
MAX_STOPPED_SHARE = 1e-3
MAX_STEPS = 2000
TINY_VOCAB = 96


class UsualForm:
    """The default draft-state mode of tests: unlike "auto", it is the same on each machine.

    States of Gated DeltaNet are in windows, the one form that they have.
    """

    draft_states = "window"


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A random model and its fp64 oracle."""

    sizes: RandomHybridConfig
    model: Any
    oracle: HybridOracle
    shape: HybridModelShape


def tiny_sizes(*, is_toy: bool = False, **settings: Any) -> RandomHybridConfig:
    """Return the sizes of a model that takes a few milliseconds per step.

    Args:
        is_toy: True for recurrent layers that are toys.
    """
    tiny = {
        "pattern": "M*M-",
        "hidden_size": 32,
        "vocab_size": TINY_VOCAB,
        "ssm_chunk_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_state_dim": 8,
        "max_sequence_length": 4096,
        "init_std": 0.3,
    }
    return (ToyHybridConfig if is_toy else RandomHybridConfig)(**(tiny | settings))


def build_model(sizes: RandomHybridConfig) -> Any:
    """Build this rank's shard of the model of these sizes."""
    model = random_hybrid_model(sizes)
    if isinstance(sizes, ToyHybridConfig):
        put_toys(model, sizes)
    return model


@cache
def hybrid(sizes: RandomHybridConfig) -> Hybrid:
    """Return the model of these sizes, built once per session."""
    model = build_model(sizes)
    return Hybrid(sizes, model, HybridOracle.from_megatron(model), model_shape_of(model))


def tiny_hybrid(**settings: Any) -> Hybrid:
    """Return the tiny model with some of its sizes changed."""
    return hybrid(tiny_sizes(**settings))


def block_bytes(sizes: RandomHybridConfig, block_size: int) -> int:
    """Return the bytes of one KV block over all attention layers."""
    head_dim = sizes.hidden_size // sizes.num_attention_heads
    return 2 * sizes.pattern.count("*") * block_size * sizes.num_query_groups * head_dim * sizes.dtype.itemsize


def state_bytes(sizes: RandomHybridConfig, num_drafts: int = 0) -> int:
    """Return the bytes of one state over all recurrent layers, its matrix in fp32, with slots for `num_drafts`."""
    if isinstance(sizes, ToyHybridConfig):
        return toy_state_bytes(sizes, num_drafts)
    of_layer = _layer_state(sizes)
    window_bytes = (of_layer.num_taps - 1 + num_drafts) * of_layer.conv_dim * sizes.dtype.itemsize
    return sizes.pattern.count("M") * (window_bytes + 4 * of_layer.rows * of_layer.lanes)


def quantized_bytes(sizes: RandomHybridConfig) -> int:
    """Return the bytes of one cached state over all recurrent layers, quantized to 8 bits."""
    if isinstance(sizes, ToyHybridConfig):
        return toy_state_bytes(sizes, is_quantized=True)
    of_layer = _layer_state(sizes)
    window_bytes = 4 * (of_layer.num_taps - 1) * of_layer.conv_dim
    return sizes.pattern.count("M") * (window_bytes + of_layer.rows * of_layer.lanes + 4 * of_layer.lanes)


class _LayerState(NamedTuple):
    """The window and the matrices of one layer's state; `lanes` are those of all heads."""

    num_taps: int
    conv_dim: int
    rows: int
    lanes: int


def _layer_state(sizes: RandomHybridConfig) -> _LayerState:
    if sizes.gated_delta is not None:
        delta = sizes.gated_delta
        values, keys = delta.num_value_heads * delta.value_head_dim, delta.num_key_heads * delta.key_head_dim
        return _LayerState(delta.d_conv, 2 * keys + values, delta.key_head_dim, values)
    inner = sizes.mamba_num_heads * sizes.mamba_head_dim
    conv_dim = inner + 2 * sizes.mamba_num_groups * sizes.mamba_state_dim
    return _LayerState(4, conv_dim, sizes.mamba_state_dim, inner)


def cache_config(
    sizes: RandomHybridConfig,
    *,
    kv_blocks: int = 200,
    paused_blocks: int | None = None,
    cached_states: int = 50,
    **settings: Any,
) -> CacheConfig:
    """Return settings with exactly `kv_blocks` usable blocks and memory for `cached_states` cached states.

    Paused requests may keep `paused_blocks` of the blocks; None takes the package's default. Where cached states are
    quantized, drafts have slots next to them.
    """
    small = {
        "block_size_tokens": 2 * sizes.ssm_chunk_size,
        "max_requests": 8,
        "max_tokens": 64,
        "max_sequence_length": 512,
        "draft_states": UsualForm.draft_states if sizes.gated_delta is None else "window",
    } | settings
    num_drafts = 0 if small.get("draft_states") == "replay" else small.get("num_speculative_tokens", 0)
    state, block_gb = state_bytes(sizes, num_drafts), block_bytes(sizes, small["block_size_tokens"]) / GIB
    longest = -(-small["max_sequence_length"] // small["block_size_tokens"])
    num_states = cached_states + small["max_requests"] * (2 + num_drafts)
    paused = (kv_blocks + 1) // 4 if paused_blocks is None else min(paused_blocks, kv_blocks - 1)
    return SplitConfig(
        cache_gb=2 * ((kv_blocks + longest) * block_gb + num_states * state / GIB) + 2**-8,
        num_paused=paused,
        num_blocks=kv_blocks,
        num_states=cached_states,
        **small,
    )


def with_one_budget(config: CacheConfig, shape: HybridModelShape, spare_slabs: int) -> CacheConfig:
    """Return the settings with one memory for KV blocks and states: the minimum, and some slabs more.

    It is enough without drafts as well, which cuts slabs otherwise. Ranks that share the model have the same settings,
    so the least is that of the rank that needs the most.
    """
    no_split: dict[str, Any] = {"num_blocks": None}
    no_drafts = replace(config, num_speculative_tokens=0)
    num_bytes = max(_one_budget_bytes(settings.resolved(), shape, spare_slabs) for settings in (config, no_drafts))
    return replace(config, cache_gb=(num_bytes + 0.5) / GIB, **no_split)


def with_host_tier(config: CacheConfig, shape: HybridModelShape, num_slabs: int) -> CacheConfig:
    """Return settings of one memory with a host tier of `num_slabs` slabs, on each rank, with drafts or without."""
    slab_bytes = 0
    for settings in (config, replace(config, num_speculative_tokens=0)):
        units = ranks_of_process().gather(shape.unit_bytes(settings.resolved()))
        slab_bytes = max(slab_bytes, *(SlabShape.fitting(units).slab_bytes(unit) for unit in units))
    return replace(config, host_cache_gb=(num_slabs * slab_bytes * processes_of_host() + 0.5) / GIB)


def _one_budget_bytes(config: CacheConfig, shape: HybridModelShape, spare_slabs: int) -> int:
    units = ranks_of_process().gather(shape.unit_bytes(config))
    slab = SlabShape.fitting(units)
    longest = -(-config.max_sequence_length // config.block_size_tokens)
    num_slabs = slab.slabs_of_request(longest, config.num_request_slots) + spare_slabs
    other_bytes = max(ranks_of_process().gather(shape.buffers_bytes(config) + shape.running_bytes(config)))
    return max(num_slabs * slab.slab_bytes(unit) + unit.block for unit in units) + other_bytes


def allow_every_cached_form(patch: pytest.MonkeyPatch) -> None:
    """Allow settings to name cached-state formats that are not public."""
    patch.setitem(CacheConfig.RULES, "cached_state_dtype", tuple(CACHED_FORMS))


def greedy(num_tokens: int | None, **settings: Any) -> SamplingParams:
    """Return parameters of a greedy request that ends by length only, unless `settings` override them."""
    return SamplingParams(**{"num_tokens_to_generate": num_tokens, "top_k": 1, "termination_id": -1} | settings)


def add_fields(params: SamplingParams, **fields: Any) -> SamplingParams:
    """Return the parameters after adding fields to the spec that they carry."""
    params.add_attributes({SPEC: getattr(params, SPEC, {}) | fields})
    return params


def some_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random tokens of the tiny model's vocabulary; with equal seeds, a shorter text is a prefix of a longer
    one."""
    rng = random.Random(seed)
    return [rng.randrange(TINY_VOCAB) for _ in range(num_tokens)]


@dataclass(slots=True)
class EngineRun:
    """One engine and the results of its requests; `check_integrity` runs after every step."""

    subject: Hybrid
    engine: MambaCacheEngine
    prompts: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Any] = field(default_factory=dict)  # merged Megatron requests
    num_steps: int = 0

    @classmethod
    def start(cls, subject: Hybrid, config: CacheConfig | None = None, **settings: Any) -> Self:
        """Build an engine for `subject`; None takes `cache_config`'s defaults."""
        return cls(subject, build_engine(subject.model, config or cache_config(subject.sizes), **settings))

    @property
    def context(self) -> Any:
        """The engine's context."""
        return self.engine.context

    @property
    def counters(self) -> Any:
        """Counters of the cache."""
        return self.context.counters

    def add(self, request_id: int, prompt: Sequence[int], sampling: SamplingParams | int = 8, **settings: Any) -> None:
        """Add a request; an int as sampling asks for that many greedy tokens."""
        params = greedy(sampling) if isinstance(sampling, int) else sampling
        self.prompts[request_id] = list(prompt)
        self.engine.add_request(request_id, list(prompt), params, **settings)

    def step(self) -> list[int]:
        """Run one step and return the ids of the requests that it finished or failed."""
        result = self.engine.step_modern()
        self.num_steps += 1
        self.context.check_integrity()
        merged = [record.merge() for record in result["finished_request_records"]]
        self.finished |= {request.request_id: request for request in merged}
        return [request.request_id for request in merged]

    def finish(self) -> None:
        """Run until every request has finished."""
        first = self.num_steps
        while self.engine.requests:
            assert self.num_steps - first < MAX_STEPS, f"no end after {MAX_STEPS} steps: {self.context.snapshot()}"
            self.step()

    def run(self, request_id: int, prompt: Sequence[int], sampling: SamplingParams | int = 8, **settings: Any) -> int:
        """Run one request to its end and return the number of prompt tokens computed meanwhile."""
        before = self.counters.prefill_tokens_computed
        self.add(request_id, prompt, sampling, **settings)
        self.finish()
        return self.counters.prefill_tokens_computed - before

    def tokens(self, request_id: int) -> list[int]:
        """Return the generated tokens of a finished request."""
        return list(self.finished[request_id].generated_tokens)

    def assert_matches_oracle(self, request_ids: Iterable[int] | None = None) -> "OracleTally":
        """Assert that greedy requests, by default all finished ones, generated the oracle's tokens."""
        tally = OracleTally()
        for request_id in self.finished if request_ids is None else request_ids:
            prompt, generated = self.prompts[request_id], self.tokens(request_id)
            grammar = getattr(self.finished[request_id].sampling_params, SPEC, {}).get("grammar", "")
            allowed = allowed_tokens(grammar, generated, self.subject.sizes.vocab_size) if grammar else None
            check = self.subject.oracle.check_greedy(prompt, generated, ORACLE_MARGIN, allowed)
            assert check.first_mismatch is None, (
                f"request {request_id} of {len(prompt)} prompt tokens, {self.engine.cached_tokens(request_id)} of them "
                f"cached, differs from the oracle at generated token {check.first_mismatch}: {generated}"
            )
            tally.add(OracleTally(check.num_compared, check.num_stopped))
        return tally

    def assert_near_oracle(
        self, request_ids: Iterable[int], margin: float, routing_margin: float = 0.0
    ) -> "OracleTally":
        """Assert that the oracle scores each token of greedy requests within `margin` of its best.

        Tokens are left out whose last expert and the next one score less than `routing_margin` apart, half of
        all at most. The tally's stops are tokens that are not the oracle's choice.
        """
        tally, num_tokens = OracleTally(), 0
        for request_id in request_ids:
            prompt, generated = self.prompts[request_id], self.tokens(request_id)
            found = self.subject.oracle.logits_and_gaps([*prompt, *generated])
            logits, gaps = (values[len(prompt) - 1 : -1] for values in found)
            chosen = logits.gather(1, torch.tensor(generated, device=logits.device)[:, None])[:, 0]
            below, is_sure = logits.amax(1) - chosen, gaps >= routing_margin
            assert (below[is_sure] < margin).all(), (
                f"request {request_id} of {len(prompt)} prompt tokens, {self.engine.cached_tokens(request_id)} of them "
                f"cached, chooses tokens by {below.tolist()} worse than the oracle's: {generated}, where experts are "
                f"chosen by {gaps.tolist()}"
            )
            num_tokens += len(generated)
            tally.add(OracleTally(int(is_sure.sum()), int((below[is_sure] > 0).sum())))
        assert tally.num_compared >= num_tokens // 2, f"only {tally.num_compared} of {num_tokens} tokens were compared"
        return tally

    def end_copies(self) -> None:
        """Wait for the copies between tiers, if there are tiers."""
        if isinstance(self.context.cache.tiers, HostTier):
            self.context.cache.tiers.drain()

    def assert_exact(self) -> None:
        """Assert that all tokens are the oracle's and that nothing is held."""
        self.assert_matches_oracle().assert_few_stops()
        self.assert_nothing_held()

    def assert_nothing_held(self) -> None:
        """Assert that an engine without requests holds no live or reserved slot, no pin and no block reference."""
        assert not self.engine.requests and not self.engine.waiting_request_ids and not self.context.running_requests
        self.end_copies()
        self.context.check_integrity()
        snapshot = self.context.snapshot()
        pool, slots = self.context.cache.kv, self.context.cache.slots
        assert snapshot.state_slots["live"] == snapshot.state_slots["reserved"] == snapshot.state_slots["draft"] == 0
        assert snapshot.kv_blocks["in_use"] == 0
        assert pool.num_available == pool.num_blocks
        assert not any(slots.is_pinned(block) for block in range(pool.num_blocks))
        assert slots.num_available == slots.num_slots


@dataclass(slots=True)
class OracleTally:
    """The number of tokens compared with the oracle, and of comparisons stopped by its margin."""

    num_compared: int = 0
    num_stopped: int = 0

    def add(self, other: "OracleTally") -> None:
        """Add another tally."""
        self.num_compared += other.num_compared
        self.num_stopped += other.num_stopped

    def assert_few_stops(self) -> None:
        """Assert that at most one comparison, or one in a thousand tokens, was stopped."""
        assert self.num_stopped <= max(1, MAX_STOPPED_SHARE * self.num_compared), self


def megatron_request(request_id: int, prompt: list[int], params: SamplingParams) -> DynamicInferenceRequest:
    tokens = torch.tensor(prompt, dtype=torch.int64)
    return DynamicInferenceRequest(request_id=request_id, prompt_tokens=tokens, sampling_params=params)
