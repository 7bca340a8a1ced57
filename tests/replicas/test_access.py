"""Access to a coordinator: local processes without a key, holders of the key with one."""

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_client import InferenceClient

from megatron_mamba_cache.replicas import channels
from megatron_mamba_cache.replicas import identity as replica_identity
from megatron_mamba_cache.replicas.access import InsecureAccess, KeyedAccess, LoopbackAccess, port_of
from megatron_mamba_cache.replicas.channels import Channel, CurveChannel
from megatron_mamba_cache.replicas.clients import KeyedInferenceClient
from megatron_mamba_cache.replicas.coordinator_secrets import JoiningSecret
from megatron_mamba_cache.replicas.front_end import FLUSH, WATCH
from megatron_mamba_cache.replicas.rank_sockets import RankContext
from megatron_mamba_cache.replicas.settings import RoutingSettings
from megatron_mamba_cache.replicas.wire import Hello, pack_hello
from tests.replicas.fleet import greedy
from tests.replicas.peers import TOKENS, FakeReplica, Service, ServingService

UNHEARD_MS = 1500
COMMANDS: list[list[Any]] = [
    [Headers.CONNECT.value],
    [Headers.SUBMIT_REQUEST.value, 0, TOKENS, {"num_tokens_to_generate": 4}],
    [Headers.PAUSE.value],
    [Headers.SUSPEND.value],
    [Headers.STOP.value],
    [FLUSH, "2"],
    [WATCH],
]


def keyed(tmp_path: Path, name: str = "key", digit: str = "a") -> Path:
    """Write a key file."""
    file = tmp_path / name
    file.write_text(digit * 64 + "\n", encoding="ascii")
    file.chmod(0o600)
    return file


@pytest.fixture
def serving() -> Iterator[Any]:
    """Yield a function that starts a serving coordinator."""
    with ExitStack() as ends:

        def start(**settings: Any) -> Service:
            service = ServingService(**settings)
            ends.callback(service.end)
            ends.callback(heard, service)
            return service

        yield start


def speak(address: str, *, secret: bytes | None = None, server: bytes | None = None) -> bytes | None:
    """Send every client message and a hello, without a key or with another; return an answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if secret is not None:
            CurveChannel(secret).secure_connection(stranger)
        if server is not None:
            stranger.setsockopt(zmq.CURVE_SERVERKEY, server)
        stranger.connect(address)
        for command in COMMANDS:
            stranger.send(msgpack.packb(command))
        stranger.send(pack_hello(Hello("stranger")))
        return stranger.recv() if stranger.poll(UNHEARD_MS) else None


def raw_zmtp(port: int) -> bytes:
    """Speak ZMTP over TCP without a security mechanism; return the answer."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    stop = msgpack.packb([Headers.STOP.value])
    with socket.create_connection((host_of_port(port), port), 10) as connection:
        connection.settimeout(UNHEARD_MS / 1000)
        connection.sendall(greeting + ready + bytes([0, len(stop)]) + stop)
        heard = b""
        try:
            while chunk := connection.recv(4096):
                heard += chunk
        except (TimeoutError, ConnectionError):
            pass
        return heard


def host_of_port(_port: int) -> str:
    return socket.gethostbyname(socket.gethostname())


def other_addresses() -> list[str]:
    """Return this machine's addresses besides the one that the coordinator has, other ones of loopback included."""
    found = {"127.0.0.2"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect(("192.0.2.1", 9))
            found.add(probe.getsockname()[0])
        except OSError:
            pass
    found |= {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(found - {"127.0.0.1"})


def nothing_was_heard(service: Service, replica: FakeReplica) -> bool:
    """Return True if only the replica's messages were handled and it received none."""
    return not heard(service) and replica.hears_nothing()


def heard(service: Service) -> list[list[bytes]]:
    """Return the messages that were handled since the last call."""
    found = []
    while not service.coordinator.handled.empty():
        found.append(service.coordinator.handled.get())
    return found


def test_coordinator_without_a_key_listens_only_on_loopback(serving: Any) -> None:
    service = serving()
    (replica,) = service.replicas("a")
    assert service.address.startswith("tcp://127.0.0.1:")
    port = port_of(service.address)
    assert other_addresses()
    for host in other_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), 10)
        assert speak(f"tcp://{host}:{port}") is None
    assert nothing_was_heard(service, replica)


