"""Steps overlap across the ends of KV blocks: blocks and slots are ready in time, and published as usual."""

from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.metrics import CacheCounters
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.step import step_graph
from megatron_mamba_cache.step.decode_steps import DecodeStep
from tests.mcore.engine_runs import EngineRun, add_fields, greedy, some_tokens
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.launch_records import rehearse_engine
from tests.mcore.overlapped_runs import assert_nothing_is_copied_for, is_ahead, recapture, start

pytestmark = pytest.mark.usefixtures("either_form")

BLOCK = 16
PUBLISHED = ("states_published", "decode_states_published", "prompt_tokens_skipped", "prefill_tokens_computed")


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


def finish(run: EngineRun) -> tuple[int, int]:
    """Run all requests to their end; return the number of steps, and of overlapped ones."""
    num_steps = num_ahead = 0
    while run.engine.has_unfinished_requests():
        num_ahead += is_ahead(run)
        num_steps += 1
        run.step()
    return num_steps, num_ahead


def published(counters: CacheCounters) -> dict[str, int]:
    return {name: getattr(counters, name) for name in PUBLISHED}


@pytest.mark.parametrize("settings", [{}, {"decode_checkpoints": "all"}, {"decode_checkpoints": "none"}], ids=str)
def test_states_cached_by_overlapped_steps_are_reused_by_the_next_turn(settings: dict[str, Any]) -> None:
    runs = [start(3, 60, run_ahead=run_ahead, **settings) for run_ahead in (True, False)]
    (num_steps, num_ahead), (_, none) = map(finish, runs)
    assert num_ahead >= num_steps - 3 and not none
    for run in runs:
        for request_id in range(3):
            next_turn = [*run.prompts[request_id], *run.tokens(request_id), *some_tokens(5)]
            run.run(10 + request_id, next_turn, 20)
        run.assert_exact()
    ahead, plain = runs
    assert published(ahead.counters) == published(plain.counters)
    assert [ahead.engine.cached_tokens(10 + number) for number in range(3)] == [
        plain.engine.cached_tokens(10 + number) for number in range(3)
    ]
    if settings.get("decode_checkpoints") != "none":
        assert ahead.engine.cached_tokens(10) > 3 * BLOCK


def test_requests_that_generate_the_same_text_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request's own block becomes free while a running step still reads it."""
    run = start(1, 60)
    reported: list[bool] = []
    send_next = step_graph.send_next

    def noted(*arguments: Any) -> DecodeStep:
        sent = send_next(*arguments)
        reported.append(sent.has_new_blocks)
        return sent

    monkeypatch.setattr(step_graph, "send_next", noted)
    for request_id in range(1, 4):  # of less than a block, so that none waits for another's
        run.add(request_id, some_tokens(14, seed=9), 60)
    shared = 0
    while run.engine.has_unfinished_requests():
        run.step()
        if is_ahead(run):
            alike = [request.block_ids for request in run.context.running_requests if request.request_id]
            shared = max(shared, sum(map(len, alike)) - len(set().union(*alike)))
    print(f"{shared} references to blocks of other requests, {sum(reported)} of {len(reported)} steps with new blocks")
    assert shared >= 2 * 4
    assert run.tokens(1) == run.tokens(2) == run.tokens(3)
    assert 3 < sum(reported) < len(reported) // 2
    run.assert_exact()


def test_steps_do_not_overlap_when_the_next_kv_block_is_missing() -> None:
    """Three requests need 15 blocks of 12: some wait, and each reply is complete all the same."""
    run = start(3, 60, kv_blocks=12)
    num_steps, num_ahead = finish(run)
    counters = run.counters
    print({name: getattr(counters, name) for name in ("requests_paused", "requests_evicted")}, num_steps, num_ahead)
    assert counters.requests_paused + counters.requests_evicted and num_ahead
    run.assert_exact()


