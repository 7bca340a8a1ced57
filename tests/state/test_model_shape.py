"""What a model's shape decides about settings."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.kernels.ssm import replay_tiling
from megatron_mamba_cache.state import model_shape
from tests.command_line.test_card_settings import DENSE_8B


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
def test_states_are_replayed_where_that_is_faster(
    fields: dict[str, Any], is_fast: bool, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_shape, "replays_fast", lambda head_dim, d_state: is_fast)
    assert DENSE_8B.resolved(CacheConfig(**fields)).replays == replays


@pytest.mark.parametrize("num_drafts", [0, 7])
@pytest.mark.parametrize(("cache_gb", "is_lowered"), [(0.4, True), (10.0, True), (40.0, False)])
def test_rings_are_reserved_for_the_requests_that_one_budget_has_room_for(
    cache_gb: float, is_lowered: bool, num_drafts: int
) -> None:
    """As many as have a state, a ring and a block each: one more has no room, and these have."""
    fields = {"cache_gb": cache_gb, "draft_states": "replay", "num_speculative_tokens": num_drafts}
    asked = CacheConfig(max_requests=256, max_sequence_length=512, **fields)
    config = DENSE_8B.resolved(asked)
    assert (config.max_requests < 256) is is_lowered
    unit, ring = DENSE_8B.unit_bytes(config), DENSE_8B.ring_layout(config).ring_bytes
    assert config.max_requests * (unit.state + unit.block + ring) <= cache_gb * 2**30
    assert not is_lowered or (config.max_requests + 1) * (unit.state + unit.block + ring) > cache_gb * 2**30
    for others in ({"draft_states": "window"}, {"cached_state_dtype": "int8"}):
        assert DENSE_8B.resolved(replace(asked, **others)).max_requests == 256
    split = CacheConfig(max_requests=256, draft_states="replay", num_speculative_tokens=num_drafts)
    assert DENSE_8B.resolved(split).max_requests == 256


def test_a_kernel_of_its_own_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(replay_tiling, "INTERPRETED", False)
    monkeypatch.setattr(replay_tiling, "has_tested_gluon", lambda: True)
    for is_hopper in (True, False):
        monkeypatch.setattr(replay_tiling, "is_hopper", lambda device, found=is_hopper: found)
        assert replay_tiling.replays_fast(64, 128) == is_hopper
        assert not replay_tiling.replays_fast(60, 100)  # no tile holds such heads
