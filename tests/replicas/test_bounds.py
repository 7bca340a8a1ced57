"""Bounds on the memory, work and log lines that one connection can cause."""

import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import zmq
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.replicas import mailbox, membership
from megatron_mamba_cache.replicas.access import LoopbackAccess, port_of
from megatron_mamba_cache.replicas.channels import CurveChannel
from megatron_mamba_cache.replicas.control_signals import ControlSignals
from megatron_mamba_cache.replicas.mailbox import Mailbox
from megatron_mamba_cache.replicas.membership import Membership
from megatron_mamba_cache.replicas.rank_sockets import RankContext
from megatron_mamba_cache.replicas.requests_in_flight import RequestInFlight, readable_sampling
from megatron_mamba_cache.replicas.wire import Hello, WireError, hello_of
from tests.replicas.peers import KEYS, TOKENS, FakeClient, FakeReplica, Service

PAGE = b"x" * 10_000
REQUEST_BYTES = 1300  # more than a request of `TOKENS` is counted as


@pytest.fixture
def box() -> Iterator[Mailbox]:
    """Yield a mailbox from which only the test reads."""
    made = Mailbox(None, LoopbackAccess(), 2 * len(PAGE))
    yield made
    made.socket.setsockopt(zmq.LINGER, 0)
    made.close()


def connected(box: Mailbox, **options: int) -> zmq.Socket:
    """Return a client socket that is connected: the mailbox has received a message from it."""
    client = zmq.Context.instance().socket(zmq.DEALER)
    for name, value in {"LINGER": 0, "IMMEDIATE": 1, "SNDTIMEO": 2000, **options}.items():
        client.setsockopt(getattr(zmq, name), value)
    client.setsockopt(zmq.IDENTITY, b"client")
    client.connect(box.address)
    client.send(b"first")
    assert box.socket.poll(10_000) and list(box.receive(0)) == [[b"client", b"first"]]
    return client


def assert_served(replica: FakeReplica, client: FakeClient, number: int = 99) -> None:
    client.submit(number, TOKENS)
    replica.finish(replica.take(), [5])
    assert client.answer()[0] == number


# Sizes of messages.


@pytest.mark.parametrize("service", [{"max_message_bytes": 10_000}], indirect=True)
def test_connection_that_announces_an_oversized_frame_is_closed(service: Service) -> None:
    (replica,) = service.replicas("a")
    client, other = service.client(), service.client("other")
    other.socket.send(b"x" * 10_001)
    assert_served(replica, client)
    assert not other.socket.poll(300)
    service.kill(other)
    assert service.coordinator.handled.empty()


def test_announced_oversized_frame_allocates_no_memory(box: Mailbox) -> None:
    client = connected(box)
    assert box.socket.getsockopt(zmq.MAXMSGSIZE) == 2 * len(PAGE)
    client.close()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    with socket.create_connection(("127.0.0.1", port_of(box.address)), 10) as connection:
        connection.sendall(greeting + ready + b"\x02" + (2**40).to_bytes(8, "big"))
        assert ends(connection)


def ends(connection: socket.socket) -> bool:
    """Return True if the other side closes a connection within a few seconds."""
    connection.settimeout(5)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_HANDSHAKE_MS", 200)
    box = Mailbox(None, LoopbackAccess(), 1000)
    with socket.create_connection(("127.0.0.1", port_of(box.address)), 10) as connection:
        assert ends(connection)
    box.close()


@pytest.mark.parametrize("service", [{"max_request_bytes": 2000}], indirect=True)
def test_oversized_request_gets_an_error_and_other_oversized_messages_are_ignored(service: Service) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    for prompt in ("1 " * 1500, [1] * 3000, TOKENS):
        padding = "" if prompt is not TOKENS else "x" * 2000
        client.submit(0, prompt, note=padding)
        assert "bytes, above max_request_bytes=2000" in client.error()
    client.send(Headers.PAUSE, b"x" * 2000)
    client.send("x" * 3000)
    client.send_bytes(b"\xc1" * 3000)
    client.send_bytes(msgpack.packb([Headers.SUBMIT_REQUEST.value, "x" * 3000, [], {}]))
    assert first.hears_nothing() and second.hears_nothing() and client.hears_nothing()
    second.report([KEYS[2], *range(1, 200)])  # a replica may say more
    assert_served(second, client)


def test_ranks_close_a_connection_that_announces_an_oversized_frame() -> None:
    with RankContext("127.0.0.1", CurveChannel(b"a" * 32), 1000) as context:
        gathering, large, small = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH))
        gathering.bind_to_random_port("tcp://127.0.0.1")
        for sender, message in ((large, b"x" * 1001), (small, b"standing")):
            sender.setsockopt(zmq.LINGER, 0)
            sender.connect(gathering.getsockopt_string(zmq.LAST_ENDPOINT))
            sender.send(message)
        assert gathering.recv() == b"standing" and not gathering.poll(300)
        for made in (gathering, large, small):
            made.close()


# What is unfinished.