def test_only_clients_with_the_key_are_served(serving: Any, tmp_path: Path) -> None:
    file = keyed(tmp_path)
    service = serving(key_file=file)
    (replica,) = service.replicas("a")
    knows_the_server = CurveChannel(bytes.fromhex("aa" * 32))._server.public
    assert speak(service.address) is None
    assert speak(service.address, secret=b"b" * 32) is None
    assert speak(service.address, secret=b"b" * 32, server=knows_the_server) is None  # its own key is not the right one
    assert b"NULL" not in raw_zmtp(port_of(service.address))
    assert nothing_was_heard(service, replica)

    assert answered(KeyedInferenceClient(service.address, file), replica) == [5, 6]
    assert len(heard(service)) == 3  # connect, request, reply


def answered(client: InferenceClient, replica: FakeReplica) -> list[int]:
    """Send a request from a client, answer it as the replica, and return the tokens that the client receives."""

    async def ask() -> list[int]:
        await client.start()
        answer = client.add_request(TOKENS, greedy(4))
        request_id = await asyncio.to_thread(replica.take)
        replica.socket.send(msgpack.packb([Headers.ENGINE_REPLY.value, [reply_of(request_id, [5, 6])]]))
        record = await asyncio.wait_for(answer, 30)
        return list(record.merge().generated_tokens)

    try:
        return asyncio.run(ask())
    finally:
        client.context.destroy(linger=0)


def reply_of(request_id: int, tokens: list[int]) -> dict[str, Any]:
    """Return a whole record, as an engine serializes it."""
    from megatron_mamba_cache.replicas.requests_in_flight import RequestInFlight, failed_record

    request = RequestInFlight(request_id, b"", 0, TOKENS, TOKENS, {})
    record = failed_record(request, "")
    record["requests"][0] |= {"status": "COMPLETED", "events": [], "generated_tokens": tokens, "prompt": "1"}
    return record


def test_megatrons_client_needs_only_the_address(serving: Any) -> None:
    service = serving()
    (replica,) = service.replicas("a")

    assert answered(InferenceClient(service.address), replica) == [5, 6]
    assert len(heard(service)) == 3  # connect, request, reply


def test_replica_without_the_secret_receives_no_prompt(serving: Any) -> None:
    service = serving()
    (replica,) = service.replicas("a")
    stranger = FakeReplica(service.context, service, "stranger")
    service.peers.append(stranger)
    for proof in ("", "0" * 64, "é"):
        stranger.send_bytes(pack_hello(Hello("b", proof=proof)))
    client = service.client()
    for number in range(3):
        client.submit(number, TOKENS)
        replica.take()
    assert stranger.hears_nothing()


def test_unauthenticated_peer_cannot_take_a_replicas_identity(serving: Any) -> None:
    service = serving()
    (replica,) = service.replicas("a")
    thief = service.context.socket(zmq.DEALER)
    thief.setsockopt(zmq.IDENTITY, b"a")
    thief.setsockopt(zmq.LINGER, 0)
    thief.connect(service.address)
    thief.send(msgpack.packb([Headers.STOP.value]))
    client = service.client()
    client.submit(0, TOKENS)
    replica.finish(replica.take(), [5])
    assert client.answer()[1]["generated_tokens"] == [5]
    assert not thief.poll(100)
    thief.close()
    heard(service)


def test_joining_secret_is_private_and_removed_at_exit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    secret = JoiningSecret.create(5)
    assert JoiningSecret.read(5) == secret
    assert [stat.S_IMODE(path.stat().st_mode) for path in (secret.path, secret.path.parent)] == [0o600, 0o700]
    newer = JoiningSecret.create(5)
    secret.remove()  # not the newer one's
    assert JoiningSecret.read(5) == newer != secret
    newer.remove()
    with pytest.raises(ConnectionError, match="no coordinator of this user has port 5"):
        JoiningSecret.read(5)
    newer.path.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="is not private to this user"):
        JoiningSecret.create(5)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("a" * 64, 0o604, r"open to other users \(mode 604\); run chmod 600"),
        ("a" * 64, 0o660, r"open to other users \(mode 660\)"),
        ("a" * 63, 0o600, "must contain 64 hexadecimal digits, found 63 characters"),
        ("g" * 64, 0o600, "must contain 64 hexadecimal digits, found 64 characters"),
        ("é" * 32, 0o600, "is not text"),
        (None, 0, "No such file"),
    ],
)
def test_bad_key_file_is_refused_with_the_remedy(text: str | None, mode: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    with pytest.raises(ValueError, match=message) as refused:
        RoutingSettings(key_file=file)
    assert "openssl rand -hex 32" in str(refused.value) or "chmod 600" in str(refused.value)


def test_key_file_and_insecure_setting_are_mutually_exclusive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="insecure is True, but key_file is also set"):
        RoutingSettings(key_file=keyed(tmp_path), insecure=True)


