"""Properties of the settings: refused values and their errors, and command-line flags."""

import dataclasses
from argparse import ArgumentParser
from typing import Any

import pytest

from megatron_mamba_cache.command_line.cache_flags import add_cache_arguments, config_of
from megatron_mamba_cache.config import CacheConfig

NAN, INFINITE = float("nan"), float("inf")


def parsed(*flags: str, **settings: object) -> CacheConfig:
    parser = ArgumentParser()
    add_cache_arguments(parser)
    return config_of(parser.parse_args(flags), **settings)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("block_size_tokens", 0, "an int from 1 to 2147483647"),
        ("max_requests", 0, "an int from 1 to 1048575"),
        ("max_tokens", -5, "an int from 1 to 2147483647"),
        ("max_prompt_tokens_beside_decode", 0, "None or an int from 1 to max_tokens=8192"),
        ("max_prompt_tokens_beside_decode", True, "an int from 1"),
        ("max_prompt_tokens_beside_decode", 8193, "an int from 1 to max_tokens=8192"),
        ("max_sequence_length", 0, "an int from 1 to 2147483647"),
        ("buffer_size_gb", 0.0, "more than 0"),
        ("buffer_size_gb", NAN, "more than 0"),
        ("buffer_size_gb", INFINITE, "below 1048576"),
        ("prefix_caching_mamba_gb", INFINITE, "below 1048576"),
        ("prefix_caching_mamba_gb", -0.5, "at least 0 and below"),
        ("prefix_caching_mamba_gb", NAN, "at least 0 and below"),
        ("buffer_size_gb", "4", "a number of GiB"),
        ("buffer_size_gb", True, "a number of GiB"),
        ("cache_gb", "4", "a number of GiB"),
        ("cache_gb", 0.0, "more than 0"),
        ("prefix_caching_mamba_gb", "1", "a number of GiB"),
        ("prefix_caching_mamba_gb", False, "a number of GiB"),
        ("boundary_stride", 0, "None, 'all' or an int of at least 1"),
        ("max_tokens", 63, "max_requests=64"),
        ("max_requests", 2**20, "an int from 1 to 1048575"),
        ("max_tokens", 10**12, "an int from 1 to 2147483647"),
        ("max_sequence_length", 10**12, "an int from 1 to 2147483647"),
        (
            "max_sequence_length",
            2**30,
            "max_requests=64 requests of this length need 268435456 KV blocks of 256 tokens; fewer than 268435456",
        ),
        ("prefix_caching", "no", "True or False"),
        ("prefix_caching", None, "True or False"),
        ("align_prefill_chunks", 1, "True or False"),
        ("resident_pools", 1, "True or False"),
        ("weights_version", "\ud800", "a str that can be encoded as UTF-8"),
        ("weights_version", 5, "a str that can be encoded as UTF-8"),
        ("decode_checkpoints", "newest", "one of ('rolling', 'all', 'none')"),
        ("decode_checkpoints", None, "one of ('rolling', 'all', 'none')"),
        ("num_speculative_tokens", -1, "an int from 0 to 8"),
        ("num_speculative_tokens", 9, "an int from 0 to 8"),
        ("num_speculative_tokens", 2.0, "an int from 0 to 8"),
        ("num_speculative_tokens", True, "an int from 0 to 8"),
        ("num_speculative_tokens", None, "an int from 0 to 8"),
        ("eviction", "fifo", "one of ('cost', 'lru')"),
        (
            "attention_backend",
            "xformers",
            "one of ('auto', 'flash-attn', 'flashinfer', 'torch-varlen', 'triton', 'reference')",
        ),
        ("ssm_state_dtype", "fp8", "one of ('model', 'fp32', 'bf16', 'fp16')"),
        ("conv_state_dtype", "float32", "one of ('model', 'fp32', 'bf16')"),
        ("cached_state_dtype", "fp8", "one of ('live', 'int8')"),
        ("cached_state_dtype", None, "one of ('live', 'int8')"),
        ("kv_cache_dtype", "fp8_e5m2", "one of ('auto', 'fp8')"),
    ],
)
def test_error_names_the_invalid_setting_its_value_and_the_allowed_values(
    name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError) as error:
        CacheConfig(**{name: value})  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith(f"{name} is {value!r}")
    assert allowed in message


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size_tokens": 1},
        {"boundary_stride": 1},
        {"max_requests": 1, "max_tokens": 1, "max_sequence_length": 1},
        {"max_tokens": 2**31 - 1},
        {"max_requests": 2**20 - 1, "max_tokens": 2**20 - 1},
        {"max_sequence_length": 2**30 - 256},
        {"max_requests": 1, "max_sequence_length": 2**31 - 1},
        {"decode_checkpoints": "all"},
        {"decode_checkpoints": "none"},
        {"num_speculative_tokens": 8},
        {"num_speculative_tokens": 0, "block_size_tokens": 1},
        {"num_speculative_tokens": 4, "block_size_tokens": 5},
        {"attention_backend": "reference"},
        {"eviction": "lru"},
        {"ssm_state_dtype": "bf16", "conv_state_dtype": "fp32"},
        {"ssm_state_dtype": "bf16", "cached_state_dtype": "int8"},
        {"prefix_caching": False, "cached_state_dtype": "int8"},
    ],
)
def test_settings_at_their_limits_are_accepted(settings: dict[str, object]) -> None:
    config = CacheConfig(**settings)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_num_speculative_tokens_must_be_less_than_the_block_size(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"num_speculative_tokens is 8.*below block_size_tokens={block_size}$"):
        CacheConfig(num_speculative_tokens=8, block_size_tokens=block_size)


