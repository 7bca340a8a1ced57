"""Conversations with a sharded checkpoint match transformers."""

import pytest

from tests.distributed import conversation_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds

TENSOR, PIPELINE, EXPERT = Layout(tensor=2), Layout(pipeline=2), Layout(expert=2)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_next-4", TENSOR),  # dense layers among those with experts
        ("qwen3_5_whole-1", TENSOR),
        pytest.param("qwen3_5_moe-1", TENSOR, marks=pytest.mark.long),
        ("qwen3_5_moe-1", PIPELINE),
        ("qwen3_5_moe_whole-0", EXPERT),
        pytest.param("qwen3_next-4", Layout(tensor=4), marks=pytest.mark.long),
        pytest.param("qwen3_5-0", Layout(tensor=4), marks=pytest.mark.long),
    ],
)
def test_conversations_on_several_ranks_match_transformers(name: str, layout: Layout, worlds: Worlds) -> None:
    size = layout.tensor * layout.pipeline * layout.expert
    outcomes = worlds.of(size).run(conversation_cases.skipped_tokens, name, layout)
    assert all(skipped == outcomes[0] for skipped in outcomes) and all(count > 0 for count in outcomes[0])
