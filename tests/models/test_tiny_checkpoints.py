"""The tiny checkpoints cover all settings in which published checkpoints differ."""

import pytest

from tests.models.tiny_checkpoints import (
    CASE_NAMES,
    FAMILIES,
    LARGE_CHUNKS,
    MAMBA_FAMILIES,
    sampled_settings,
    tiny_checkpoint,
)
from tests.models.tiny_qwen import QWEN_OPTIONS

MIN_CASES_PER_MODEL_TYPE = 14
MIN_CASES_PER_QWEN_TYPE = 8


def test_every_model_type_has_many_tiny_checkpoints() -> None:
    types = [tiny_checkpoint(name).config.model_type for name in CASE_NAMES]
    of_mamba = {"nemotron_h", "bamba", "granitemoehybrid"}
    of_qwen = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    assert set(types) == of_mamba | of_qwen | {"qwen3_5", "qwen3_5_moe"}
    assert all(types.count(model_type) >= MIN_CASES_PER_MODEL_TYPE for model_type in of_mamba)
    assert all(types.count(model_type) >= MIN_CASES_PER_QWEN_TYPE for model_type in of_qwen)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_checkpoints_of_a_family_differ_in_every_setting(family: str) -> None:
    cases = sampled_settings(family)
    for setting in cases[0]:
        assert len({str(case[setting]) for case in cases}) > 1, setting
    queries_per_kv_head = {case["attention"][1] // case["attention"][2] for case in cases}
    assert {1, 2, 4} <= queries_per_kv_head
    assert any(case["attention"][2] == 1 for case in cases)
    layers = [case["layers"] for case in cases]
    assert any(order.startswith("*") for order in layers)
    assert any(order.endswith("*") for order in layers)
    assert any("MM" in order or "**" in order or "EE" in order for order in layers)


@pytest.mark.parametrize("family", MAMBA_FAMILIES)
def test_mamba_families_have_tiny_checkpoints_of_every_mixer_size(family: str) -> None:
    cases = sampled_settings(family)
    assert {case["mamba"][0] for case in cases} == {1, 2, 8}
    assert {case["chunk_size"] for case in cases} == {8, 16, 32}
    assert any(case["limit"] != (0.0, float("inf")) for case in cases)


@pytest.mark.parametrize("family", QWEN_OPTIONS)
def test_gated_delta_net_families_have_tiny_checkpoints_of_every_mixer_size(family: str) -> None:
    mixers = [case["delta"] for case in sampled_settings(family)]
    assert any(key_heads < value_heads for key_heads, value_heads, _, _ in mixers)
    assert any(key_dim < value_dim for _, _, key_dim, value_dim in mixers)
    assert any(key_dim > value_dim for _, _, key_dim, value_dim in mixers)
    assert {case["tied"] for case in sampled_settings(family)} == {False, True}


def test_each_family_has_prompts_of_several_large_chunks() -> None:
    for family, cases in LARGE_CHUNKS.items():
        assert list(cases) == [64, 128, 256]
        for size, index in cases.items():
            case = tiny_checkpoint(f"{family}-{index}-chunk{size}")
            config = case.config.to_dict()
            assert config.get("mamba_chunk_size", config.get("chunk_size")) == case.block_size == size
