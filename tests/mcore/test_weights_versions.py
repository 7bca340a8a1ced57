"""Each generated token has the version of the weights that computed it, whatever overlaps with a change."""

from typing import Any

import pytest

from megatron_mamba_cache.mcore.request_states import VersionStart
from tests.mcore.engine_runs import EngineRun, some_tokens
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.overlapped_runs import RUNS, is_ahead, start, step_until_ahead


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


def num_generated(run: EngineRun, request_id: int) -> int:
    parts = run.engine.requests[request_id].record.requests
    return sum(len(part.generated_tokens) for part in parts)


@pytest.mark.parametrize("num_steps", range(1, 7))
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_tokens_of_a_step_have_the_version_with_which_it_was_launched(num_steps: int, settings: dict[str, Any]) -> None:
    run = start(2, **settings)
    run.add(2, some_tokens(30, seed=2), 1)
    for _ in range(num_steps):
        run.step()
    was_ahead = is_ahead(run)
    run.engine.flush("1")
    run.engine.flush("2")
    if was_ahead:
        run.step()
    first = num_generated(run, 0)
    run.step()
    run.finish()
    run.run(3, some_tokens(20, seed=3))
    expected = (VersionStart("0"), VersionStart("2", first))
    assert run.engine.weights_versions(0) == expected
    assert run.finished[0].sampling_params.weights_versions == expected
    assert run.engine.weights_versions(2) == (VersionStart("0"),)
    assert run.engine.weights_versions(3) == (VersionStart("2"),)


def test_suspend_drops_an_overlapped_step_so_that_its_tokens_have_the_new_version() -> None:
    run = start(2)
    step_until_ahead(run)
    count = num_generated(run, 0)
    run.engine.suspend()
    run.engine.resume("1")
    run.add(2, some_tokens(9), 3)
    run.step()
    (aborted,) = (run.engine.requests[1].future,)
    run.engine.abort([1])
    assert aborted.result()[0].sampling_params.weights_versions[0] == VersionStart("0")
    run.finish()
    assert run.engine.weights_versions(0) == (VersionStart("0"), VersionStart("1", count))
    assert run.engine.weights_versions(2) == (VersionStart("1"),)
