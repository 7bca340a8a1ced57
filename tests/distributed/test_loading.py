"""Checkpoints of both formats load into any layout of ranks, and generate what one rank does."""

import pytest

from tests.distributed import loading_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds

ONE, TENSOR, PIPELINE, EXPERT = Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(expert=2)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("nemotron_h-6", [ONE, PIPELINE, TENSOR]),  # output weights are the embeddings
        ("bamba-10", [PIPELINE, ONE]),
        ("granite_moe-4", [ONE, EXPERT, TENSOR, PIPELINE]),
    ],
)
def test_a_checkpoint_generates_the_same_under_every_layout(name: str, layouts: list[Layout], worlds: Worlds) -> None:
    outcomes = worlds.of(2).run(loading_cases.tokens_under_layouts, name, layouts)
    assert outcomes[0] == outcomes[1]
    assert all(tokens == outcomes[0][0] for tokens in outcomes[0])


@pytest.mark.parametrize("name", ["nemotron_h_moe-0", "granite_moe-4", "qwen3_5_moe-3"])
def test_quantized_weights_are_cut_as_they_are_dequantized(name: str, worlds: Worlds) -> None:
    kinds = ["transformers, edge blocks", "modelopt mixed", "compressed-tensors NVFP4"]
    worlds.of(2).run(loading_cases.compare_quantized_weights, name, kinds, [TENSOR, EXPERT])
