"""Settings that are derived from the sizes of a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.errors import CacheBudgetError
from megatron_mamba_cache.ranks.agreement import CacheCapacity
from megatron_mamba_cache.ranks.group import OneRank
from megatron_mamba_cache.recurrences.mamba2 import recurrence as mamba2_recurrence
from megatron_mamba_cache.recurrences.mamba2.replay.tiling import replays_fast
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape, RecurrentLayers, kv_heads_of_rank
from megatron_mamba_cache.recurrences.replay import tiling
from megatron_mamba_cache.recurrences.slab_shape import UnitBytes
from tests.published_shapes import DENSE_8B, NANO_30B


def part_of(whole: HybridModelShape, types: Sequence[str]) -> HybridModelShape:
    """Return the shape of one rank's shard, which has these layers."""
    (recurrent,) = whole.recurrent
    layers = RecurrentLayers(recurrent.recurrence, tuple(range(list(types).count("M"))))
    return replace(whole, layer_types=tuple(types), recurrent=(layers,))


@pytest.mark.parametrize(
    ("fields", "is_fast", "replays"),
    [
        ({"max_requests": 64}, True, True),
        ({"max_requests": 3}, True, True),
        ({"max_requests": 2}, True, False),
        ({"max_requests": 1, "num_speculative_tokens": 3}, True, True),
        ({"max_requests": 64}, False, False),
        ({"max_requests": 64, "draft_states": "window"}, True, False),
        ({"max_requests": 1, "draft_states": "replay"}, False, True),
    ],
)
def test_draft_states_are_replayed_when_that_is_faster(
    fields: dict[str, Any], is_fast: bool, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba2_recurrence, "replays_fast", lambda head_dim, d_state: is_fast)
    assert DENSE_8B.resolved(CacheConfig(**fields)).replays == replays


@pytest.mark.parametrize(
    ("fields", "replays"),
    [
        ({"max_requests": 1, "num_speculative_tokens": 4}, False),
        ({"max_requests": 1, "num_speculative_tokens": 5}, True),
        ({"max_requests": 2, "num_speculative_tokens": 2}, False),
        ({"max_requests": 2, "num_speculative_tokens": 4}, True),
        ({"max_requests": 2, "num_speculative_tokens": 4, "ssm_state_dtype": "bf16"}, False),
        ({"max_requests": 3, "num_speculative_tokens": 1}, True),
    ],
)
def test_small_models_with_few_drafts_store_one_state_per_draft(
    fields: dict[str, Any], replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba2_recurrence, "replays_fast", lambda head_dim, d_state: True)
    assert NANO_30B.resolved(CacheConfig(**fields)).replays == replays


@pytest.mark.parametrize("num_drafts", [0, 7])
@pytest.mark.parametrize(("cache_gb", "is_lowered"), [(0.4, True), (10.0, True), (40.0, False)])
def test_max_requests_is_lowered_until_all_replay_rings_fit_in_the_cache(
    cache_gb: float, is_lowered: bool, num_drafts: int
) -> None:
    """A further request would not fit in the cache with its state, its replay ring and one block."""
    fields = {"cache_gb": cache_gb, "draft_states": "replay", "num_speculative_tokens": num_drafts}
    asked = CacheConfig(max_requests=256, max_sequence_length=512, **fields)
    config = DENSE_8B.resolved(asked)
    assert (config.max_requests < 256) is is_lowered
    unit, ring = DENSE_8B.unit_bytes(config), DENSE_8B.request_buffer_bytes(config)
    assert config.max_requests * (unit.state + unit.block + ring) <= cache_gb * 2**30
    assert not is_lowered or (config.max_requests + 1) * (unit.state + unit.block + ring) > cache_gb * 2**30
    for others in ({"draft_states": "window"}, {"cached_state_dtype": "int8"}):
        assert DENSE_8B.resolved(replace(asked, **others)).max_requests == 256


