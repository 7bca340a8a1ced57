"""Each layer, expert and embedding of a model is on one rank, under its local name."""

from dataclasses import replace

import pytest

from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.models.architecture import GatedDeltaSizes
from megatron_mamba_cache.models.parameter_shapes import parameters_of
from megatron_mamba_cache.models.placement import unstacked_parameters
from megatron_mamba_cache.models.random_hybrid import (
    RandomHybridConfig,
    random_architecture,
    random_hybrid_model,
    random_weights,
)
from megatron_mamba_cache.models.rank_shard import EMBEDDINGS, OUTPUT, RankShard, stage_lengths
from megatron_mamba_cache.models.shard_shape import rank_shape


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "lengths"),
    [(10, 1, [10]), (10, 2, [5, 5]), (5, 2, [3, 2]), (10, 4, [3, 3, 3, 1]), (5, 4, [1, 1, 1, 2]), (2, 2, [1, 1])],
)
def test_pipeline_stages_have_equal_layer_counts_except_the_last(
    num_layers: int, num_stages: int, lengths: list[int]
) -> None:
    assert stage_lengths(num_layers, num_stages) == lengths


@pytest.mark.parametrize("num_layers", range(1, 60))
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_pipeline_stage_has_at_least_one_layer(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        with pytest.raises(ValueError, match="--pipeline-model-parallel-size"):
            stage_lengths(num_layers, num_stages)
        return
    lengths = stage_lengths(num_layers, num_stages)
    assert sum(lengths) == num_layers and min(lengths) >= 1 and len(set(lengths[:-1])) <= 1


def part(
    layers: range, experts: range = range(4), *, first: bool = False, last: bool = False, tied: bool = False
) -> RankShard:
    return RankShard(layers, experts, first, last, tied)


def test_layer_and_expert_numbers_in_local_names_start_at_zero() -> None:
    middle = part(range(3, 6), range(2, 4))
    assert middle.local_name("decoder.layers.4.mixer.D") == "decoder.layers.1.mixer.D"
    assert middle.local_name("decoder.layers.6.mixer.D") is None
    expert = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
    assert middle.local_name(expert.format(3, 3)) == expert.format(0, 1)
    assert middle.local_name(expert.format(3, 1)) is None


@pytest.mark.parametrize(("is_first", "is_last"), [(True, False), (False, True), (False, False), (True, True)])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_on_the_first_and_last_stages(is_first: bool, is_last: bool, tied: bool) -> None:
    here = part(range(2), first=is_first, last=is_last, tied=tied)
    copied = OUTPUT if is_last and tied else None
    assert here.local_name(EMBEDDINGS) == (EMBEDDINGS if is_first else copied)
    for name in ("decoder.final_norm.weight", OUTPUT):
        assert here.local_name(name) == (name if is_last else None)


@pytest.mark.parametrize("pattern", ["M*-", "M*E-M", "-EM*"])
@pytest.mark.parametrize("gated_delta", [None, GatedDeltaSizes(2, 4, 8, 12)], ids=["mamba2", "gated-delta"])
def test_parameter_names_and_order_match_megatron(pattern: str, gated_delta: GatedDeltaSizes | None) -> None:
    shape = RandomHybridConfig(pattern=pattern, gated_delta=gated_delta)
    model, parameters = random_hybrid_model(shape), parameters_of(random_architecture(shape))
    built = [(name, tuple(parameter.shape)) for name, parameter in unstacked_parameters(model).items()]
    assert built == [(name, whole.shape) for name, whole in parameters.items()]
    expected = dict(random_weights(shape))
    assert all((part.cpu() == expected[name]).all() for name, part in unstacked_parameters(model).items())
    built_shape = replace(model_shape_of(model), fingerprint="")
    assert rank_shape(random_architecture(shape), shape.dtype) == built_shape
