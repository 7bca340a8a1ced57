"""Settings that fill a GPU: they fit its memory, use it, and keep what flags have set."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.command_line import sizing as settings_of_cards
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.serving import expert_width
from megatron_mamba_cache.command_line.sizing import DRAFTER_SHARE, DRAFTER_STATES, Card
from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.errors import CacheBudgetError
from megatron_mamba_cache.models.checkpoints.hugging_face import read_sizes
from megatron_mamba_cache.models.parameter_shapes import parameters_of
from megatron_mamba_cache.models.shard_shape import shard_shape
from megatron_mamba_cache.ranks.agreement import CacheCapacity
from megatron_mamba_cache.ranks.group import OneRank
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens
from megatron_mamba_cache.recurrences.gated_delta.recurrence import GatedDelta
from megatron_mamba_cache.recurrences.gated_delta.tile_systems import TileSystems
from megatron_mamba_cache.recurrences.mamba2 import recurrence as mamba2_recurrence
from megatron_mamba_cache.recurrences.mamba2.recurrence import Mamba2
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape
from megatron_mamba_cache.recurrences.request_tiles import tile_shape
from megatron_mamba_cache.recurrences.slab_shape import SlabShape
from megatron_mamba_cache.step.prefill_metadata import plan_chunks
from megatron_mamba_cache.step.shapes import StepShape
from tests.models.published_configs import QWEN
from tests.published_shapes import DENSE_8B, NANO_30B, shape_of

GIB = 2**30


SMALL = shape_of("M*-", Mamba2(12, 32, 16, 2, d_conv=4, grain=64), num_kv_heads=2, vocab_size=2048)
SHAPES = (DENSE_8B, NANO_30B, SMALL)


def card_settings(shape: HybridModelShape, max_length: int, card: Card, given_fields: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model on one rank."""
    return settings_of_cards.card_settings(shape, max_length, card, given_fields, OneRank())


def bytes_taken(shape: HybridModelShape, config: CacheConfig) -> int:
    """Return the bytes of the memory pools that these settings allocate."""
    config = config.resolved()
    capacity = CacheCapacity.of(config, shape, OneRank())
    other_bytes = shape.buffers_bytes(config) + shape.running_bytes(config)
    unit = shape.unit_bytes(config)
    return capacity.slab.slab_bytes(unit) * capacity.num_slabs + unit.block + other_bytes


@given(
    shape=st.sampled_from(SHAPES),
    free_gib=st.integers(12, 180),
    fraction=st.floats(0.5, 1.0),
    drafts=st.sampled_from((0, 1, 4, 8)),
    stored=st.sampled_from(("live", "int8")),
    keys=st.sampled_from(("auto", "fp8")),
)
def test_kv_and_state_pools_fill_but_fit_the_memory_fraction(
    shape: HybridModelShape, free_gib: int, fraction: float, drafts: int, stored: str, keys: str
) -> None:
    card = Card(free_gib * GIB, fraction, widest_layer=21_504)
    form = {"num_speculative_tokens": drafts, "cached_state_dtype": stored, "kv_cache_dtype": keys}
    settings = card_settings(shape, 131_072, card, form)
    config = CacheConfig(**form, **settings)
    taken = bytes_taken(shape, config)
    assert taken <= fraction * card.free_bytes
    num_live = config.max_tokens + min(config.resolved().most_graph_tokens, config.max_tokens)
    steps = 4 * 21_504 * num_live * 2 + 12 * shape.vocab_size * 256 * (1 + drafts) + 2 * GIB
    allowed = min(fraction * card.free_bytes, card.free_bytes - steps)
    assert taken >= 0.95 * allowed
    assert config.num_cuda_graphs == 9
    assert config.max_sequence_length == 131_072 or taken < 12 * GIB
    assert config.block_size_tokens % shape.grain == 0 and config.block_size_tokens >= 256


def test_8b_model_on_a_139_gib_gpu_runs_256_requests() -> None:
    settings = card_settings(DENSE_8B, 131_072, Card(120 * GIB, 0.9, 21_504), {})
    assert settings["max_requests"] == 256 and settings["max_sequence_length"] == 131_072
    assert settings["cache_gb"] > 100 and "buffer_size_gb" not in settings


