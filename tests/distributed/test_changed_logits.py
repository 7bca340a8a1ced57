"""Ranks that share a model bar, bias and penalise alike, with drafts and without, as one process does."""

import pytest

from tests.distributed import changed_logits_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=["tensor", "pipeline"])
def test_all_ranks_have_the_tokens_of_one_process(layout: Layout, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(changed_logits_cases.replies, layout)
    (alone,) = worlds.of(1).run(changed_logits_cases.replies, Layout())
    assert first == second == alone
