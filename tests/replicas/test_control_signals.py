"""Signals of clients reach all replicas in order, while replicas join and die."""

from megatron.core.inference.headers import Headers

from tests.replicas.peers import TIMEOUT_MS, TOKENS, Service


def test_pause_ignores_dead_replicas_and_applies_to_new_replicas(service: Service) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    client.send(Headers.PAUSE)
    assert first.receive() == second.receive() == [Headers.PAUSE.value]
    first.send(Headers.PAUSE_ACK)
    assert client.hears_nothing()
    service.kill(second)
    assert client.receive()[0] == Headers.PAUSE_ACK.value
    assert first.receive() == [Headers.PAUSE_ACK.value]
    third = service.replica("c")
    assert [third.receive(), third.receive()] == [[Headers.PAUSE.value], [Headers.PAUSE_ACK.value]]
    client.send(Headers.UNPAUSE)
    assert first.receive() == third.receive() == [Headers.UNPAUSE.value]


def test_unpause_is_sent_after_all_replicas_have_paused(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    for header in (Headers.PAUSE, Headers.SUSPEND, Headers.RESUME, Headers.UNPAUSE):
        client.send(header)
    assert replica.receive() == [Headers.PAUSE.value] and replica.hears_nothing()
    replica.send(Headers.PAUSE_ACK)
    expected = (Headers.PAUSE_ACK, Headers.SUSPEND, Headers.RESUME, Headers.UNPAUSE)
    assert [replica.receive() for _ in expected] == [[header.value] for header in expected]


def test_each_of_two_pause_signals_is_answered(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    for _ in range(2):
        client.send(Headers.PAUSE)
        assert replica.receive() == [Headers.PAUSE.value]
        replica.send(Headers.PAUSE_ACK)
        assert replica.receive() == [Headers.PAUSE_ACK.value]
        assert client.receive()[0] == Headers.PAUSE_ACK.value


def test_stop_ends_the_coordinator_and_fails_open_requests(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(0, TOKENS)
    replica.take()
    client.send(Headers.STOP)
    assert replica.receive() == [Headers.STOP.value]
    client.submit(1, TOKENS)
    assert "are being stopped" in client.error()  # an engine takes nothing after a stop
    assert replica.hears_nothing()
    replica.send(Headers.STOP_ACK)
    assert "were stopped before it was done" in client.error()
    assert client.receive()[0] == Headers.STOP_ACK.value
    assert replica.receive() == [Headers.STOP_ACK.value]
    service.thread.join(TIMEOUT_MS / 1000)
    assert not service.thread.is_alive()