@pytest.mark.parametrize(("max_tokens", "more_tokens"), [(8192, 4096), (2048, 0), (6144, 2048), (32_768, 4096)])
def test_models_with_small_layers_reserve_more_memory_for_graphs(max_tokens: int, more_tokens: int) -> None:
    """Their graphs hold up to 8,192 prompt tokens or a whole step; the graphs of other models hold 4,096."""
    card, given = Card(40 * GIB, 1.0, 21_504), {"max_tokens": max_tokens}
    larger, smaller = (
        card_settings(replace(DENSE_8B, layer_weights=weights), 131_072, card, given)["cache_gb"] * GIB
        for weights in (200_000_000, 16_000_000)
    )
    assert larger - smaller == pytest.approx(4 * 21_504 * 2 * more_tokens, rel=1e-6)


def test_small_gpu_runs_fewer_requests_and_still_has_room_for_a_cache() -> None:
    settings = card_settings(DENSE_8B, 131_072, Card(12 * GIB, 0.9, 21_504), {})
    assert 1 <= settings["max_requests"] < 64
    assert settings["cache_gb"] > 0.5 + settings["max_requests"] * 0.1


@pytest.mark.parametrize("num_drafts", range(5))
@pytest.mark.parametrize(("shape", "cache_gb"), [(DENSE_8B, 0.5), (NANO_30B, 0.2), (NANO_30B, 4.0)])
def test_settings_include_the_draft_state_mode_used_for_sizing(
    shape: HybridModelShape, cache_gb: float, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba2_recurrence, "replays_fast", lambda head_dim, d_state: True)
    flags = {"cache_gb": cache_gb, "num_speculative_tokens": num_drafts}
    found = card_settings(shape, 131_072, Card(24 * GIB, 0.9, 21_504), flags)
    config = shape.resolved(CacheConfig(**found | flags))
    print(found["max_requests"], config.draft_states)
    assert config.draft_states == found["draft_states"] == "replay"
    assert CacheCapacity.of(config, shape, OneRank()).num_blocks > 1
    assert "draft_states" not in card_settings(
        shape, 131_072, Card(24 * GIB, 0.9, 21_504), {"num_speculative_tokens": num_drafts, "draft_states": "window"}
    )


@pytest.mark.parametrize("shape", [DENSE_8B, NANO_30B, SMALL])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("free_gib", "memory"),
    [(free_gib, {}) for free_gib in (8, 12, 20, 40, 120)]
    + [(120, {"cache_gb": cache_gb}) for cache_gb in (1.0, 4.0, 20.0)],
)
def test_drafts_do_not_reduce_requests_when_states_are_replayed(
    shape: HybridModelShape, state: str, free_gib: int, memory: dict[str, float]
) -> None:
    """Their pools have a slot for each of them in the same memory."""
    found = []
    for num_drafts in (0, 3, 7):
        form = {"draft_states": "replay", "ssm_state_dtype": state, "num_speculative_tokens": num_drafts}
        sizes = card_settings(shape, 4096, Card(free_gib * GIB, 0.9, 21_504), memory | form)
        config = CacheConfig(**sizes | form).resolved()
        assert config.num_draft_slots == 0
        assert CacheCapacity.of(config, shape, OneRank()).num_slots >= config.max_requests
        found.append(config.max_requests)
    assert len(set(found)) == 1, found


@pytest.mark.parametrize("shape", [DENSE_8B, NANO_30B])
@pytest.mark.parametrize("num_drafts", [0, 7])
@pytest.mark.parametrize(("asked", "length"), [(256, 65_536), (256, 4096), (2, 65_536)])
def test_budget_error_gives_the_smallest_sufficient_budget(
    shape: HybridModelShape, num_drafts: int, asked: int, length: int
) -> None:
    """Every larger budget also suffices, although it admits more requests, which need more replay rings."""
    config = CacheConfig(
        cache_gb=0.02,
        max_requests=asked,
        max_sequence_length=length,
        draft_states="replay",
        num_speculative_tokens=num_drafts,
    )
    with pytest.raises(CacheBudgetError) as refused:
        CacheCapacity.of(shape.resolved(config), shape, OneRank())
    least_gb = refused.value.least_gb
    num_requests = []
    for larger in (1e-9, *(0.0007 * 1.12**step for step in range(60))):
        enough = shape.resolved(replace(config, cache_gb=least_gb * (1 + larger)))
        assert CacheCapacity.of(enough, shape, OneRank()).num_slots >= 1, larger
        num_requests.append(enough.max_requests)
    assert num_requests == sorted(num_requests) and num_requests[-1] > num_requests[0] == 1
    with pytest.raises(CacheBudgetError):
        CacheCapacity.of(shape.resolved(replace(config, cache_gb=0.9999 * least_gb)), shape, OneRank())


