"""Access rules for a coordinator: local processes only, holders of a key, or any process on the network."""

import hashlib
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from .channels import Channel, CurveChannel
from .coordinator_secrets import JoiningSecret

_LOOPBACK = "127.0.0.1"
REMEDY = (
    "give all of them --coordinator-key-file FILE (made with: (umask 077; openssl rand -hex 32 > FILE); from Python "
    "RoutingSettings(key_file=...)), or --insecure-coordinator (insecure=True) on a network that you trust"
)


@dataclass(frozen=True, slots=True)
class Admission:
    """Proof that a coordinator requires of its replicas, and the function that revokes it.

    Args:
        proof: Proof that a replica's hello must contain.
        end: Function to call when the coordinator ends.
    """

    proof: str
    end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Joining:
    """Proof and channel with which a replica joins a coordinator.

    Args:
        proof: Proof to send in the hello.
        channel: Channel for connections between ranks.
    """

    proof: str
    channel: Channel


class Access:
    """Base of the access rules for the sockets of a coordinator, its replicas and its front end.

    The base class admits every peer that the channel admits, from any host.

    Args:
        host: Name or address of the interface to which sockets bind.
        fingerprint: Equal in processes that can communicate; it does not reveal the secret.
    """

    def __init__(self, host: str, channel: Channel, fingerprint: str) -> None:
        self.host = host
        self.channel = channel
        self.fingerprint = fingerprint

    def check_hosts(self, hosts: Collection[str]) -> None:
        """Raise `ValueError` if ranks on these hosts cannot reach each other's sockets."""

    def check_address(self, address: str) -> None:
        """Raise `ValueError` if no coordinator under these rules can have this address."""

    def open_for_replicas(self, port: int) -> Admission:
        """Allow replicas to join the coordinator that listens on a port."""
        return Admission("", lambda: None)  # the channel already authenticates the replica

    def joining(self, port: int) -> Joining:
        """Return the proof and channel for joining the coordinator on a port; raise `ConnectionError` without one."""
        return Joining("", self.channel)


class LoopbackAccess(Access):
    """Rules for loopback only: any local process may be a client; only the user's processes may be replicas."""

    def __init__(self) -> None:
        super().__init__(_LOOPBACK, Channel(), "loopback")

    def check_hosts(self, hosts: Collection[str]) -> None:
        if len(set(hosts)) > 1:
            raise ValueError(
                f"the ranks run on {len(set(hosts))} hosts, but without a key the coordinator listens on loopback "
                f"only: {REMEDY}"
            )

    def check_address(self, address: str) -> None:
        host = address.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
        if not _is_loopback(host):
            raise ValueError(
                f"the coordinator's address {address} is not on loopback, but without a key it can listen "
                f"only on loopback: {REMEDY}"
            )

    def open_for_replicas(self, port: int) -> Admission:
        secret = JoiningSecret.create(port)
        return Admission(_proof_of(secret.value), secret.remove)

    def joining(self, port: int) -> Joining:
        secret = JoiningSecret.read(port).value
        return Joining(_proof_of(secret), CurveChannel(secret) if zmq.has("curve") else Channel())


class KeyedAccess(Access):
    """Rules for a secret: its holders have full access from any host; other peers fail the handshake."""

    def __init__(self, secret: bytes) -> None:
        digest = hashlib.blake2b(secret, digest_size=8, person=b"fingerprint")
        super().__init__(socket.gethostname(), CurveChannel(secret), digest.hexdigest())


class InsecureAccess(Access):
    """Rules without protection: any process that can reach the ports has full access."""

    def __init__(self) -> None:
        super().__init__(socket.gethostname(), Channel(), "insecure")


def port_of(address: str) -> int:
    """Return the port in an address such as "tcp://host:5555"; raise `ValueError` if it has no port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal():
        raise ValueError(f"the coordinator's address is {address!r}; it must look like tcp://host:5555")
    return int(port)


def _is_loopback(host: str) -> bool:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(address.startswith("127.") or address == "::1" for address in found)


def _proof_of(secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=32, person=b"proof").hexdigest()
