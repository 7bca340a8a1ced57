"""Settings of a coordinator."""

from typing import Any

import pytest

from megatron_mamba_cache.replicas.settings import RoutingSettings


@pytest.mark.parametrize(
    "setting",
    [
        {"policy": "random"},
        {"load_factor": 0.5},
        {"share_factor": 0.5},
        {"max_keys": 0},
        {"num_attempts": 0},
        {"join_timeout_s": 0},
    ],
)
def test_invalid_routing_setting_is_named_in_the_error(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))} is "):
        RoutingSettings(**setting)