def test_states_are_quantized_only_with_prefix_caching() -> None:
    config = CacheConfig(cached_state_dtype="int8", num_speculative_tokens=3, max_requests=5)
    window, replay = config.resolved(), dataclasses.replace(config, draft_states="replay").resolved()
    assert window.quantizes_states and replay.quantizes_states
    assert (window.num_running_slots, replay.num_running_slots) == (20, 5)
    assert (window.num_request_slots, CacheConfig(num_speculative_tokens=3).resolved().num_request_slots) == (1, 5)
    assert not dataclasses.replace(config, prefix_caching=False).quantizes_states
    assert not CacheConfig().quantizes_states


@pytest.mark.parametrize(
    ("name", "replacement"),
    [("ring_len", "block_size_tokens"), ("chunked_prefill", "max_tokens"), ("paused_buffer_size_gb", "a quarter")],
)
def test_removed_setting_names_its_replacement(name: str, replacement: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is no longer a setting: .*{replacement}"):
        CacheConfig(**{name: 1})  # type: ignore[arg-type]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().max_requests = 5  # type: ignore[misc]


def test_changed_copy_of_the_settings_is_validated() -> None:
    with pytest.raises(ValueError, match="buffer_size_gb is -1"):
        dataclasses.replace(CacheConfig(), buffer_size_gb=-1.0)


def test_settings_without_flags_are_the_defaults() -> None:
    assert parsed() == CacheConfig()


def test_each_flag_sets_the_setting_that_it_names() -> None:
    config = parsed(
        "--inference-dynamic-batching-block-size=64",
        "--inference-dynamic-batching-buffer-size-gb=0.5",
        "--inference-dynamic-batching-prefix-caching-mamba-gb=0.25",
        "--num-speculative-tokens=3",
        "--attention-backend=reference",
        "--inference-dynamic-batching-prefix-caching-eviction-policy=lru",
        "--no-prefix-caching",
    )
    assert config == CacheConfig(
        block_size_tokens=64,
        buffer_size_gb=0.5,
        prefix_caching_mamba_gb=0.25,
        num_speculative_tokens=3,
        attention_backend="reference",
        eviction="lru",
        prefix_caching=False,
    )


def test_given_settings_are_the_defaults_for_flags() -> None:
    config = parsed("--inference-dynamic-batching-block-size=64", max_requests=3, buffer_size_gb=2.0)
    assert config == CacheConfig(block_size_tokens=64, max_requests=3, buffer_size_gb=2.0)


def test_flag_overrides_a_setting() -> None:
    assert parsed("--inference-dynamic-batching-block-size=64", block_size_tokens=128).block_size_tokens == 64
    assert not parsed("--no-prefix-caching", prefix_caching=True).prefix_caching


def test_flag_with_value_zero_overrides_the_default() -> None:
    assert parsed("--inference-dynamic-batching-prefix-caching-mamba-gb=0").cache_gb == 4.0
    assert parsed("--num-speculative-tokens=0", num_speculative_tokens=4).num_speculative_tokens == 0


def test_flags_are_validated_like_settings() -> None:
    with pytest.raises(ValueError, match="block_size_tokens is 0"):
        parsed("--inference-dynamic-batching-block-size=0")


@pytest.mark.parametrize("name", ["buffer_size_gb", "prefix_caching_mamba_gb"])
def test_cache_gb_and_megatrons_two_sizes_are_mutually_exclusive(name: str) -> None:
    with pytest.raises(ValueError, match=f"cache_gb is 2.0 and {name} is 1.0, but cache_gb already includes"):
        CacheConfig(cache_gb=2.0, **{name: 1.0})  # type: ignore[arg-type]


def test_megatrons_two_sizes_add_up_to_cache_gb() -> None:
    assert CacheConfig() == CacheConfig(cache_gb=5.0)
    assert parsed("--kv-gb=2") == CacheConfig(cache_gb=3.0) and parsed("--state-gb=0") == CacheConfig(cache_gb=4.0)
    assert parsed("--kv-gb=2", "--state-gb=1.5") == parsed("--cache-gb=3.5", cache_gb=7.0)
    assert parsed("--state-gb=2", cache_gb=7.0).cache_gb == 6.0


def test_cache_gb_flag_replaces_the_default() -> None:
    config = parsed("--cache-gb=2", buffer_size_gb=1.0, prefix_caching_mamba_gb=1.0)
    assert (config.cache_gb, config.buffer_size_gb, config.prefix_caching_mamba_gb) == (2.0, None, None)
    with pytest.raises(ValueError, match="leave buffer_size_gb out"):
        parsed("--cache-gb=2", "--kv-gb=1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_states": "ring"}, "draft_states is 'ring'"),
        ({"draft_states": "replay", "block_size_tokens": 6}, "not a multiple of 4: set --block-size"),
    ],
)
def test_unusable_draft_states_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**settings)


@pytest.mark.parametrize(("block", "fold_len"), [(256, 16), (16, 16), (24, 8), (4, 4)])
def test_fold_length_is_the_largest_that_divides_the_block_size(block: int, fold_len: int) -> None:
    config = CacheConfig(block_size_tokens=block, draft_states="replay", num_speculative_tokens=3).resolved()
    assert (config.fold_len, config.replays, config.num_draft_slots) == (fold_len, True, 0)
    either = dataclasses.replace(config, draft_states="auto")
    window = either.resolved()
    assert (window.fold_len, window.replays, window.num_draft_slots) == (0, False, 3)
    assert either.resolved(prefers_replay=True) == config


def test_explicit_draft_states_setting_overrides_the_models_preference() -> None:
    assert not CacheConfig(draft_states="window").resolved(prefers_replay=True).replays
    assert CacheConfig(draft_states="replay").resolved(prefers_replay=False).replays
    odd = CacheConfig(block_size_tokens=6, cuda_graph_prefill_tokens=0)
    assert not odd.resolved(prefers_replay=True).replays  # no ring divides the block


def test_draft_states_setting_has_a_flag() -> None:
    assert parsed("--draft-states", "replay").draft_states == "replay"
