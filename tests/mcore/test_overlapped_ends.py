"""Steps launched before the previous one's tokens are read also compute requests that these tokens end."""

import pytest
import torch

from megatron_mamba_cache.policy.scheduler import QueueState
from megatron_mamba_cache.step import buffers as step_buffers
from megatron_mamba_cache.step.buffers import HostCopy
from tests.mcore.engine_runs import EngineRun, some_tokens
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.overlapped_runs import is_ahead, start, step_until_ahead

pytestmark = pytest.mark.usefixtures("either_form")

NUM_TOKENS = 40


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


@pytest.fixture(scope="module")
def replies() -> dict[int, list[int]]:
    """Return the replies to `start` if nothing but their length ends them."""
    with pytest.MonkeyPatch.context() as patch:
        capture_without_cuda(patch)
        run = start(run_ahead=False)
        run.finish()
        return {request_id: run.tokens(request_id) for request_id in range(3)}


def last_of_new_ones(reply: list[int], before: int) -> int:
    """Return the index of the last token before an index that does not occur earlier."""
    return max(index for index, token in enumerate(reply[:before]) if token not in reply[:index])


def launched_before_read(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list with an entry per step: True if the next step was launched when its tokens were read."""
    found: list[bool] = []
    wait = HostCopy.wait

    def noted_wait(reading: HostCopy) -> list[list[int]]:
        found.append(is_ahead(run))
        return wait(reading)

    monkeypatch.setattr(HostCopy, "wait", noted_wait)
    return found


def test_step_is_launched_before_its_input_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    found = launched_before_read(run, monkeypatch)
    num_ahead = 0
    while run.engine.has_unfinished_requests():
        run.step()
        num_ahead += is_ahead(run)
    assert sum(found) == num_ahead > 20  # none was launched later
    run.assert_exact()


@pytest.mark.parametrize("ending", [(0,), (1, 2), (0, 1, 2)])
def test_request_may_end_while_the_next_step_already_computes_it(
    ending: tuple[int, ...], replies: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = {request_id: last_of_new_ones(replies[request_id], NUM_TOKENS - 5) for request_id in ending}
    run = start(ends={request_id: replies[request_id][index] for request_id, index in last.items()})
    found = launched_before_read(run, monkeypatch)
    num_computed_on = 0
    while run.engine.has_unfinished_requests():
        before = len(run.context.running_requests)
        finished = run.step()
        run.context.check_integrity()
        num_left = before - len(run.context.running_requests)
        assert len(finished) == num_left
        num_computed_on += num_left > 0 and found[-1]
        assert is_ahead(run) <= bool(run.context.running_requests)
    assert num_computed_on
    for request_id, reply in replies.items():
        assert run.tokens(request_id) == reply[: last.get(request_id, NUM_TOKENS) + 1]
    run.assert_nothing_held()


@pytest.mark.parametrize("num_waiting", [1, 4])
@pytest.mark.parametrize("ends_by_token", [True, False])
def test_waiting_request_joins_after_the_step_that_frees_room(
    ends_by_token: bool, num_waiting: int, replies: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length is known in advance, so that the step after it is not launched early."""
    last = last_of_new_ones(replies[1], NUM_TOKENS - 5) if ends_by_token else NUM_TOKENS - 1
    run = start(ends={1: replies[1][last]} if ends_by_token else {}, max_requests=3)
    for request_id in range(3, 3 + num_waiting):
        run.add(request_id, some_tokens(22 + request_id, seed=request_id), 6)
    run.step()
    found = launched_before_read(run, monkeypatch)
    num_ahead = 0
    while 1 in run.engine.requests:
        run.step()
        num_ahead += is_ahead(run)
    assert found.count(True) > last - 8 and num_ahead
    assert is_ahead(run) is ends_by_token
    if ends_by_token:
        run.step()
        assert {request.request_id for request in run.context.running_requests} == {0, 2} and not is_ahead(run)
    run.step()
    assert 3 in {request.request_id for request in run.context.running_requests}
    run.finish()
    assert run.tokens(1) == replies[1][: last + 1] and run.tokens(0) == replies[0]
    run.assert_nothing_held()


def test_host_buffers_are_reused_only_after_their_copy_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class Event:
        def synchronize(self) -> None:
            events.append(["waited", buffers.host("computed")[:3].tolist()])

        def record(self, _stream: object) -> None:
            events.append(["sent", buffers.host("computed")[:3].tolist()])

    monkeypatch.setattr(step_buffers, "stream_of", lambda tensor: None)
    run = start()
    step_until_ahead(run)
    buffers = run.context.memory.step_buffers
    monkeypatch.setattr(buffers, "_copied", Event())
    run.step()
    (waited, before), (sent, after) = events[:2]
    assert (waited, sent) == ("waited", "sent") and after == [computed + 1 for computed in before]
    run.finish()
    run.assert_exact()


def test_copy_to_the_host_has_the_values_at_the_time_it_was_started(device: str) -> None:
    tensor = torch.arange(6, device=device).view(3, 2)
    reading = HostCopy(tensor)
    tensor.zero_()
    assert reading.wait() == [[0, 1], [2, 3], [4, 5]]


def test_waiting_requests_without_room_do_not_delay_steps() -> None:
    run = start(max_requests=3)
    num_ahead = 0
    for request_id in range(3, 15):
        run.step()
        num_ahead += is_ahead(run)
        run.add(request_id, some_tokens(20, seed=request_id), 5)
    assert num_ahead >= 11
    run.finish()
    run.assert_exact()


def test_queue_is_settled_only_after_the_scheduler_has_visited_a_new_request() -> None:
    runner = start().context.runner
    runner.queue.note_waiting(has_waiting=False)
    runner.queue.note_scheduled(is_settled=True)
    runner.queue.note_waiting(has_waiting=True)
    assert runner.queue == QueueState(has_waiting=True, is_settled=False)
    runner.queue.note_scheduled(is_settled=True)
    for has_waiting in (True, False):
        runner.queue.note_waiting(has_waiting=has_waiting)
        assert runner.queue == QueueState(has_waiting, is_settled=True)