def test_one_state_per_draft_reduces_concurrent_requests() -> None:
    given_fields = {"cache_gb": 20.0, "draft_states": "window"}
    alone = card_settings(DENSE_8B, 4096, Card(120 * GIB, 0.9, 21_504), given_fields)
    drafted = card_settings(DENSE_8B, 4096, Card(120 * GIB, 0.9, 21_504), given_fields | {"num_speculative_tokens": 7})
    assert drafted["max_requests"] < alone["max_requests"] / 4


def test_fields_set_by_flags_are_kept() -> None:
    kept = {"block_size_tokens": 512, "max_requests": 7, "max_tokens": 1024, "max_sequence_length": 5000}
    assert kept.items() <= card_settings(DENSE_8B, 131_072, Card(60 * GIB, 0.9, 21_504), kept).items()


@pytest.mark.parametrize("pattern", ["MM--", "**--"])
def test_pipeline_stage_with_one_layer_type_uses_all_memory_for_it(pattern: str) -> None:
    shape, card = shape_of(pattern), Card(100 * GIB, 0.9, 21_504)
    config = CacheConfig(**card_settings(shape, 4096, card, {}))
    assert 0.85 * 90 * GIB <= bytes_taken(shape, config) <= 90 * GIB


@pytest.mark.parametrize("free_gib", [16, 24, 40, 120])
def test_draft_model_fits_on_every_gpu_that_its_model_fits_on(free_gib: int) -> None:
    card = Card(free_gib * GIB, 0.9, 21_504)
    drafts = {"num_speculative_tokens": 2}
    engine = card_settings(DENSE_8B, 131_072, replace(card, share=1 - DRAFTER_SHARE), drafts)
    given_limits = {"max_requests": engine["max_requests"], "max_tokens": engine["max_tokens"]} | DRAFTER_STATES
    drafter = card_settings(SMALL, 4096, replace(card, share=DRAFTER_SHARE), given_limits)
    taken = bytes_taken(DENSE_8B, CacheConfig(**drafts, **engine)) + bytes_taken(
        SMALL, CacheConfig(**DRAFTER_STATES, **drafter)
    )
    assert taken <= 0.9 * card.free_bytes
    assert drafter["max_sequence_length"] == 4096


@pytest.mark.parametrize(("free_gib", "given_fields"), [(3, {}), (10, {"max_requests": 200})])
def test_error_for_a_too_small_gpu_gives_the_remedy(free_gib: int, given_fields: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"leave {free_gib}.0 GiB .*lower --max-running-requests or --max-tokens"):
        card_settings(DENSE_8B, 131_072, Card(free_gib * GIB, 0.9, 21_504), given_fields)


def test_more_requests_increase_step_tokens_and_logits_memory() -> None:
    card = Card(140 * GIB, 1.0, 21_504)
    settings = card_settings(SMALL, 4096, card, {"max_requests": 10_000})
    assert settings["max_tokens"] == 10_000
    wide = replace(SMALL, vocab_size=131_072)
    config = CacheConfig(**card_settings(wide, 4096, card, {"max_requests": 1024}))
    assert bytes_taken(wide, config) <= card.free_bytes - 12 * 131_072 * 1024


