"""A cancel between steps releases everything at once and affects no other request."""

import random
from collections import defaultdict
from typing import Any

import pytest

from tests.mcore.engine_runs import EngineRun, OracleTally, cache_config, some_tokens, tiny_hybrid
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, make_workload

BLOCK = 16


def start_run(**settings: Any) -> EngineRun:
    """Return an engine over the tiny model with blocks of 16 tokens."""
    subject = tiny_hybrid()
    return EngineRun.start(subject, cache_config(subject.sizes, block_size_tokens=BLOCK, **settings))


def cancel(run: EngineRun, request_id: int) -> None:
    """Cancel a request and assert that nothing of it is left."""
    future = run.engine.requests[request_id].future
    assert run.engine.cancel_request(request_id)
    run.context.check_integrity()
    assert future.cancelled() and request_id not in run.engine.requests
    assert all(request.request_id != request_id for request in run.context.running_requests)
    assert request_id not in run.engine.waiting_request_ids


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
def test_cancelled_request_releases_its_blocks_and_slots_immediately(num_steps: int) -> None:
    run = start_run(max_tokens=24)
    run.add(0, some_tokens(60), 40)
    for _ in range(num_steps):
        run.step()
    cancel(run, 0)
    run.assert_nothing_held()
    assert not run.engine.has_unfinished_requests()
    assert run.run(0, some_tokens(60)) <= 60  # its id is free again
    run.assert_exact()


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_paused_request_continues_after_others_are_cancelled(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(kv_blocks=4, paused_blocks=2, max_sequence_length=64, prefix_caching=False)
    run.add(0, some_tokens(33, seed=0), 14)  # three blocks, in which it stays
    run.add(1, some_tokens(10, seed=1), 20)  # one, and needs a second
    while not any(request.is_paused for request in run.context.running_requests):
        run.step()
    if how == "cancelled":
        cancel(run, 0)
    else:
        raise_once(monkeypatch, run.context.runner, "_sample")
        with pytest.raises(InjectedError):
            run.step()
    assert [(request.request_id, request.is_paused) for request in run.context.running_requests] == [(1, False)]
    run.add(2, some_tokens(5, seed=2), 3)
    run.finish()
    run.assert_exact()


def test_cancelling_a_finished_or_unknown_request_returns_false() -> None:
    run = start_run()
    run.run(0, some_tokens(20))
    assert not run.engine.cancel_request(0) and not run.engine.cancel_request(7)


def test_cached_blocks_of_a_cancelled_request_are_reused_by_the_next_request() -> None:
    run = start_run()
    run.add(0, some_tokens(50), 40)
    run.step()
    cancel(run, 0)
    assert run.run(1, some_tokens(50)) == 50 - 48
    run.assert_exact()


def test_request_continues_when_the_request_computing_its_prefix_is_cancelled() -> None:
    run = start_run(max_tokens=24)
    run.add(0, some_tokens(60), 4)
    run.add(1, some_tokens(60), 4)
    run.step()
    cancel(run, 0)
    run.finish()
    assert len(run.tokens(1)) == 4
    run.assert_exact()


def test_suspended_request_can_be_cancelled() -> None:
    run = start_run()
    for request_id in range(2):
        run.add(request_id, some_tokens(30, seed=request_id), 9)
    run.step()
    run.engine.suspend()
    assert run.engine.cancel_request(0)
    run.engine.resume()
    run.finish()
    assert set(run.finished) == {1} and len(run.tokens(1)) == 9
    run.assert_exact()


def test_refused_request_can_be_cancelled_before_its_report() -> None:
    run = start_run()
    run.add(0, [], 4)
    cancel(run, 0)
    run.step()
    assert not run.finished
    run.assert_nothing_held()


@pytest.mark.parametrize(
    ("name", "num_drafts", "form"),
    [
        pytest.param(
            name, num_drafts, form, marks=() if share and bool(num_drafts) == bool(index % 2) else pytest.mark.long
        )
        for index, name in enumerate(name for name in FLAVOURS if name != "disturbed")
        for num_drafts in (0, 4)
        for form, share in (("dense", True), ("gated delta", index % 4 == 1))
    ],
)
def test_random_cancellations_leak_no_memory_and_change_no_token(name: str, num_drafts: int, form: str) -> None:
    tally, num_cancelled = OracleTally(), 0
    for seed in range(3):
        rng = random.Random(f"cancels {name} {seed} {num_drafts}")
        work = make_workload(FLAVOURS[name], 500 + seed, num_drafts, models=MODEL_FORMS[form])
        vocab = work.subject.sizes.vocab_size
        drafter = NoisyDrafter(defaultdict(list), accuracy=0.5, vocab_size=vocab) if num_drafts else None
        run = EngineRun.start(work.subject, work.config, drafter=drafter)
        pending = [arrival for arrival in work.arrivals if arrival.follows is None]
        for request_id, arrival in enumerate(pending):
            run.add(request_id, list(arrival.prompt), arrival.sampling)
        while run.engine.requests:
            run.step()
            if rng.random() < 0.2 and run.engine.requests:
                cancel(run, rng.choice(sorted(run.engine.requests)))
                num_cancelled += 1
        tally.add(run.assert_matches_oracle())
        run.assert_nothing_held()
    tally.assert_few_stops()
    assert num_cancelled