def test_pyzmq_without_curve_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(channels.zmq, "has", lambda _feature: False)
    with pytest.raises(ModuleNotFoundError, match="a coordinator key needs a pyzmq with CURVE"):
        RoutingSettings(key_file=keyed(tmp_path)).access()
    assert isinstance(RoutingSettings().access(), LoopbackAccess)


@pytest.mark.parametrize("address", ["tcp://192.0.2.9:5", "tcp://no.such.host.invalid:5"])
def test_remote_coordinator_without_a_key_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"not on loopback.*--coordinator-key-file FILE.*--insecure-coordinator"):
        LoopbackAccess().check_address(address)


def test_port_is_parsed_from_valid_addresses_and_invalid_ones_are_refused() -> None:
    for address in ("tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5"):
        LoopbackAccess().check_address(address)
        assert port_of(address) == 5
    for address in ("127.0.0.1:5", "tcp://127.0.0.1", "tcp://:5", "tcp://a:b", ""):
        with pytest.raises(ValueError, match="must look like tcp://host:5555"):
            port_of(address)


def test_ranks_on_several_hosts_without_a_shared_key_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = type("Groups", (), {"mp": None, "dp": None})

    def others(*ranks: tuple[str, str]) -> None:
        monkeypatch.setattr(replica_identity, "_gathered", lambda found, _group: [found, set(ranks)])

    key, other_key = KeyedAccess(b"a" * 32), KeyedAccess(b"b" * 32)
    others(("elsewhere", "loopback"))
    with pytest.raises(ValueError, match=r"the ranks run on 2 hosts.*RoutingSettings\(key_file=...\).*insecure=True"):
        replica_identity.check_ranks(groups, LoopbackAccess())
    others(("elsewhere", key.fingerprint))
    replica_identity.check_ranks(groups, key)
    for access in (other_key, LoopbackAccess(), InsecureAccess()):
        with pytest.raises(ValueError, match="give all ranks the same key file, or none"):
            replica_identity.check_ranks(groups, access)
    others(("elsewhere", "insecure"))
    replica_identity.check_ranks(groups, InsecureAccess())


def test_sockets_between_ranks_refuse_unauthenticated_peers() -> None:
    """As Megatron makes them: a publisher of all prompts, and one that takes the standings of expert peers."""
    with RankContext("127.0.0.1", CurveChannel(b"a" * 32), 1000) as context, zmq.Context() as outside:
        publisher, gathering = context.socket(zmq.PUB), context.socket(zmq.PULL)
        for listener in (publisher, gathering):
            listener.bind_to_random_port("tcp://127.0.0.2")  # Megatron says the host's name
            assert listener.getsockopt_string(zmq.LAST_ENDPOINT).startswith("tcp://127.0.0.1:")
        addresses = [listener.getsockopt_string(zmq.LAST_ENDPOINT) for listener in (publisher, gathering)]
        peer, pusher = context.socket(zmq.SUB), context.socket(zmq.PUSH)
        spy, forger = outside.socket(zmq.SUB), outside.socket(zmq.PUSH)
        for subscriber, sender in ((spy, forger), (peer, pusher)):
            subscriber.connect(addresses[0])
            subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
            sender.connect(addresses[1])
        forger.setsockopt(zmq.LINGER, 0)
        publisher.wait_for_subscribers(1, 60)
        with pytest.raises(ConnectionError, match="1 ranks of this replica have not subscribed"):
            publisher.wait_for_subscribers(1, 1)
        with suppress(zmq.Again):  # refused in the handshake, a forger has no peer to send to
            forger.send(b"forged", zmq.NOBLOCK)
        pusher.send(b"standing")
        publisher.send(b"prompt")
        assert gathering.recv() == b"standing" and peer.recv() == b"prompt"
        assert not spy.poll(200) and not gathering.poll(0)
        for made in (publisher, gathering, peer, pusher, spy, forger):
            made.close()


def test_engine_does_not_use_megatrons_coordinator_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, RankContext("127.0.0.1", Channel(), 1000) as context:
        server.settimeout(0.5)
        with context.socket(zmq.DEALER) as unused:
            unused.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
            unused.send(b"")
            with pytest.raises(TimeoutError):
                server.accept()
            unused.setsockopt(zmq.LINGER, 0)


def test_key_is_never_sent_between_ranks() -> None:
    secret = os.urandom(32)
    assert KeyedAccess(secret).fingerprint == KeyedAccess(secret).fingerprint
    assert secret.hex() not in KeyedAccess(secret).fingerprint and len(KeyedAccess(secret).fingerprint) == 16
