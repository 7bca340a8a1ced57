"""A process in another network namespace, which reaches this host over a virtual cable, as one on another host does."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.replicas import access
from megatron_mamba_cache.replicas.access import port_of
from megatron_mamba_cache.replicas.channels import KeyPair
from megatron_mamba_cache.replicas.wire import Hello, pack_hello
from tests.fork_server import REPOSITORY
from tests.replicas import stranger
from tests.replicas.peers import FakeReplica, Service, ServingService

HERE, THERE = "198.18.77.1", "198.18.77.2"  # of the range for tests of networks; in these two interfaces only
KEY, OTHER_KEY = bytes.fromhex("aa" * 32), bytes.fromhex("bb" * 32)
HEADERS = (Headers.CONNECT, Headers.PAUSE, Headers.SUSPEND, Headers.STOP)
COMMANDS = [*(msgpack.packb([header.value]) for header in HEADERS), pack_hello(Hello("stranger"))]
SECONDS = 120  # no claim: machines that run tests can be very busy


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=SECONDS)


@dataclass(frozen=True, slots=True)
class OtherHost:
    """A network namespace."""

    name: str

    def run(self, *arguments: str) -> str:
        """Run Python in the network namespace and return its output."""
        command = ["ip", "netns", "exec", self.name, sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, env=environment)
        return done.stdout.strip()

    def says_everything(self, address: str, keys: str = "") -> str:
        """Return what comes back to a stranger there; see `keys_of`."""
        return self.run(stranger.__file__, address, keys, *(message.hex() for message in COMMANDS))


def keys_of(server: bytes, client: bytes) -> str:
    """Return the keys of a client that takes these for the server's and for its own secret."""
    own = KeyPair.derive(client, b"client")
    return b" ".join([KeyPair.derive(server, b"server").public, own.public, own.secret]).decode()


@pytest.fixture(scope="module")
def other_host() -> Iterator[OtherHost]:
    """Yield a network namespace that is connected to this one; delete it afterwards."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (apt-get install iproute2)")
    name = f"mmc{os.getpid()}"
    here, there = f"{name}a", f"{name}b"
    try:
        try:
            ip("netns", "add", name)
            ip("link", "add", here, "type", "veth", "peer", "name", there)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        ip("link", "set", there, "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield OtherHost(name)
    finally:
        for words in (("link", "del", here), ("netns", "del", name)):
            with suppress(subprocess.CalledProcessError):
                ip(*words)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that starts a coordinator on this end of the virtual cable."""
    monkeypatch.setattr(access.socket, "gethostname", lambda: HERE)
    made: list[Service] = []

    def start(**settings: Any) -> tuple[Service, FakeReplica]:
        made.append(ServingService(**settings))
        (replica,) = made[-1].replicas("a")
        while not made[-1].coordinator.handled.empty():
            made[-1].coordinator.handled.get()
        return made[-1], replica

    yield start
    for service in made:
        while not service.coordinator.handled.empty():
            service.coordinator.handled.get()
        service.end()


def test_process_on_another_host_can_connect(other_host: OtherHost) -> None:
    with socket.create_server((HERE, 0)) as server:
        says = (
            "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).recv(9).decode())"
        )
        server.settimeout(SECONDS)
        command = [
            "ip",
            "netns",
            "exec",
            other_host.name,
            sys.executable,
            "-c",
            says,
            HERE,
            str(server.getsockname()[1]),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            connection, peer = server.accept()
            with connection:
                connection.sendall(b"hello")
            assert client.communicate(timeout=SECONDS)[0] == "hello\n" and peer[0] == THERE


def test_process_on_another_host_cannot_connect_without_a_configured_key(other_host: OtherHost, serving: Any) -> None:
    service, replica = serving()
    port = port_of(service.address)
    assert other_host.says_everything(f"tcp://{HERE}:{port}") == "refused ConnectionRefusedError"
    assert service.coordinator.handled.empty() and replica.hears_nothing()


def test_process_on_another_host_needs_the_configured_key(other_host: OtherHost, serving: Any, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY.hex(), encoding="ascii")
    file.chmod(0o600)
    service, replica = serving(key_file=file)
    assert service.address.startswith(f"tcp://{HERE}:")
    for keys in ("", keys_of(OTHER_KEY, OTHER_KEY), keys_of(KEY, OTHER_KEY), keys_of(OTHER_KEY, KEY)):
        assert other_host.says_everything(service.address, keys) == "silence"
    assert service.coordinator.handled.empty() and replica.hears_nothing()
    assert other_host.says_everything(service.address, keys_of(KEY, KEY)) == "answered"
    assert [service.coordinator.handled.get(timeout=SECONDS)[1] for _ in COMMANDS] == COMMANDS
