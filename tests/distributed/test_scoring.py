"""All ranks of a sharded model give prompts the scores of the fp64 reference."""

import pytest

from tests.distributed import scoring_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=["tensor", "pipeline"])
def test_prompt_scores_are_equal_on_all_ranks(layout: Layout, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(scoring_cases.scores, layout, 10 * 96)
    assert first == second and len(first[0]) == len(first[1]) == len(first[2]) == 49
