"""The coordinator alone, between replicas and clients that a test plays."""

import queue
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import msgpack
import pytest
import zmq
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord

from megatron_mamba_cache.mcore.build import TokenIdTokenizer
from megatron_mamba_cache.policy.block_hashing import block_keys
from megatron_mamba_cache.policy.boundary_journal import BoundaryChanges
from megatron_mamba_cache.routing.coordinator import PrefixCoordinator
from megatron_mamba_cache.routing.salts import KeySalt
from megatron_mamba_cache.routing.settings import RoutingSettings
from megatron_mamba_cache.routing.wire import FENCED, PROBE, WELCOME, Hello, KeyReport, pack_hello, pack_report

SALT = KeySalt("model", "0", 0, 4)
CONNECTED = msgpack.packb([Headers.CONNECT_ACK.value])
TIMEOUT_MS = 120_000
QUIET_MS = 100


class ListeningCoordinator(PrefixCoordinator):
    """Tells the test what has been heard: messages of different sockets may overtake each other on the way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handled: queue.Queue[list[bytes]] = queue.Queue()

    def _handle_frames(self, frames: list[bytes]) -> None:
        super()._handle_frames(frames)
        self.handled.put(frames)


class Peer:
    """A socket that speaks with the coordinator; what it sends is heard before the next thing is sent by anybody."""

    def __init__(self, context: zmq.Context, service: "Service", identity: str) -> None:
        self.identity = identity
        self.handled = service.coordinator.handled
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(service.address)

    def send(self, *message: Any) -> None:
        kind, *body = message
        self.send_bytes(msgpack.packb([kind.value if isinstance(kind, Headers) else kind, *body]))

    def send_bytes(self, message: bytes) -> None:
        self.socket.send(message)
        assert self.handled.get(timeout=TIMEOUT_MS / 1000) == [self.identity.encode(), message]

    def messages(self, timeout_ms: int = TIMEOUT_MS) -> Iterator[list[Any]]:
        """Yield what comes; probes and the answers to greetings are left out, and do not prolong the time."""
        end = time.monotonic() + timeout_ms / 1000
        while self.socket.poll(max(int((end - time.monotonic()) * 1000), 0)):
            message = self.socket.recv()
            if message not in (PROBE, WELCOME, CONNECTED):
                yield msgpack.unpackb(message)

    def receive(self) -> list[Any]:
        message = next(self.messages(), None)
        assert message is not None, f"{self.identity} heard nothing for {TIMEOUT_MS} ms"
        return message

    def hears_nothing(self) -> bool:
        return next(self.messages(QUIET_MS), None) is None


class FakeReplica(Peer):
    """A replica that answers when it is told to."""

    def greet(self, member: int = 0, num_members: int = 1, replica: str | None = None, domain: str = "") -> None:
        self.send_bytes(pack_hello(Hello(replica or self.identity, member, num_members, domain)))

    def report(self, published: list[int], salt: KeySalt | None = SALT, **changes: Any) -> None:
        self.send_bytes(pack_report(KeyReport(BoundaryChanges(tuple(published), **changes), salt)))

    def take(self) -> int:
        """Take a request and return the coordinator's number of it."""
        header, request_id, *_ = self.receive()
        assert header == Headers.SUBMIT_REQUEST.value
        return request_id

    def finish(self, request_id: int, tokens: list[int]) -> None:
        request = {"request_id": request_id, "prompt": "1", "generated_tokens": tokens}
        self.send(Headers.ENGINE_REPLY, [{"requests": [request], "latency": None}])


class FakeClient(Peer):
    """A client that sends one request after another."""

    def connect(self) -> None:
        self.send(Headers.CONNECT)
        assert self.socket.poll(TIMEOUT_MS) and self.socket.recv() == CONNECTED

    def submit(self, client_request_id: int, prompt: Any, **sampling: Any) -> None:
        self.send(Headers.SUBMIT_REQUEST, client_request_id, prompt, {"num_tokens_to_generate": 4} | sampling)

    def answer(self) -> tuple[int, dict[str, Any]]:
        header, client_request_id, record = self.receive()
        assert header == Headers.ENGINE_REPLY.value
        return client_request_id, record["requests"][0]

    def error(self) -> str:
        """Return the reason that a failed request's record gives, as Megatron's client reads it."""
        header, _, reply = self.receive()
        assert header == Headers.ENGINE_REPLY.value
        merged = DynamicInferenceRequestRecord.deserialize(reply).merge()
        assert merged.failed()
        return merged.events[-2].payload.message


