"""Ranks of a sharded model mask, bias and penalize like one process, with drafts and without."""

import pytest

from tests.distributed import changed_logits_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(tensor=2), id="tensor", marks=pytest.mark.long),
        pytest.param(Layout(pipeline=2), id="pipeline"),
    ],
)
def test_all_ranks_generate_the_same_tokens_as_one_process(layout: Layout, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(changed_logits_cases.replies, layout)
    (alone,) = worlds.of(1).run(changed_logits_cases.replies, Layout())
    assert first == second == alone


@pytest.mark.parametrize(
    ("layout", "num_drafts"),
    [
        pytest.param(Layout(tensor=2), 0, id="tensor"),
        pytest.param(Layout(tensor=2), 2, id="tensor-drafts", marks=pytest.mark.long),
        pytest.param(Layout(pipeline=2), 0, id="pipeline", marks=pytest.mark.long),
        pytest.param(Layout(pipeline=2), 2, id="pipeline-drafts"),
    ],
)
def test_failed_grammar_fails_its_request_on_all_ranks(layout: Layout, num_drafts: int, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(changed_logits_cases.replies_despite_a_failure, layout, num_drafts)
    (alone,) = worlds.of(1).run(changed_logits_cases.replies_despite_a_failure, Layout(), num_drafts)
    assert first == second == alone and "too complex to continue" in alone[1]
