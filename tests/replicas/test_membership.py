"""Peers that join, die and return, and their requests."""

from multiprocessing import Pipe

import msgpack
import pytest
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.build import TokenIdTokenizer
from megatron_mamba_cache.replicas.coordinator import PrefixCoordinator
from megatron_mamba_cache.replicas.settings import RoutingSettings
from megatron_mamba_cache.replicas.wire import FENCED, WELCOME
from tests.replicas.peers import KEYS, TIMEOUT_MS, TOKENS, FakeClient, FakeReplica, Service


def test_replica_messages_from_other_senders_are_ignored(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(0, TOKENS)
    request_id = replica.take()
    client.send(Headers.PAUSE)
    assert replica.receive() == [Headers.PAUSE.value]
    stranger = FakeReplica(service.context, service, "stranger")
    service.peers.append(stranger)
    stranger.finish(request_id, [1])
    stranger.send(Headers.PAUSE_ACK)
    stranger.report([KEYS[2]])
    assert client.hears_nothing() and stranger.hears_nothing() and replica.hears_nothing()
    replica.send(Headers.PAUSE_ACK)
    assert client.receive()[0] == Headers.PAUSE_ACK.value


def test_client_that_reconnects_gets_its_replies(service: Service) -> None:
    """A client reconnects like this if its connection was closed while its process was stopped."""
    (replica,) = service.replicas("a")
    service.kill(service.client("before"))
    back = FakeClient(service.context, service, "after")
    service.peers.append(back)
    back.submit(3, TOKENS)
    replica.finish(replica.take(), [5])
    number, answer = back.answer()
    assert (number, answer["generated_tokens"]) == (3, [5])


def test_signal_from_a_reconnected_client_is_answered(service: Service) -> None:
    (replica,) = service.replicas("a")
    back = FakeClient(service.context, service, "after")
    service.peers.append(back)
    back.send(Headers.PAUSE)
    assert replica.receive() == [Headers.PAUSE.value]
    replica.send(Headers.PAUSE_ACK)
    assert back.receive()[0] == Headers.PAUSE_ACK.value


def test_requests_of_a_dead_replica_are_retried_and_its_late_replies_are_ignored(
    service: Service,
) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    client.submit(3, TOKENS)
    request_id = first.take()
    service.kill(first)
    assert second.take() == request_id
    late = FakeReplica(service.context, service, "a")
    service.peers.append(late)
    late.finish(request_id, [1])
    assert late.receive() == msgpack.unpackb(FENCED)
    late.greet(replica="a")
    assert late.receive() == msgpack.unpackb(FENCED)
    second.finish(request_id, [2])
    assert client.answer()[1]["generated_tokens"] == [2]
    assert client.hears_nothing()


def test_fenced_replica_is_notified_even_if_it_sends_nothing(service: Service) -> None:
    (replica,) = service.replicas("a")
    service.kill(replica)
    client = service.client()
    client.submit(0, TOKENS)
    assert "no replica is left" in client.error()
    back = FakeReplica(service.context, service, "a")
    service.peers.append(back)
    assert back.receive() == msgpack.unpackb(FENCED)


def test_request_fails_after_too_many_replicas_died_or_none_is_left(service: Service) -> None:
    client = service.client()
    client.submit(0, TOKENS)
    assert "no replica is left" in client.error()
    replicas = service.replicas("abc")
    client.submit(1, TOKENS)
    replicas[0].take()
    service.kill(replicas[0])
    replicas[1].take()
    service.kill(replicas[1])
    assert "the 2 replicas that it was sent to died" in client.error()
    client.submit(2, TOKENS)
    replicas[2].finish(replicas[2].take(), [1])
    assert client.answer()[0] == 2


def test_replica_serves_only_after_all_of_its_processes_have_joined(service: Service) -> None:
    first = service.replica("a0", replica="a", num_members=2)
    client = service.client()
    client.submit(0, TOKENS)
    assert "no replica is left" in client.error()
    second = service.replica("a1", replica="a", member=1, num_members=2)
    assert second.socket.poll(TIMEOUT_MS) and second.socket.recv() == WELCOME
    client.submit(1, TOKENS)
    first.take()
    service.kill(second)
    assert first.receive() == msgpack.unpackb(FENCED)  # its remaining member is notified
    assert "no replica is left" in client.error()


def test_replicas_in_one_failure_domain_die_together(service: Service) -> None:
    first, second = service.replica("a", domain="experts"), service.replica("b", domain="experts")
    third = service.replica("c")
    client = service.client()
    service.kill(first)
    assert second.receive() == msgpack.unpackb(FENCED)
    client.submit(0, TOKENS)
    third.take()


def test_other_clients_are_served_when_a_client_has_left(service: Service) -> None:
    (replica,) = service.replicas("a")
    gone, client = service.client("gone"), service.client()
    gone.submit(0, TOKENS)
    request_id = replica.take()
    service.kill(gone)
    replica.finish(request_id, [1])
    client.submit(0, TOKENS)
    replica.finish(replica.take(), [2])
    assert client.answer()[1]["generated_tokens"] == [2]


def test_coordinator_times_out_when_replicas_do_not_join() -> None:
    ours, theirs = Pipe()
    settings = RoutingSettings(join_timeout_s=0.2, probe_interval_s=0.05, num_replicas=3)
    coordinator = PrefixCoordinator(theirs, TokenIdTokenizer(96), None, settings)
    assert ours.recv().startswith("tcp://")
    with pytest.raises(TimeoutError, match=r"0 of 3 replicas joined tcp://.* in 0\.2 s"):
        coordinator.wait_for_replicas()
    coordinator.stop()


def test_coordinator_runs_until_its_last_replica_or_client_leaves(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    service.starter_left.set()
    client.submit(0, TOKENS)
    replica.take()
    service.kill(replica)
    assert "no replica is left" in client.error()
    client.submit(1, TOKENS)
    assert "no replica is left" in client.error()
    service.kill(client)
    service.thread.join(TIMEOUT_MS / 1000)
    assert not service.thread.is_alive()