class Service:
    """A coordinator in a thread, and its peers."""

    def __init__(self, **settings: Any) -> None:
        self.context = zmq.Context()
        self.peers: list[Peer] = []
        ours, theirs = Pipe()
        quick = RoutingSettings(**{"probe_interval_s": 0.05} | settings)
        self.coordinator = ListeningCoordinator(theirs, TokenIdTokenizer(96), None, quick)
        self.address = ours.recv()
        self.thread = threading.Thread(target=self.coordinator.start, daemon=True)
        self.thread.start()

    def replica(self, identity: str, **hello: Any) -> FakeReplica:
        made = FakeReplica(self.context, self, identity)
        self.peers.append(made)
        made.greet(**hello)
        return made

    def replicas(self, identities: str) -> list[FakeReplica]:
        """Return replicas that have joined in this order."""
        made = []
        for identity in identities:
            made.append(self.replica(identity))
            assert made[-1].socket.poll(TIMEOUT_MS) and made[-1].socket.recv() == WELCOME
        return made

    def client(self, identity: str = "client") -> FakeClient:
        made = FakeClient(self.context, self, identity)
        self.peers.append(made)
        made.connect()
        return made

    def kill(self, peer: Peer) -> None:
        """Close a peer's connection, as its end does."""
        peer.socket.close()
        self.peers.remove(peer)

    def end(self) -> None:
        for peer in self.peers:
            peer.socket.close()
        if self.thread.is_alive():
            stopper = self.client("stopper")
            stopper.send(Headers.STOP)
            assert stopper.receive()[0] == Headers.STOP_ACK.value
            stopper.socket.close()
            self.thread.join(TIMEOUT_MS / 1000)
        assert not self.thread.is_alive()
        self.coordinator.stop()
        self.context.term()


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    made = Service(**getattr(request, "param", {}))
    yield made
    made.end()


TOKENS = list(range(20))
KEYS = block_keys(SALT.root_of(""), TOKENS, SALT.block_size)


def test_a_prompt_goes_to_the_replica_that_reports_its_prefix_and_the_reply_to_its_client(service: Service) -> None:
    first, second = service.replicas("ab")
    client, other = service.client(), service.client("other")
    second.report([KEYS[2]])
    client.submit(7, TOKENS)
    request_id = second.take()
    second.finish(request_id, [5, 6])
    client_request_id, answer = client.answer()
    assert (client_request_id, answer["generated_tokens"], answer["generated_text"]) == (7, [5, 6], "5 6")
    assert first.hears_nothing() and other.hears_nothing()


def test_prompts_of_text_and_of_tenants_are_named_as_their_replica_does(service: Service) -> None:
    _, second, third = service.replicas("abc")
    second.report([KEYS[2]])
    third.report([block_keys(SALT.root_of("red"), TOKENS, SALT.block_size)[2]])
    client = service.client()
    client.submit(0, " ".join(map(str, TOKENS)))
    assert second.receive()[2] == " ".join(map(str, TOKENS))
    client.submit(1, TOKENS, tenant="red")
    assert third.receive()[3]["tenant"] == "red"


def test_keys_of_an_old_salt_attract_nobody(service: Service) -> None:
    first, second = service.replicas("ab")
    second.report([KEYS[2]])
    second.report([], KeySalt("model", "1", 1, 4), were_flushed=True)
    first.report([])
    client = service.client()
    client.submit(0, TOKENS)
    first.take()


@pytest.mark.parametrize("service", [{"policy": "round-robin"}], indirect=True)
def test_round_robin_ignores_reports(service: Service) -> None:
    replicas = service.replicas("abc")
    replicas[1].report([KEYS[2]])
    client = service.client()
    for number in range(6):
        client.submit(number, TOKENS)
        replicas[number % 3].take()


