"""A step that raises anywhere releases its reservations, and its requests generate the same tokens."""

import random
from typing import Any

import pytest

from megatron_mamba_cache.step import runner as runner_module
from tests.mcore.engine_runs import EngineRun, cache_config, tiny_hybrid
from tests.mcore.injected_errors import ERROR_POINTS, InjectedError, raise_once

pytestmark = pytest.mark.usefixtures("either_form")


def start_run(**settings: Any) -> EngineRun:
    """Return an engine with a cached prefix and three waiting requests: a hit, a miss, a prompt of several chunks."""
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes, boundary_stride=1, max_tokens=48, **settings))
    rng = random.Random(0)
    prompt = [rng.randrange(subject.sizes.vocab_size) for _ in range(90)]
    run.run(0, prompt[:40], 2)
    run.add(1, prompt[:50], 6)
    run.add(2, prompt[7:40], 9)
    run.add(3, prompt[:34] + prompt[:60], 7)
    return run


def step_until_error(run: EngineRun) -> None:
    """Run until a step raises the injected error."""
    with pytest.raises(InjectedError):
        run.finish()


def assert_nothing_reserved(run: EngineRun) -> None:
    """Assert that requests, blocks and slots agree and no slot is reserved or pinned."""
    run.context.check_integrity()
    slots = run.context.cache.slots
    assert slots.num_reserved == 0
    assert not any(slots.is_pinned(block) for block in range(run.context.cache.kv.num_blocks))


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("point", ERROR_POINTS)
def test_error_in_any_part_of_a_step_frees_reservations_and_loses_no_token(
    point: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run()
    raise_once(monkeypatch, *ERROR_POINTS[point](run), call=call)
    step_until_error(run)
    assert_nothing_reserved(run)
    assert run.counters.steps_aborted == 1
    run.finish()
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [2, 6, 9, 7]
    run.assert_exact()


@pytest.mark.parametrize("steps_between", [0, 1])
def test_three_failed_steps_lose_no_token(steps_between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    for _ in range(4):
        run.step()
    for _ in range(3):
        with monkeypatch.context() as patch:
            raise_once(patch, runner_module, "verify_step")
            step_until_error(run)
        assert_nothing_reserved(run)
        for _ in range(steps_between):
            run.step()
    run.finish()
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [2, 6, 9, 7]
    run.assert_exact()


def test_failed_step_caches_no_block_or_state(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    before = run.context.snapshot()
    raise_once(monkeypatch, run.subject.model.decoder.layers[2].mixer, "forward")
    step_until_error(run)
    after = run.context.snapshot()
    assert (after.kv_blocks["cached"], after.state_slots) == (before.kv_blocks["cached"], before.state_slots)


def test_requests_of_a_failed_step_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    run.add(4, [1, 2, 3])
    raise_once(monkeypatch, run.context.runner, "publish_prompts")
    step_until_error(run)
    assert list(run.engine.waiting_request_ids) == [1, 2, 3, 4]
