"""Messages of a server's front end through a coordinator, in addition to Megatron's."""

from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.replicas.front_end import (
    ABORT,
    ABORTS,
    CANCEL,
    CANCELS,
    FLUSH,
    FLUSHES,
    PROGRESS,
    STATE,
    STATES,
    WATCH,
)
from tests.replicas.peers import TOKENS, Service, ServingService


@pytest.fixture
def service() -> Iterator[Service]:
    made = ServingService()
    yield made
    made.end()


def progress(start: int, *tokens: int) -> dict[str, Any]:
    return {"start": start, "tokens": list(tokens)}


def test_progress_has_the_request_id_of_the_client(service: Service) -> None:
    (replica,) = service.replicas("a")
    client, other = service.client(), service.client("other")
    client.submit(7, TOKENS)
    request_id = replica.take()
    replica.send(PROGRESS, [[request_id, progress(0, 5)], [999, progress(0, 6)]])
    assert client.receive() == [PROGRESS, 7, progress(0, 5)]
    replica.finish(request_id, [5, 6])
    assert client.answer()[0] == 7 and client.hears_nothing() and other.hears_nothing()


def test_cancelled_request_is_dropped_and_never_answered(service: Service) -> None:
    (replica,) = service.replicas("a")
    client, other = service.client(), service.client("other")
    client.submit(7, TOKENS)
    request_id = replica.take()
    other.send(CANCEL, 7)  # not its own
    assert replica.hears_nothing()
    client.send(CANCEL, 7)
    assert replica.receive() == [Headers.SUBMIT_REQUEST.value, request_id, [], {CANCELS: True}]
    replica.send(PROGRESS, [[request_id, progress(0, 5)]])
    replica.finish(request_id, [5])
    client.send(CANCEL, 7)
    assert client.hears_nothing() and replica.hears_nothing()


def test_aborted_request_is_answered_by_its_replica_or_fails_if_that_dies(service: Service) -> None:
    first, second = service.replicas("ab")
    client, other = service.client(), service.client("other")
    client.submit(7, TOKENS)
    client.submit(8, TOKENS)
    (one,), (two,) = ([replica.take()] for replica in (first, second))
    other.send(ABORT, [7, 8])  # not its own
    assert first.hears_nothing() and second.hears_nothing()
    client.send(ABORT, [7, 8, 9])
    assert first.receive() == [Headers.SUBMIT_REQUEST.value, one, [], {ABORTS: True}]
    assert second.receive() == [Headers.SUBMIT_REQUEST.value, two, [], {ABORTS: True}]
    first.finish(one, [5])
    service.kill(second)
    answers = dict([client.answer(), client.answer()])
    assert answers.keys() == {7, 8}
    assert first.hears_nothing()  # it does not get the aborted request of the dead replica
    client.send(ABORT, [7, 8])
    assert client.hears_nothing()


def test_flush_reaches_every_replica_before_later_requests(service: Service) -> None:
    replicas = service.replicas("ab")
    client = service.client()
    client.send(FLUSH, "step-2")
    client.submit(1, TOKENS)
    client.submit(2, TOKENS[:3])
    heard = [replica.receive() for replica in replicas]
    assert [message[0] for message in heard] == [Headers.SUBMIT_REQUEST.value] * 2
    assert [message[3] for message in heard] == [{FLUSHES: ["step-2"]}] * 2
    client.send(FLUSH, 3)  # no version: ignored


@pytest.mark.parametrize("name", [CANCELS, FLUSHES])
def test_reserved_sampling_parameter_names_are_refused(service: Service, name: str) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(1, TOKENS, **{name: [None]})
    assert name in client.error() and replica.hears_nothing()


def test_watching_clients_get_replica_states_until_they_leave(service: Service) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    client.send(WATCH)
    assert client.receive() == [STATES, {}]
    first.send(STATE, {"num_running": 1})
    assert client.receive() == [STATES, {"a": {"num_running": 1}}]
    second.send(STATE, {"num_running": 2})
    assert client.receive() == [STATES, {"a": {"num_running": 1}, "b": {"num_running": 2}}]
    service.kill(first)
    assert client.receive() == [STATES, {"b": {"num_running": 2}}]