class Stages(OneRank):
    """A pipeline rank that exchanges memory sizes with the other stages.

    Args:
        units: Sizes of a state and a block on each stage.
        least_bytes: Minimum budget of each stage; None: equal to this rank's.
    """

    def __init__(self, units: Sequence[UnitBytes], least_bytes: Sequence[int] | None = None) -> None:
        self._units, self._least_bytes = units, least_bytes

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all stages for `units` or `least_bytes`; other values are equal on all stages."""
        if isinstance(value, UnitBytes):
            return list(self._units)
        if type(value) is int and self._least_bytes is not None:
            return list(self._least_bytes)
        return [value] * len(self._units)


NUM_BUDGETS = 140
STAGES = {
    "8B, 2 and 3 of attention": (DENSE_8B, ["M" * 12 + "**", "M" * 14 + "***"]),
    "Nano, 3 and 1": (NANO_30B, ["M" * 12 + "***", "M" * 11 + "*"]),
    "8B, 3 and 1": (DENSE_8B, ["M" * 12 + "***", "M" * 12 + "*"]),
    "8B, one with neither": (DENSE_8B, ["M" * 12 + "*-", "----"]),
}


@pytest.mark.parametrize("num_drafts", [0, 7])
@pytest.mark.parametrize("length", [4096, 65_536])
@pytest.mark.parametrize("name", STAGES)
def test_uneven_pipeline_stages_accept_any_cache_size_above_the_minimum(
    name: str, length: int, num_drafts: int
) -> None:
    """All ranks use the maximum number of requests that fits on the stage with the least memory."""
    whole, layers = STAGES[name]
    shapes = [part_of(whole, types) for types in layers]
    fields = {"max_sequence_length": length, "num_speculative_tokens": num_drafts, "draft_states": "replay"}
    config = CacheConfig(cache_gb=0.1, max_requests=256, **fields)
    units = [shape.unit_bytes(config.resolved()) for shape in shapes]
    counts = []
    for step in range(NUM_BUDGETS):
        asked = replace(config, cache_gb=0.03 * 1.03**step)
        resolved = [shape.resolved(asked, lambda unit: units) for shape in shapes]
        agreed = replace(resolved[0], max_requests=min(found.max_requests for found in resolved))
        try:
            for shape in shapes:
                CacheCapacity.of(agreed, shape, Stages(units))
            counts.append(agreed.max_requests)
        except CacheBudgetError:
            assert not counts, asked.cache_gb
    print(f"{len(counts)} of {NUM_BUDGETS} budgets, {counts[0]} to {counts[-1]} requests")
    assert 20 < len(counts) < NUM_BUDGETS and counts == sorted(counts) and counts[0] < 8 < counts[-1]


@pytest.mark.parametrize("num_drafts", [0, 7])
@pytest.mark.parametrize("name", STAGES)
def test_minimum_cache_size_in_the_error_message_is_enough_for_all_stages(name: str, num_drafts: int) -> None:
    whole, layers = STAGES[name]
    shapes = [part_of(whole, types) for types in layers]
    asked = CacheConfig(cache_gb=0.001, num_speculative_tokens=num_drafts, draft_states="replay")
    units = [shape.unit_bytes(asked.resolved()) for shape in shapes]

    def least_gb(shape: HybridModelShape, ranks: Stages) -> float:
        with pytest.raises(CacheBudgetError) as refused:
            CacheCapacity.of(shape.resolved(asked, lambda unit: units), shape, ranks)
        return refused.value.least_gb

    found = [least_gb(shape, Stages(units)) for shape in shapes if shape.num_recurrent_layers]
    stages = Stages(units, [round(each * 2**30) for each in found])
    print(name, num_drafts, found)
    assert {least_gb(shape, stages) for shape in shapes if shape.num_recurrent_layers} == {max(found)}
    enough = replace(asked, cache_gb=max(found) * (1 + 1e-9))
    for shape in shapes:
        assert CacheCapacity.of(shape.resolved(enough, lambda unit: units), shape, Stages(units)).num_slabs


def test_fast_replay_kernel_needs_a_hopper_gpu_and_supported_head_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(tiling, "INTERPRETED", False)
    monkeypatch.setattr(tiling, "has_tested_gluon", lambda: True)
    for is_hopper in (True, False):
        monkeypatch.setattr(tiling, "is_hopper", lambda device, found=is_hopper: found)
        assert replays_fast(64, 128) == is_hopper
        assert not replays_fast(60, 100)  # no kernel supports these sizes


@pytest.mark.parametrize(
    ("layer_weights", "fields", "tokens"),
    [
        (0, {}, 4096),  # unknown number of weights
        (200_000_000, {}, 4096),
        (40_000_000, {}, 6144),  # 6,750 rounded down to a multiple of 1,024
        (16_000_000, {}, 8192),
        (16_000_000, {"max_tokens": 6000}, 6000),
        (16_000_000, {"max_tokens": 100_000}, 8192),
        (200_000_000, {"max_tokens": 512}, 4096),
        (16_000_000, {"cuda_graph_prefill_tokens": 0}, 0),
        (200_000_000, {"cuda_graph_prefill_tokens": 8000}, 8000),
    ],
)
def test_prefill_cuda_graphs_cover_launch_bound_prompts(
    layer_weights: int, fields: dict[str, Any], tokens: int
) -> None:
    shape = replace(DENSE_8B, layer_weights=layer_weights)
    assert shape.resolved(CacheConfig(**fields)).most_graph_tokens == tokens


@pytest.mark.parametrize(
    ("num_heads", "num_ranks", "expected"), [(8, 2, 4), (2, 2, 1), (2, 4, 1), (2, 8, 1), (1, 8, 1)]
)
def test_kv_heads_are_sharded_or_replicated_across_ranks(num_heads: int, num_ranks: int, expected: int) -> None:
    assert kv_heads_of_rank(num_heads, num_ranks) == expected


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(2, 3), (3, 2), (4, 6)])
def test_number_of_kv_heads_that_cannot_be_sharded_or_replicated_is_refused(num_heads: int, num_ranks: int) -> None:
    message = (
        f"number of KV heads {num_heads} is not divisible by {num_ranks} tensor-parallel ranks, nor is {num_ranks} a "
        f"multiple of {num_heads}"
    )
    with pytest.raises(ValueError, match=message):
        kv_heads_of_rank(num_heads, num_ranks)
