"""Repeated messages take effect only once."""

from megatron.core.inference.headers import Headers

from megatron_mamba_cache.replicas.wire import WELCOME
from tests.replicas.peers import TIMEOUT_MS, TOKENS, FakeReplica, Service


def test_second_request_with_a_used_id_is_ignored(service: Service) -> None:
    (replica,) = service.replicas("a")
    client, other = service.client(), service.client("other")
    client.submit(3, TOKENS)
    client.submit(3, TOKENS[:5])
    client.submit(3, "no number")
    other.submit(3, TOKENS)  # numbers are the client's own
    first, of_other = replica.take(), replica.take()
    assert replica.hears_nothing() and client.hears_nothing()
    replica.finish(of_other, [6])
    assert other.answer()[1]["generated_tokens"] == [6]
    replica.finish(first, [5])
    replica.finish(first, [7])
    assert client.answer()[1]["generated_tokens"] == [5]
    assert client.hears_nothing() and other.hears_nothing()
    client.submit(3, TOKENS)  # it is free again
    replica.finish(replica.take(), [8])
    assert client.answer()[1]["generated_tokens"] == [8]


def test_oversized_request_with_a_used_id_does_not_affect_the_first_request(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(3, TOKENS)
    client.submit(3, TOKENS, note="x" * (9 * 2**20))
    replica.finish(replica.take(), [5])
    assert client.answer()[1]["generated_tokens"] == [5] and client.hears_nothing()


def test_second_hello_from_a_process_is_ignored(service: Service) -> None:
    first, second = service.replicas("ab")
    first.greet()
    first.greet(replica="c")  # nor a second replica for one socket
    late = FakeReplica(service.context, service, "late")
    service.peers.append(late)
    late.greet(replica="a")  # nor a second socket for one member
    late.greet(replica="a", member=1, num_members=2)
    assert late.hears_nothing()
    client = service.client()
    for number in range(4):
        client.submit(number, TOKENS[number:])
    taken = [replica.take() for replica in (first, second) for _ in range(2)]
    assert sorted(taken) == [0, 1, 2, 3] and late.hears_nothing()


def test_process_that_reports_another_replica_size_is_refused(service: Service) -> None:
    first = service.replica("a0", replica="a", num_members=2)
    service.replica("a1", replica="a", member=1, num_members=3)
    service.replica("a2", replica="a", member=1, num_members=2, domain="experts")
    assert first.hears_nothing() and not service.coordinator._members.serving
    second = service.replica("a3", replica="a", member=1, num_members=2)
    assert second.socket.poll(TIMEOUT_MS) and second.socket.recv() == WELCOME


def test_repeated_answer_to_a_signal_does_not_answer_the_next_signal(service: Service) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    client.send(Headers.PAUSE)
    for replica in (first, second):
        assert replica.receive() == [Headers.PAUSE.value]
    for _ in range(3):
        first.send(Headers.PAUSE_ACK)
    assert client.hears_nothing()
    second.send(Headers.PAUSE_ACK)
    assert client.receive() == [Headers.PAUSE_ACK.value, b""]
    assert [replica.receive() for replica in (first, second)] == [[Headers.PAUSE_ACK.value]] * 2