@pytest.mark.parametrize("service", [{"max_pending_bytes": 4 * 3 * REQUEST_BYTES}], indirect=True)
def test_one_client_may_use_a_quarter_of_the_pending_bytes(service: Service) -> None:
    (replica,) = service.replicas("a")
    client, other = service.client(), service.client("other")
    for number in range(4):
        client.submit(number, TOKENS)
    assert "this client's unfinished requests have" in client.error()
    taken = [replica.take() for _ in range(3)]
    assert_served(replica, other)
    replica.finish(taken[0], [5])
    assert client.answer()[0] == 0
    assert_served(replica, client)


@pytest.mark.parametrize("service", [{"max_pending_bytes": 4 * 3 * REQUEST_BYTES}], indirect=True)
def test_all_clients_together_may_use_all_pending_bytes(service: Service) -> None:
    (replica,) = service.replicas("a")
    clients = [service.client(f"client{number}") for number in range(5)]
    for number, client in enumerate(clients[:4]):
        for request in range(3):
            client.submit(request, TOKENS)
            assert replica.take() == 3 * number + request
    clients[4].submit(0, TOKENS)
    assert f"max_pending_bytes={12 * REQUEST_BYTES}); wait for replies" in clients[4].error()
    replica.finish(0, [5])
    assert clients[0].answer()[0] == 0
    assert_served(replica, clients[4], 1)


def test_size_of_a_request_counts_its_text_tokens_and_parameters() -> None:
    def size(prompt: Any, tokens: list[int], **sampling: Any) -> int:
        return RequestInFlight(0, b"", 0, prompt, tokens, sampling).size()

    assert size([1] * 1000, [1] * 1000) - size([], []) == 8000
    assert size("1 " * 1000, [1] * 1000) - size("", []) == 10_000
    assert size([], [], note="x" * 1000) - size([], []) > 1000


def test_fast_sender_is_throttled(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_MOST_MESSAGES_A_ROUND", 500)
    client = connected(box, SNDHWM=1, SNDBUF=100_000)
    num_sent = 0
    with suppress(zmq.Again):
        while num_sent < 5000:
            client.poll(500, zmq.POLLOUT)
            client.send(PAGE, zmq.NOBLOCK)
            num_sent += 1
    assert num_sent < 5000  # the mailbox keeps about 1000 of them, and fewer while its thread waits for a core
    assert len(list(box.receive(1))) == 500  # others have their turn
    client.close()


def test_peer_that_stops_reading_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_MOST_UNSENT", 100)
    box = Mailbox(None, LoopbackAccess(), 2 * len(PAGE))
    client = connected(box, RCVHWM=1, RCVBUF=100_000)
    num_sent = 0
    with suppress(zmq.ZMQError):
        while num_sent < 5000:
            box.send(b"client", PAGE)
            num_sent += 1
    assert num_sent < 5000
    client.close()
    box.socket.setsockopt(zmq.LINGER, 0)
    box.close()


# What is remembered, and what is logged.


def test_number_of_remembered_dead_replicas_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_MOST_DEAD", 3)
    members = Membership()
    for number in range(10):
        members.greet(b"%d" % number, Hello(f"replica-{number}"))
        members.bury(b"%d" % number)
    assert members.dead_identities == [b"7", b"8", b"9"]
    with pytest.raises(WireError, match="has been declared dead"):
        members.greet(b"again", Hello("replica-9"))
    assert members.greet(b"again", Hello("replica-6")).is_complete


def test_number_of_pending_signals_is_bounded() -> None:
    signals = ControlSignals()
    for _ in range(1000):
        signals.ask(Headers.PAUSE)
    with pytest.raises(ValueError, match="1000 signals are already pending"):
        signals.ask(Headers.PAUSE)


def test_length_of_names_in_a_hello_message_is_bounded() -> None:
    fields = {"replica": "a", "member": 0, "num_members": 1, "domain": "", "proof": ""}
    assert hello_of(fields) == Hello("a")
    for name in ("replica", "domain", "proof"):
        with pytest.raises(WireError, match="a name in the hello message has more than 128 characters"):
            hello_of({**fields, name: "x" * 129})


def test_sampling_parameters_with_objects_or_deep_nesting_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(6):
        nested = [nested]
    assert readable_sampling({"note": nested}) == {"note": nested}
    for bad in ([nested], msgpack.Timestamp(1), {1: 2}):
        with pytest.raises(ValueError, match="plain values or lists nested at most 8 deep"):
            readable_sampling({"note": bad})


@pytest.mark.parametrize("num_tokens", [2**62, -1, True])
def test_router_caps_the_requested_number_of_tokens(num_tokens: int) -> None:
    request = RequestInFlight(0, b"", 0, [1], [1], {"num_tokens_to_generate": num_tokens})
    assert 0 <= request.max_new_tokens <= 2**20


def test_malformed_messages_produce_few_log_lines(box: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=mailbox.__name__):
        for _ in range(500):
            box.ignore(b"client", ValueError("x"))
        box.summarize()
        assert len(caplog.records) == 21 and caplog.messages[-1] == "ignored 480 more messages"
        box.ignore(b"client", ValueError("x"))
    assert len(caplog.records) == 22
