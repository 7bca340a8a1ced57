"""Clients that leave before they are answered, and their requests."""

import time
from collections.abc import Callable, Iterator

import pytest
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.replicas.front_end import CANCELS
from tests.replicas.peers import TOKENS, Service, ServingService

NOTICED_S = 60  # no claim: machines that run tests can be very busy


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    made = ServingService(**getattr(request, "param", {}))
    yield made
    made.end()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + NOTICED_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_only_requests_of_the_departed_client_are_cancelled(service: Service) -> None:
    first, second = service.replicas("ab")
    gone, stays = service.client("gone"), service.client("stays")
    for number in range(4):
        gone.submit(number, TOKENS[number:])
    running = {replica.identity: [replica.take() for _ in range(2)] for replica in (first, second)}
    stays.submit(0, TOKENS[:5])
    service.kill(gone)
    wait_until(lambda: len(service.coordinator._in_flight) == 1)
    kept = []
    for replica in (first, second):
        heard = list(replica.messages(300))
        cancelled = [message[1] for message in heard if message[3] == {CANCELS: True}]
        assert sorted(cancelled) == sorted(running[replica.identity])
        kept += [(replica, message[1]) for message in heard if message[3] != {CANCELS: True}]
    ((replica, request_id),) = kept
    for late in running[replica.identity]:
        replica.finish(late, [1])
    replica.finish(request_id, [5])
    assert stays.answer()[1]["generated_tokens"] == [5] and stays.hears_nothing()


def test_pending_bytes_of_a_departed_client_are_released(service: Service) -> None:
    (replica,) = service.replicas("a")
    in_flight = service.coordinator._in_flight
    for number in range(3):
        client = service.client(f"client{number}")
        client.submit(0, TOKENS)
        client.submit(1, TOKENS)
        replica.take()
        replica.take()
        assert in_flight._num_bytes > 0
        service.kill(client)
        wait_until(lambda: in_flight._num_bytes == 0)
        assert [replica.receive()[0] for _ in range(2)] == [Headers.SUBMIT_REQUEST.value] * 2
    assert not in_flight._bytes_of and not in_flight._of_client and not len(in_flight)


@pytest.mark.parametrize("service", [{"probe_interval_s": 0.5}], indirect=True)
def test_other_clients_are_unaffected_when_a_client_leaves_as_its_replica_dies(service: Service) -> None:
    """The same probe detects that the replica of the first request and its client have both left."""
    (replica,) = service.replicas("a")
    gone, stays = service.client("gone"), service.client("stays")
    for number in range(3):
        gone.submit(number, TOKENS)
        replica.take()
    stays.submit(0, TOKENS)
    next_probe = service.coordinator._next_probe
    wait_until(lambda: service.coordinator._next_probe > next_probe)  # it has just looked
    service.kill(gone)
    service.kill(replica)
    assert "no replica is left" in stays.error()
    assert service.thread.is_alive() and not len(service.coordinator._in_flight)
    (other,) = service.replicas("b")
    stays.submit(1, TOKENS)
    other.finish(other.take(), [5])
    assert stays.answer()[0] == 1


@pytest.mark.parametrize("service", [{"probe_interval_s": 0.5}], indirect=True)
def test_retried_requests_of_a_departed_client_are_cancelled(service: Service) -> None:
    first, second = service.replicas("ab")
    gone = service.client("gone")
    gone.submit(0, TOKENS)
    first.take()
    service.kill(gone)
    service.kill(first)
    wait_until(lambda: not len(service.coordinator._in_flight))
    heard = list(second.messages(300))
    assert len(heard) in (0, 2) and all(message[3] == {CANCELS: True} for message in heard[1:])
    assert service.thread.is_alive()
