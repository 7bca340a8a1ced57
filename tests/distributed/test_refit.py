"""New weights for a sharded model: all ranks load the same version, and no rank reuses states of old weights."""

import pytest

from tests.distributed import refit_cases
from tests.distributed.rank_models import Layout
from tests.distributed.refit_cases import LENGTHS, PROMPT_LEN
from tests.distributed.world import Worlds

TENSOR, PIPELINE = Layout(tensor=2), Layout(pipeline=2)


@pytest.mark.parametrize(
    ("layout", "resident_pools"),
    [
        pytest.param(TENSOR, False, id="tensor-dropped"),
        pytest.param(TENSOR, True, id="tensor-resident", marks=pytest.mark.long),
        pytest.param(PIPELINE, True, id="pipeline-resident"),
        pytest.param(PIPELINE, False, id="pipeline-dropped", marks=pytest.mark.long),
        pytest.param(Layout(expert=2), False, id="expert-dropped"),
        pytest.param(Layout(expert=2), True, id="expert-resident", marks=pytest.mark.long),
    ],
)
def test_all_ranks_load_new_weights_together(layout: Layout, resident_pools: bool, worlds: Worlds) -> None:
    first, second = worlds.of(2).run(refit_cases.refit, layout, resident_pools)
    assert first == second
    assert first.computed[:2] == (PROMPT_LEN, PROMPT_LEN) and first.computed[2] < PROMPT_LEN
    for before, text, num_tokens in zip(first.before, first.texts, LENGTHS, strict=True):
        assert before and text[: len(before)] == before and len(text) == num_tokens
    assert first.graphs_kept is resident_pools and not first.graphs_of_moved_kept
    assert first.graph_steps


@pytest.mark.parametrize(
    ("layout", "versions", "message"),
    [
        pytest.param(layout, *case, id=f"{name}-{number}", marks=() if number % 2 == at else pytest.mark.long)
        for number, case in enumerate(
            (
                (["12", "13"], "weights_version differs between the ranks of the model: ['12', '13']"),
                ([None, "1"], "weights_version differs between the ranks of the model: ['0', '1']"),
                (["1", 5], "weights_version is 5; it must be a str that can be encoded as UTF-8"),
            )
        )
        for at, (name, layout) in enumerate((("tensor", TENSOR), ("pipeline", PIPELINE)))
    ],
)
def test_ranks_stay_suspended_when_their_weights_versions_differ(
    versions: list[str | None], message: str, layout: Layout, worlds: Worlds
) -> None:
    for errors in worlds.of(2).run(refit_cases.errors_of_versions, layout, versions, layout.tensor > 1):
        assert all(message in error for error in errors)
