"""Fake replicas and clients controlled by a test, and a coordinator that connects them, in a thread."""

import queue
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from typing import Any

import msgpack
import zmq
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord

from megatron_mamba_cache.build import TokenIdTokenizer
from megatron_mamba_cache.policy.block_hashing import block_keys
from megatron_mamba_cache.policy.boundary_journal import BoundaryChanges
from megatron_mamba_cache.replicas.coordinator import PrefixCoordinator
from megatron_mamba_cache.replicas.prompt_keys import KeySalt
from megatron_mamba_cache.replicas.serving_coordinator import ServingCoordinator
from megatron_mamba_cache.replicas.settings import RoutingSettings
from megatron_mamba_cache.replicas.wire import PROBE, WELCOME, Hello, KeyReport, pack_hello, pack_report

SALT = KeySalt("model", "0", 0, 4)
CONNECTED = msgpack.packb([Headers.CONNECT_ACK.value])
TOKENS = list(range(20))
KEYS = block_keys(SALT.root_of(""), TOKENS, SALT.block_size)
TIMEOUT_MS = 120_000
QUIET_MS = 100


class ListeningCoordinator(PrefixCoordinator):
    """Coordinator that records handled messages; messages from different sockets may arrive in any order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handled: queue.Queue[list[bytes]] = queue.Queue()

    def _handle_frames(self, frames: list[bytes]) -> None:
        super()._handle_frames(frames)
        self.handled.put(frames)


class ListeningServingCoordinator(ListeningCoordinator, ServingCoordinator):
    """A serving coordinator that records handled messages."""


class Peer:
    """A socket whose messages the coordinator handles before any peer sends the next."""

    def __init__(self, context: zmq.Context, service: "Service", identity: str) -> None:
        self.identity = identity
        self.handled = service.coordinator.handled
        self.proof = service.coordinator._mailbox.proof
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        service.channel.secure_connection(self.socket)
        self.socket.connect(service.address)

    def send(self, *message: Any) -> None:
        kind, *body = message
        self.send_bytes(msgpack.packb([kind.value if isinstance(kind, Headers) else kind, *body]))

    def send_bytes(self, message: bytes) -> None:
        self.socket.send(message)
        assert self.handled.get(timeout=TIMEOUT_MS / 1000) == [self.identity.encode(), message]

    def messages(self, timeout_ms: int = TIMEOUT_MS) -> Iterator[list[Any]]:
        """Yield the messages that arrive in time, except probes and answers to CONNECT."""
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
    """A replica that answers on demand."""

    def greet(self, member: int = 0, num_members: int = 1, replica: str | None = None, domain: str = "") -> None:
        self.send_bytes(pack_hello(Hello(replica or self.identity, member, num_members, domain, self.proof)))

    def report(self, published: list[int], salt: KeySalt | None = SALT, **changes: Any) -> None:
        self.send_bytes(pack_report(KeyReport(BoundaryChanges(tuple(published), **changes), salt)))

    def take(self) -> int:
        """Receive a request and return the id that the coordinator has assigned to it."""
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

    kind: type[ListeningCoordinator] = ListeningCoordinator

    def __init__(self, **settings: Any) -> None:
        self.context = zmq.Context()
        self.peers: list[Peer] = []
        ours, theirs = Pipe()
        quick = RoutingSettings(**{"probe_interval_s": 0.05} | settings)
        self.channel = quick.access().channel
        self.starter_left = threading.Event()
        self.coordinator = self.kind(theirs, TokenIdTokenizer(96), None, quick, 1, self.starter_left.is_set)
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
        """Close a peer's connection, as if its process had ended."""
        peer.socket.close()
        self.peers.remove(peer)

    def end(self) -> None:
        try:
            self._stop_coordinator()
        finally:
            self.context.destroy(linger=0)  # a context that is collected while a socket is open never returns

    def _stop_coordinator(self) -> None:
        for peer in self.peers:
            peer.socket.close()
        stopper = FakeClient(self.context, self, "stopper")
        stopper.socket.send(msgpack.packb([Headers.STOP.value]))
        end = time.monotonic() + TIMEOUT_MS / 1000
        while self.thread.is_alive() and time.monotonic() < end:  # it ends unasked where the test has stopped it
            stopper.socket.poll(20)
            while stopper.socket.poll(0):
                stopper.socket.recv()
        stopper.socket.close()
        assert not self.thread.is_alive()
        self.coordinator.stop()


class ServingService(Service):
    """A coordinator of a server's front end in a thread, and its peers."""

    kind = ListeningServingCoordinator