MALFORMED: dict[str, Any] = {
    "no_msgpack": b"\xc1",
    "no_list": msgpack.packb(3),
    "empty_list": msgpack.packb([]),
    "unknown_word": msgpack.packb(["what"]),
    "unknown_number": msgpack.packb([99]),
    "registration_of_megatron": b"",
    "hello_without_fields": msgpack.packb(["hello", {}]),
    "hello_of_nobody": msgpack.packb(["hello"]),
    "second_hello": pack_hello(Hello("b")),
    "hello_out_of_range": msgpack.packb(["hello", {"replica": "x", "member": 2, "num_members": 2, "domain": ""}]),
    "report_of_half_a_key": msgpack.packb(
        ["keys", {"salt": None, "flushed": False, "published": b"1", "dropped": b""}]
    ),
    "report_without_fields": msgpack.packb(["keys", {"published": b""}]),
    "salt_of_no_block": msgpack.packb(
        ["keys", {"salt": ["m", "0", 0, 0], "flushed": False, "published": b"", "dropped": b""}]
    ),
    "reply_to_nothing": msgpack.packb([Headers.ENGINE_REPLY.value, [{"requests": [{"request_id": 99}]}]]),
    "reply_of_nothing": msgpack.packb([Headers.ENGINE_REPLY.value, [{}]]),
    "answer_that_nobody_waits_for": msgpack.packb([Headers.PAUSE_ACK.value]),
    "request_from_a_replica": msgpack.packb([Headers.SUBMIT_REQUEST.value, 0, [1], {}]),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_messages_disturb_nobody(service: Service, message: str) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    second.report([KEYS[2]])
    second.send_bytes(MALFORMED[message])
    client.submit(0, TOKENS)
    second.finish(second.take(), [5])
    assert client.answer()[1]["generated_tokens"] == [5]
    assert first.hears_nothing()


def test_messages_of_strangers_are_ignored(service: Service) -> None:
    (replica,) = service.replicas("a")
    stranger = FakeClient(service.context, service, "stranger")
    service.peers.append(stranger)
    stranger.submit(0, TOKENS)
    stranger.send(Headers.STOP)
    stranger.send(Headers.STOP_ACK)
    stranger.send(Headers.ENGINE_REPLY, [])
    assert stranger.hears_nothing() and replica.hears_nothing()


def test_a_reply_that_cannot_be_read_fails_its_request(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(3, TOKENS)
    request = {"request_id": replica.take(), "prompt": "1"}
    replica.send(Headers.ENGINE_REPLY, [{"requests": [request], "latency": None}])
    assert "its reply cannot be read" in client.error()


@pytest.mark.parametrize("prompt", ["1 two 3", [1, "2"], [2**40], {"1": 2}, None])
def test_a_prompt_that_cannot_be_read_fails_alone(service: Service, prompt: Any) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    client.submit(3, prompt)
    assert "the request cannot be read" in client.error()
    assert replica.hears_nothing()


def test_a_request_of_a_dead_replica_is_done_by_another_and_late_words_of_the_dead_are_not_heard(
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


def test_a_reply_of_a_replica_that_the_request_was_not_sent_to_is_ignored(service: Service) -> None:
    first, second = service.replicas("ab")
    client = service.client()
    client.submit(3, TOKENS)
    request_id = first.take()
    second.finish(request_id, [1])
    assert client.hears_nothing()
    first.finish(request_id, [2])
    assert client.answer()[1]["generated_tokens"] == [2]


def test_a_request_whose_replicas_keep_dying_fails_and_so_does_one_without_replicas(service: Service) -> None:
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


def test_a_replica_of_several_processes_is_there_with_all_and_dead_with_any(service: Service) -> None:
    first = service.replica("a0", replica="a", num_members=2)
    client = service.client()
    client.submit(0, TOKENS)
    assert "no replica is left" in client.error()
    second = service.replica("a1", replica="a", member=1, num_members=2)
    assert second.socket.poll(TIMEOUT_MS) and second.socket.recv() == WELCOME
    client.submit(1, TOKENS)
    first.take()
    service.kill(second)
    assert first.receive() == msgpack.unpackb(FENCED)  # what is left of it is told
    assert "no replica is left" in client.error()


def test_replicas_of_one_domain_die_together(service: Service) -> None:
    first, second = service.replica("a", domain="experts"), service.replica("b", domain="experts")
    third = service.replica("c")
    client = service.client()
    service.kill(first)
    assert second.receive() == msgpack.unpackb(FENCED)
    client.submit(0, TOKENS)
    third.take()


def test_a_pause_is_complete_without_the_dead_and_holds_for_who_joins(service: Service) -> None:
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


def test_unpausing_waits_until_the_pause_is_complete(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    for header in (Headers.PAUSE, Headers.SUSPEND, Headers.RESUME, Headers.UNPAUSE):
        client.send(header)
    assert replica.receive() == [Headers.PAUSE.value] and replica.hears_nothing()
    replica.send(Headers.PAUSE_ACK)
    expected = (Headers.PAUSE_ACK, Headers.SUSPEND, Headers.RESUME, Headers.UNPAUSE)
    assert [replica.receive() for _ in expected] == [[header.value] for header in expected]


def test_pausing_twice_is_answered_twice(service: Service) -> None:
    (replica,) = service.replicas("a")
    client = service.client()
    for _ in range(2):
        client.send(Headers.PAUSE)
        assert replica.receive() == [Headers.PAUSE.value]
        replica.send(Headers.PAUSE_ACK)
        assert replica.receive() == [Headers.PAUSE_ACK.value]
        assert client.receive()[0] == Headers.PAUSE_ACK.value


def test_a_stop_ends_the_coordinator_and_fails_what_is_not_done(service: Service) -> None:
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


def test_a_client_that_has_gone_holds_nobody_up(service: Service) -> None:
    (replica,) = service.replicas("a")
    gone, client = service.client("gone"), service.client()
    gone.submit(0, TOKENS)
    request_id = replica.take()
    service.kill(gone)
    replica.finish(request_id, [1])
    client.submit(0, TOKENS)
    replica.finish(replica.take(), [2])
    assert client.answer()[1]["generated_tokens"] == [2]


def test_missing_replicas_are_an_error_in_time() -> None:
    ours, theirs = Pipe()
    settings = RoutingSettings(join_timeout_s=0.2, probe_interval_s=0.05, num_replicas=3)
    coordinator = PrefixCoordinator(theirs, TokenIdTokenizer(96), None, settings)
    assert ours.recv().startswith("tcp://")
    with pytest.raises(TimeoutError, match=r"0 of 3 replicas joined tcp://.* in 0\.2 s"):
        coordinator.wait_for_replicas()
    coordinator.stop()


@pytest.mark.parametrize(
    "setting",
    [
        {"policy": "random"},
        {"load_factor": 0.5},
        {"share_factor": 0.5},
        {"max_keys": 0},
        {"num_attempts": 0},
        {"join_timeout_s": 0},
    ],
)
def test_bad_settings_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(setting))} is "):
        RoutingSettings(**setting)
