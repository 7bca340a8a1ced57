"""Ranks that share a model record the oracle's routes, equal on all ranks."""

import numpy as np
import pytest

from tests.distributed import route_cases
from tests.distributed.rank_models import Layout
from tests.distributed.world import Worlds


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(expert=2)], ids=["tensor", "expert"])
def test_routes_are_equal_on_all_ranks(layout: Layout, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(route_cases.routes, layout)
    assert np.array_equal(first, second) and first.shape == (58, 2, 2)


def test_pipeline_stages_refuse_to_record_routes(worlds: Worlds) -> None:
    for refusal in worlds.of(2).run(route_cases.refusal, Layout(pipeline=2)):
        assert "record_routes is not supported with 2 pipeline stages" in refusal