@pytest.mark.parametrize(
    ("latent_size", "num_ranks", "expected"), [(None, 1, 6 * (1856 + 2688) // 2), (1024, 2, 6 * (928 + 1024) // 2)]
)
def test_memory_is_reserved_for_expert_gemm_outputs(latent_size: int | None, num_ranks: int, expected: int) -> None:
    config = SimpleNamespace(
        num_moe_experts=128,
        moe_router_topk=6,
        moe_ffn_hidden_size=1856,
        moe_latent_size=latent_size,
        hidden_size=2688,
        tensor_model_parallel_size=num_ranks,
    )
    assert expert_width(config) == expected
    config.num_moe_experts = None
    assert expert_width(config) == 0


def other_scratch_bytes(sizes: GatedDelta, hidden_size: int, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of a Gated DeltaNet layer's live tensors during its scan."""
    heads, keys, values = (
        sizes.num_value_heads,
        sizes.num_key_heads * sizes.key_dim,
        sizes.num_value_heads * sizes.value_dim,
    )
    shape = tile_shape(sizes.grain, torch.bfloat16)
    assert shape is not None
    per_token = {"hidden": 2 * hidden_size, "projected": 2 * (keys + values + heads), "convolved": 2 * keys + values}
    with torch.device("meta"):
        q, v, b = (
            torch.empty(num_tokens, *of_token, dtype=torch.bfloat16)
            for of_token in ((sizes.num_key_heads, sizes.key_dim), (heads, sizes.value_dim), (heads,))
        )
    num_tiles = StepShape(0, 1, num_rows, num_tokens).num_chunks(sizes.grain) * shape.per_chunk
    tiles = TileSystems.empty(DeltaTokens(q, q, v, b, b), shape, num_tiles)
    return 2 * num_tokens * sum(per_token.values()) + tiles.num_bytes + tiles.y.nbytes


@pytest.mark.parametrize("num_requests", [256, 4096])
@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.6-27B", "Qwen3.6-35B-A3B"])
def test_memory_is_reserved_for_scans_of_many_one_token_prompts(name: str, num_requests: int, tmp_path: Path) -> None:
    """A step of one prompt that resumes within a chunk, and of new ones, of one token except for the last."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN[name]))
    shape = shard_shape(*read_sizes(tmp_path), num_tensor_ranks=1)
    given = {"max_tokens": 8192, "max_requests": num_requests}
    found = card_settings(shape, 4096, Card(2000 * GIB, 1.0, 0), given)
    left = (2000 - 2 - found["cache_gb"]) * GIB - 12 * shape.vocab_size * num_requests
    lengths = [64, *[1] * (num_requests - 2), 8192 - 64 - (num_requests - 2)]
    assert len(lengths) == num_requests and sum(lengths) == 8192
    plan = plan_chunks([33, *[0] * (num_requests - 1)], [0, *accumulate(lengths)], shape.grain)
    (sizes,) = (layers.recurrence for layers in shape.recurrent)
    assert isinstance(sizes, GatedDelta)
    tile = tile_shape(sizes.grain, torch.bfloat16)
    assert tile is not None
    v = torch.empty(8192, sizes.num_value_heads, sizes.value_dim, dtype=torch.bfloat16, device="meta")
    tiles = TileSystems.empty(DeltaTokens(v, v, v, v, v), tile, len(plan.chunk_requests) * tile.per_chunk)
    print(f"{tiles.num_bytes / GIB:.2f} of {left / GIB:.2f} GiB")
    assert tiles.num_bytes <= left


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.6-27B", "Qwen3.6-35B-A3B"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_memory_is_reserved_for_gated_delta_scan_buffers(name: str, num_ranks: int, tmp_path: Path) -> None:
    """A step of 256 rows and the largest graphs: but for a twentieth of what is kept for workspaces."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN[name]))
    architecture, dtype = read_sizes(tmp_path)
    shape, experts = shard_shape(architecture, dtype, num_tensor_ranks=num_ranks), architecture.experts
    linears = {
        whole.split.local(torch.empty(whole.shape, device="meta"), 0, num_ranks).shape[0]
        for name, whole in parameters_of(architecture).items()
        if name.startswith("decoder.layers.") and len(whole.shape) == 2 and ".local_experts." not in name
    }
    of_experts = SimpleNamespace(
        num_moe_experts=experts and experts.num_experts,
        moe_router_topk=experts and experts.top_k,
        moe_ffn_hidden_size=experts and experts.hidden_size,
        moe_latent_size=None,
        hidden_size=architecture.hidden_size,
        tensor_model_parallel_size=num_ranks,
    )
    widest = max(*linears, expert_width(of_experts))
    given = {"max_tokens": 8192, "max_requests": 256}
    without, found = (card_settings(shape, 4096, Card(100 * GIB, 1.0, width), given) for width in (0, widest))
    reserved = GIB * (without["cache_gb"] - found["cache_gb"])
    ((sizes,), hidden_size) = ([layers.recurrence for layers in shape.recurrent], architecture.hidden_size)
    assert isinstance(sizes, GatedDelta)
    graph_tokens = shape.resolved(CacheConfig(**given)).most_graph_tokens
    needed = other_scratch_bytes(sizes, hidden_size, 256, 8192) + other_scratch_bytes(
        sizes, hidden_size, 32, graph_tokens
    )
    print(f"{needed / GIB:.2f} of {reserved / GIB:.2f} GiB, graphs of {graph_tokens} tokens")
    assert 0 < needed <= reserved + 2 * GIB / 20


def test_explicit_budget_overrides_the_free_gpu_memory() -> None:
    settings = card_settings(DENSE_8B, 4096, Card(120 * GIB, 0.9, 21_504), {"cache_gb": 20.0})
    assert settings["cache_gb"] == 20.0 and "buffer_size_gb" not in settings
    # Half of it holds live states of 98 MiB and the KV of 2,048 tokens each.
    assert 40 < settings["max_requests"] < 100


@pytest.mark.parametrize("cache_gb", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("stored", ["live", "int8"])
@pytest.mark.parametrize("shape", [DENSE_8B, NANO_30B, shape_of("MM--"), shape_of("**--")])
def test_request_length_is_limited_by_the_budget(shape: HybridModelShape, stored: str, cache_gb: float) -> None:
    """A request that is one block longer is refused."""
    form = {"draft_states": "replay", "cached_state_dtype": stored}
    settings = card_settings(shape, 2**24, Card(120 * GIB, 0.9, 21_504), {"cache_gb": cache_gb} | form)
    config = CacheConfig(**settings | form).resolved()
    assert CacheCapacity.of(config, shape, OneRank()).num_slabs
    longer = replace(config, max_sequence_length=config.max_sequence_length + 1)
    if config.max_sequence_length < 2**24:
        with pytest.raises(ValueError, match="cannot hold one request"):
            CacheCapacity.of(longer, shape, OneRank())


@pytest.mark.parametrize("shape", [DENSE_8B, NANO_30B])
def test_quantized_cache_holds_3_6_times_as_many_states(shape: HybridModelShape) -> None:
    """Live states are not counted, because a full server holds the same number of them in both formats."""
    config = CacheConfig(max_requests=32, max_sequence_length=4096, cache_gb=40.0).resolved()
    for dtype, least in (("fp32", 3.6), ("bf16", 1.85)):
        live = replace(config, ssm_state_dtype=dtype)
        exact = CacheCapacity.of(live, shape, OneRank()).num_slots - config.max_requests
        quantized = CacheCapacity.of(replace(live, cached_state_dtype="int8"), shape, OneRank())
        assert quantized.num_slots >= least * exact


def test_error_for_live_states_beyond_the_budget_gives_the_remedy() -> None:
    config = CacheConfig(cache_gb=2.0, cached_state_dtype="int8", max_sequence_length=256).resolved()
    with pytest.raises(
        ValueError, match=r"live states of max_requests=64 requests: set --cache-gb to .* or max_requests$"
    ):
        CacheCapacity.of(config, DENSE_8B, OneRank())


def test_ranks_with_different_layers_agree_on_request_length() -> None:
    card = Card(10 * GIB, 0.9, 21_504)
    shapes = [shape_of("M" * 12 + "*" * 3 + "-"), shape_of("M" * 12 + "*" + "-"), shape_of("----")]
    config = CacheConfig(block_size_tokens=256).resolved()
    units = [shape.unit_bytes(config) for shape in shapes]
    least = [min(SlabShape.fitting(units).slabs_in(2 * GIB, unit) for unit in units)]

    class Ranks(OneRank):
        def gather(self, value: Any) -> list[Any]:
            return units

        def least(self, values: Any) -> list[int]:
            assert values[0] >= least[0]
            return least

    given = {"cache_gb": 2.0, "draft_states": "window"}  # a GPU's rings would come on top
    lengths = {
        settings_of_cards.card_settings(shape, 2**24, card, given, Ranks())["max_sequence_length"] for shape in shapes
    }
    assert len(lengths) == 1 and lengths.pop() < 2**24


def test_ranks_with_different_layers_agree_on_tokens_per_state_and_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = CacheConfig(cache_gb=2.0, max_sequence_length=4096).resolved()
    units = [shape_of(layers).unit_bytes(config) for layers in ("M" * 12 + "*" * 3, "M" * 12 + "*")]

    class Ranks(OneRank):
        def gather(self, value: Any) -> list[Any]:
            return units if value in units else [value]

    capacity = CacheCapacity.of(config, shape_of("M" * 12 + "*" * 3), Ranks())
    bytes_of_state, bytes_of_block = (sum(getattr(unit, name) for unit in units) for name in ("state", "block"))
    assert capacity.state_len == pytest.approx(256 * bytes_of_state / bytes_of_block)
    assert "stays empty" in caplog.text and "balance the pipeline stages" in caplog.text
    caplog.clear()
    CacheCapacity.of(config, DENSE_8B, OneRank())
    assert not caplog.text