@pytest.mark.parametrize("limit", [{"max_requests": 3}, {"kv_blocks": 12}], ids=["a request", "memory"])
def test_steps_overlap_at_block_boundaries_while_a_request_waits(limit: dict[str, int]) -> None:
    """A state published there might free room for a waiting request, which would join a step later."""
    run = start(3, 60, **limit)
    run.add(3, some_tokens(20 if "max_requests" in limit else 110, seed=9), 5)
    num_ahead = num_at_edges = 0
    while run.engine.waiting_request_ids:
        run.step()
        if is_ahead(run) and run.engine.waiting_request_ids:
            num_ahead += 1
            num_at_edges += any((request.computed + 1) % BLOCK < 2 for request in run.context.running_requests)
    assert num_ahead > 10
    assert num_at_edges > 5 if "max_requests" in limit else not num_at_edges
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_request_that_ends_at_a_block_end_releases_its_next_block(length: int) -> None:
    """A token ends the request just beyond whole blocks, while the step after it runs."""
    plain = start(3, 60, run_ahead=False)
    plain.finish()
    ends = {
        request_id: reply[index]
        for request_id in range(3)
        for reply in [plain.tokens(request_id)]
        for index in range(BLOCK, 60)
        if (len(plain.prompts[request_id]) + index + 1 - length) % BLOCK == 0 and reply[index] not in reply[:index]
    }
    assert ends, "no token is new there; choose other seeds"
    run = start(3, 60, ends=ends)
    _, num_ahead = finish(run)
    assert num_ahead > 30
    for request_id, end in ends.items():
        assert run.tokens(request_id)[-1] == end and len(run.tokens(request_id)) < 60
    run.assert_exact()


def test_states_of_steps_before_a_flush_are_not_cached() -> None:
    run = start(2, 60)
    while not any(request.reserved for request in run.context.running_requests):
        run.step()
    assert is_ahead(run)
    before = run.counters.states_published
    run.engine.flush()
    finish(run)
    assert run.counters.states_published == before
    run.assert_exact()


def penalized() -> SamplingParams:
    """Return settings whose tokens are sampled only once the preceding ones are read."""
    sampling = greedy(60)
    add_fields(sampling, logits={"presence_penalty": 1.5})
    return sampling


def start_with_penalized() -> EngineRun:
    """Return an engine of two requests and one with penalties, so that states are copied when a step lands."""
    run = start(2, 60, decode_checkpoints="all")
    run.add(2, some_tokens(25, seed=7), penalized())
    while not run.engine.get_request(2).generated_tokens:
        run.step()
    return run


def step_until_reserved(run: EngineRun, request_id: int) -> RunningRequest:
    """Step until the running step takes a request to a boundary; return that request."""
    while True:
        run.step()
        request = next(request for request in run.context.running_requests if request.request_id == request_id)
        if is_ahead(run) and request.reserved:
            return request


@pytest.mark.parametrize("disturb", [None, rehearse_engine, recapture], ids=["nothing", "rehearsal", "capture"])
@pytest.mark.parametrize("request_id", [0, 2])
def test_boundary_states_are_copied_even_if_verification_is_late(
    request_id: int, disturb: Callable[[EngineRun], None] | None
) -> None:
    run = start_with_penalized()
    boundary = step_until_reserved(run, request_id).computed + 1
    if disturb is not None:
        disturb(run)
    run.finish()
    text = [*run.prompts[request_id], *run.tokens(request_id)]
    run.run(10, [*text[:boundary], *some_tokens(5)], 20)
    assert run.engine.cached_tokens(10) == boundary
    run.assert_matches_oracle([0, 1, 10]).assert_few_stops()
    run.assert_nothing_held()


def test_no_boundary_state_is_copied_for_a_requeued_request() -> None:
    """Its slot may belong to another request by then."""
    run = start_with_penalized()
    assert_nothing_is_copied_for(step_until_reserved(run, 0), run)
    run.finish()
    run.assert_matches_oracle([0, 1]).assert_few_stops()
