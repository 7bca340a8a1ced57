"""Checkpoints of both formats load into any layout of ranks, and generate the same as on one rank."""

import pytest

from tests.distributed import loading_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds

ONE, TENSOR, PIPELINE, EXPERT = Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(expert=2)
TENSOR_OF_4 = Layout(tensor=4)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("nemotron_h-6", [ONE, PIPELINE, TENSOR]),  # output weights are the embeddings
        ("bamba-10", [PIPELINE, ONE]),
        ("granite_moe-4", [ONE, EXPERT, TENSOR, PIPELINE]),
        ("qwen3_5-5", [ONE, TENSOR]),  # one KV head, of which both ranks have a copy
    ],
)
def test_checkpoint_generates_the_same_tokens_under_every_parallel_layout(
    name: str, layouts: list[Layout], worlds: Worlds
) -> None:
    _assert_same_tokens(worlds, 2, name, layouts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_moe-1", "nemotron_h-4"])
def test_four_ranks_have_copies_of_two_kv_heads(name: str, worlds: Worlds) -> None:
    _assert_same_tokens(worlds, 4, name, [ONE, TENSOR_OF_4, TENSOR, TENSOR_OF_4])


@pytest.mark.parametrize(
    ("name", "kind", "layouts"),
    [
        ("nemotron_h_moe-0", None, [ONE, PIPELINE, TENSOR, EXPERT]),
        pytest.param("qwen3_5-0", None, [PIPELINE, TENSOR, ONE], marks=pytest.mark.long),
        pytest.param("nemotron_h_moe-0", "modelopt FP8", [TENSOR, PIPELINE], marks=pytest.mark.long),
    ],
)
def test_drafts_of_a_loaded_head_change_no_token_under_any_layout(
    name: str, kind: str | None, layouts: list[Layout], worlds: Worlds
) -> None:
    first, *others = worlds.of(2).run(loading_cases.drafts_under_layouts, name, kind, layouts)
    assert all(tokens == first for tokens in others)
    assert kind is not None or all(tokens == first[0] for tokens in first)


@pytest.mark.parametrize(
    "kind",
    [
        "transformers, edge blocks",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("modelopt mixed", "compressed-tensors NVFP4")),
    ],
)
def test_quantized_heads_are_split_like_dequantized_ones(kind: str, worlds: Worlds) -> None:
    worlds.of(2).run(loading_cases.compare_quantized_heads, "nemotron_h_moe-0", kind, [TENSOR, EXPERT])


def _assert_same_tokens(worlds: Worlds, num_ranks: int, name: str, layouts: list[Layout]) -> None:
    first, *others = worlds.of(num_ranks).run(loading_cases.tokens_under_layouts, name, layouts)
    assert all(tokens == first for tokens in others)
    assert all(tokens == first[0] for tokens in first)


@pytest.mark.parametrize(
    "name", ["nemotron_h_moe-0", pytest.param("granite_moe-4", marks=pytest.mark.long), "qwen3_5_moe-2"]
)
def test_quantized_weights_are_split_like_dequantized_ones(name: str, worlds: Worlds) -> None:
    kinds = ["transformers, edge blocks", "modelopt mixed", "compressed-tensors NVFP4"]
    worlds.of(2).run(loading_cases.compare_quantized_weights, name, kinds, [TENSOR, EXPERT])


@pytest.mark.parametrize("name", ["nemotron_h-6", "qwen3_5-0"])
def test_hits_change_no_token_of_quantized_prompts_on_tensor_parallel_ranks(name: str, worlds: Worlds) -> None:
    kinds = ["transformers F32", "compressed-tensors FP8 a row", "modelopt FP8"]
    of_ranks = worlds.of(2).run(loading_cases.tokens_with_quantized_prompts, name, kinds, [TENSOR])
    assert of_ranks[0] == of_ranks[1]
    assert all(first == again for first, again in of_ranks[0])
