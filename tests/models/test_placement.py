"""Tensor-parallel ranks together hold every checkpoint tensor once, each shard on the rank that Megatron expects."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_mamba_cache.models.architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    GatedDeltaSizes,
    HybridArchitecture,
    MambaSizes,
)
from megatron_mamba_cache.models.checkpoints.stored_names import StoredTensors
from megatron_mamba_cache.models.families import bamba, granite_hybrid, nemotron_h, qwen3_5, qwen3_next
from megatron_mamba_cache.models.placement import GroupedSplit, ModelFiller, Placement, Placements, Split, stored_shape

HIDDEN, HEAD_DIM, FEED_FORWARD = 8, 3, 12
MAMBA = MambaSizes(num_heads=8, head_dim=2, state_dim=3, num_groups=4, ssm_chunk_size=8)
INNER, BC = 16, 12
DELTA = GatedDeltaSizes(num_key_heads=4, num_value_heads=8, key_head_dim=3, value_head_dim=5)
DELTA_ROWS = {"q": 12, "k": 12, "v": 40, "z": 40, "b": 8, "a": 8}
SIZES = [1, 2, 4]
MIXER, ATTENTION = "decoder.layers.0.mixer.", "decoder.layers.2.self_attention."


def architecture(pattern: str, num_kv_heads: int = 4, gated: bool = True, experts: bool = False) -> HybridArchitecture:
    return HybridArchitecture(
        pattern=pattern,
        vocab_size=20,
        hidden_size=HIDDEN,
        max_sequence_length=64,
        norm_eps=1e-5,
        recurrent=MAMBA,
        attention=AttentionSizes(num_heads=8, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM),
        feed_forward=FeedForwardSizes(FEED_FORWARD, "silu", gated),
        experts=ExpertsSizes(3, 2, FEED_FORWARD, FEED_FORWARD, "softmax") if experts else None,
    )


def model_with(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Return a module with parameters of these dotted names, filled with NaN."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.full(shape, torch.nan)))
    return root


def filled_ranks(
    placements: Placements, tensors: Mapping[str, Tensor], local_shape: tuple[int, ...], size: int
) -> list[Tensor]:
    """Return the one parameter that all of these tensors fill, on each rank."""
    (target,) = {placed.target for name in tensors for placed in placements[name]}
    wanted = {name: placements[name] for name in tensors}
    parts = []
    for rank in range(size):
        model = model_with({target: local_shape})
        filler = ModelFiller(model, wanted, rank, size)
        assert filler.unfilled() == [target]
        for name, tensor in tensors.items():
            filler.fill(name, tensor)
        assert not filler.unfilled()
        parts.append(model.get_parameter(target).detach())
    return parts


def joined(parts: list[Tensor], sections: tuple[int, ...], dim: int = 0) -> Tensor:
    """Join the ranks' shards, section by section."""
    local = [part.split([section // len(parts) for section in sections], dim) for part in parts]
    return torch.cat([rank_shard for section in zip(*local, strict=True) for rank_shard in section], dim)


@given(
    sections=st.lists(st.integers(1, 5).map(lambda quarter: 4 * quarter), min_size=1, max_size=5).map(tuple),
    dim=st.sampled_from([0, 1]),
    size=st.sampled_from(SIZES),
)
def test_shards_from_all_ranks_concatenate_to_the_tensor(sections: tuple[int, ...], dim: int, size: int) -> None:
    shape = (sum(sections), 3) if dim == 0 else (3, sum(sections))
    tensor = torch.arange(3 * sum(sections)).view(shape)
    parts = [Split(dim, sections).local(tensor, rank, size) for rank in range(size)]
    assert {part.shape[dim] for part in parts} == {sum(sections) // size}
    assert joined(parts, sections, dim).equal(tensor)


@pytest.mark.parametrize("size", SIZES)
def test_unsplit_tensor_is_whole_on_every_rank(size: int) -> None:
    tensor = torch.arange(7)
    assert all(Split().local(tensor, rank, size).equal(tensor) for rank in range(size))


@pytest.mark.parametrize(("sections", "size"), [((), 4), ((4, 2), 4), ((3, 3), 2), ((8, 1), 2)])
def test_section_not_divisible_by_the_ranks_is_refused(sections: tuple[int, ...], size: int) -> None:
    tensor = torch.zeros(sum(sections) or 6)
    with pytest.raises(ValueError, match=rf"sections of lengths .* are not divisible by {size} ranks"):
        Split(0, sections).local(tensor, 0, size)


@pytest.mark.parametrize(("num_groups", "rows", "size"), [(2, 12, 3), (2, 5, 4), (3, 9, 2)])
def test_number_of_ranks_must_divide_the_kv_heads_or_be_a_multiple_of_them(
    num_groups: int, rows: int, size: int
) -> None:
    with pytest.raises(ValueError, match=f"are not divisible by {size} ranks"):
        GroupedSplit(num_groups).local(torch.zeros(rows, 1), 0, size)


def test_error_for_sections_of_wrong_length_names_the_tensor() -> None:
    filler = ModelFiller(model_with({"weight": (4,)}), {"given": (Placement("weight", Split(0, (4, 4))),)}, 0, 2)
    with pytest.raises(ValueError, match=r"tensor given of shape \(9,\) cannot be split: .* of its sections \[4, 4\]"):
        filler.fill("given", torch.zeros(9))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "sections", "trailing"),
    [
        ("in_proj.weight", (INNER, INNER, BC, BC, MAMBA.num_heads), (HIDDEN,)),  # z, x, B, C, dt
        ("conv1d.weight", (INNER, BC, BC), (1, 4)),
        ("conv1d.bias", (INNER, BC, BC), ()),
        ("norm.weight", (INNER,), ()),
        ("A_log", (MAMBA.num_heads,), ()),
    ],
)
def test_each_section_of_a_mamba_tensor_is_split_separately(
    name: str, sections: tuple[int, ...], trailing: tuple[int, ...], size: int
) -> None:
    tensor = torch.rand(sum(sections), *trailing)
    placements = nemotron_h.placements_of(architecture("M*"))
    local_shape = (sum(sections) // size, *trailing)
    parts = filled_ranks(placements, {f"backbone.layers.0.mixer.{name}": tensor}, local_shape, size)
    assert joined(parts, sections).equal(tensor)


@pytest.mark.parametrize("size", SIZES)
def test_output_projection_is_split_along_its_input_dimension(size: int) -> None:
    tensor = torch.rand(HIDDEN, INNER)
    placements = nemotron_h.placements_of(architecture("M*"))
    parts = filled_ranks(placements, {"backbone.layers.0.mixer.out_proj.weight": tensor}, (HIDDEN, INNER // size), size)
    assert torch.cat(parts, 1).equal(tensor)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_each_rank_has_the_query_heads_of_its_kv_heads(num_kv_heads: int, size: int) -> None:
    """With more ranks than KV heads, several ranks have copies of the same KV head."""
    num_groups = max(num_kv_heads, size)
    heads = {"q": 8, "k": num_kv_heads, "v": num_kv_heads}
    tensors = {name: torch.rand(count * HEAD_DIM, HIDDEN) for name, count in heads.items()}
    placements = nemotron_h.placements_of(architecture("M*", num_kv_heads))
    named = {f"backbone.layers.1.mixer.{name}_proj.weight": tensor for name, tensor in tensors.items()}
    parts = filled_ranks(placements, named, ((8 + 2 * num_groups) * HEAD_DIM // size, HIDDEN), size)
    by_head = {name: tensor.view(-1, HEAD_DIM, HIDDEN) for name, tensor in tensors.items()}
    for name in "kv":
        by_head[name] = by_head[name].repeat_interleave(num_groups // num_kv_heads, 0)
    per_group = 8 // num_groups
    groups = [
        torch.cat([by_head["q"][per_group * group :][:per_group], by_head["k"][group, None], by_head["v"][group, None]])
        for group in range(num_groups)
    ]
    assert torch.cat(parts).equal(torch.cat(groups).flatten(0, 1))


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_has_both_halves_of_a_gated_projection(size: int) -> None:
    gate, up = torch.rand(2, FEED_FORWARD, HIDDEN)
    mlp, local_shape = "model.layers.0.feed_forward.", (2 * FEED_FORWARD // size, HIDDEN)
    named = {f"{mlp}gate_proj.weight": gate, f"{mlp}up_proj.weight": up}
    parts = filled_ranks(bamba.placements_of(architecture("M-*-")), named, local_shape, size)
    assert joined(parts, (FEED_FORWARD, FEED_FORWARD)).equal(torch.cat([gate, up]))


@pytest.mark.parametrize("size", SIZES)
def test_each_stacked_expert_is_split_like_a_gated_projection(size: int) -> None:
    stacked = torch.rand(3, 2 * FEED_FORWARD, HIDDEN)
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    expert_placements = granite_hybrid.placements_of(architecture("ME*E", experts=True))[name]
    models = []
    for rank in range(size):
        models.append(model_with({placed.target: (2 * FEED_FORWARD // size, HIDDEN) for placed in expert_placements}))
        ModelFiller(models[-1], {name: expert_placements}, rank, size).fill(name, stacked)
    for placed, expert in zip(expert_placements, stacked, strict=True):
        parts = [model.get_parameter(placed.target).detach() for model in models]
        assert joined(parts, (FEED_FORWARD, FEED_FORWARD)).equal(expert)


def qwen(experts: bool = False, num_kv_heads: int = 4) -> HybridArchitecture:
    """Return an architecture of Gated DeltaNet and gated attention."""
    plain = architecture("ME*E" if experts else "M-*-", num_kv_heads, experts=experts)
    attention = replace(plain.attention, has_output_gate=True, has_head_norms=True)
    return replace(plain, recurrent=DELTA, attention=attention)


def delta_parts(family: ModuleType) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a mixer's first projections as a family stores them, and the rows of q, k, v, z, b and a."""
    parts = {name: torch.rand(rows, HIDDEN) for name, rows in DELTA_ROWS.items()}
    if family is qwen3_5:
        stored = {"qkv": torch.cat([parts["q"], parts["k"], parts["v"]]), **{name: parts[name] for name in "zba"}}
    else:
        heads = {name: part.view(DELTA.num_key_heads, -1, HIDDEN) for name, part in parts.items()}
        stored = {names: torch.cat([heads[name] for name in names], 1).flatten(0, 1) for names in ("qkvz", "ba")}
    return {f"model.layers.0.linear_attn.in_proj_{name}.weight": tensor for name, tensor in stored.items()}, parts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", [qwen3_next, qwen3_5])
def test_each_rank_gets_its_heads_from_every_gated_delta_section(family: ModuleType, size: int) -> None:
    placements, (stored, parts) = family.placements_of(qwen()), delta_parts(family)
    assert {name for name in placements if "in_proj" in name} == stored.keys()
    rows = sum(DELTA_ROWS.values())
    local = filled_ranks(placements, stored, (rows // size, HIDDEN), size)
    assert joined(local, tuple(DELTA_ROWS.values())).equal(torch.cat(list(parts.values())))
    shapes = {"decoder.layers.0.mixer.in_proj.weight": (rows, HIDDEN)}
    assert {name: stored_shape(placements[name], shapes) for name in stored} == {
        name: tensor.shape for name, tensor in stored.items()
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_output_gates_of_a_kv_head_follow_its_queries(num_kv_heads: int, size: int) -> None:
    attention, num_groups = "model.layers.1.self_attn.", max(num_kv_heads, size)
    heads = {"q": 16, "k": num_kv_heads, "v": num_kv_heads}
    tensors = {name: torch.rand(count * HEAD_DIM, HIDDEN) for name, count in heads.items()}
    named = {f"{attention}{name}_proj.weight": tensor for name, tensor in tensors.items()}
    placements = qwen3_5.placements_of(qwen(num_kv_heads=num_kv_heads))
    local = filled_ranks(placements, named, ((16 + 2 * num_groups) * HEAD_DIM // size, HIDDEN), size)
    query, gate = tensors["q"].view(num_groups, -1, 2, HEAD_DIM, HIDDEN).unbind(2)  # [group, head, channel, hidden]
    key, value = (
        tensors[name].view(num_kv_heads, 1, HEAD_DIM, HIDDEN).repeat_interleave(num_groups // num_kv_heads, 0)
        for name in "kv"
    )
    assert torch.cat(local).equal(torch.cat([query, gate, key, value], 1).flatten(0, 2))


@pytest.mark.parametrize("size", SIZES)
def test_stacked_expert_projections_are_split_like_separate_ones(size: int) -> None:
    stacked, single = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.2.up_proj.weight"
    usual = qwen3_next.placements_of(qwen(experts=True))
    tensor = torch.rand(3, 2 * FEED_FORWARD, HIDDEN)
    names = {stacked, *(name for name in usual if "gate_proj" not in name and "up_proj" not in name)}
    names |= {name for name in usual if "shared_expert." in name or ".layers.1." in name}
    expert_placements = StoredTensors.find(usual, names, qwen3_next.OTHER_NAMES, Path()).placements[stacked]
    shapes = {placed.target: (2 * FEED_FORWARD, HIDDEN) for placed in expert_placements}
    assert stored_shape(expert_placements, shapes) == tensor.shape and usual[single][0].target in shapes
    models = [model_with({target: (2 * FEED_FORWARD // size, HIDDEN) for target in shapes}) for _ in range(size)]
    for rank, model in enumerate(models):
        ModelFiller(model, {stacked: expert_placements}, rank, size).fill(stacked, tensor)
    for target, expert in zip(shapes, tensor, strict=True):
        parts = [model.get_parameter(target).detach() for model in models]
        assert joined(parts, (FEED_FORWARD, FEED_FORWARD)).equal(expert)
