"""What a model's shape decides about settings."""

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


def test_a_kernel_of_its_own_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(replay_tiling, "INTERPRETED", False)
    monkeypatch.setattr(replay_tiling, "has_tested_gluon", lambda: True)
    for is_hopper in (True, False):
        monkeypatch.setattr(replay_tiling, "is_hopper", lambda device, found=is_hopper: found)
        assert replay_tiling.replays_fast(64, 128) == is_hopper
        assert not replay_tiling.replays_fast(60, 100)  # no tile holds such heads
