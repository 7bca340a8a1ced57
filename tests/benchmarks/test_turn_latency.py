"""The benchmark of later turns with a tiny model: each cache mode reuses what it caches."""

from importlib import import_module
from types import ModuleType

import pytest

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def turn_latency(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("turn_latency")


@pytest.fixture
def serving_engine(turn_latency: ModuleType) -> ModuleType:
    return import_module("loads.serving_engine")


def test_later_turn_reuses_states_of_replies_only_with_the_full_cache(
    turn_latency: ModuleType, serving_engine: ModuleType
) -> None:
    shape = serving_engine.SHAPES["tiny"]
    scale = turn_latency.Scale(turn_latency.History(((70, 4), (70, 130)), 20), 2, batch=3, prompt=80, reply=4, rounds=2)
    model = serving_engine.model_of(shape)
    latency = turn_latency.later_turns(model, shape, turn_latency.made_load(shape, scale))
    skipped = latency.cached_tokens
    assert skipped["no cache"] == 0 < skipped["prompt boundaries"] <= skipped["full"] - 128
    assert skipped["full, no room"] == skipped["full"] and latency.room > 0
    assert all(milliseconds > 0 for milliseconds in latency.first_token_ms.values())
    assert set(latency.times_sooner) == set(turn_latency.REQUIRED)
    cold = turn_latency.cold_throughput(model, shape, scale)
    assert 0 < cold.lowest <= cold.ratio <= cold.highest and set(cold.tokens_per_s) == {"no cache", "full"}
    assert "| no cache | 0 | " in turn_latency.latency_table(latency)
    assert f"{cold.ratio:.3f} of without" in turn_latency.cold_sentence(cold)


def test_turns_of_every_length_reuse_the_whole_history(
    turn_latency: ModuleType, serving_engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_latency, "NUM_TURNS", 2)
    shape = serving_engine.SHAPES["tiny"]
    times = turn_latency.by_new_tokens(serving_engine.model_of(shape), shape, 4 * shape.block_size, (9, 100))
    assert {length: len(ms) for length, ms in times.items()} == {9: 2, 100: 2} and min(times[9]) > 0
    assert "| 100 | " in turn_latency.table_of_lengths(times)


def test_order_of_variants_rotates_from_round_to_round(turn_latency: ModuleType) -> None:
    assert [turn_latency.rotated(["a", "b"], number) for number in (-1, 0, 1)] == [["b", "a"], ["a", "b"], ["b", "a"]]


def test_failed_request_raises_an_error(turn_latency: ModuleType, serving_engine: ModuleType) -> None:
    shape = serving_engine.SHAPES["tiny"]
    model, mode = serving_engine.model_of(shape), serving_engine.MODES["full"]
    with (
        serving_engine.serving_engine(model, shape, mode) as engine,
        pytest.raises(RuntimeError, match="request 7 failed"),
    ):
        turn_latency.run(engine, {7: [1] * (shape.max_length + 1)}, 4)


def test_measured_history_is_long_enough_and_fits_the_maximum_length(
    turn_latency: ModuleType, serving_engine: ModuleType
) -> None:
    for name, scale in turn_latency.SCALES.items():
        shape, history = serving_engine.SHAPES[name], scale.history
        length = sum(map(sum, history.turns)) + shape.block_size + history.new
        limits = turn_latency.LIMITS[name]
        assert length + 2 <= min(shape.max_length, limits["max_tokens"])
        if name != "tiny":
            assert history.turns[-1][1] >= 1000 and sum(map(sum, history.turns)) >= 8000
