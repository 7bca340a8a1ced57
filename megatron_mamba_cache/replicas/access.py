"""Access rules for a coordinator: they admit local processes only, holders of a key, or any process."""

import hashlib
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from .channels import Channel, CurveChannel
from .coordinator_secrets import JoiningSecret

_LOOPBACK = "127.0.0.1"
REMEDY = (
    "give all processes --coordinator-key-file FILE (made with: (umask 077; openssl rand -hex 32 > FILE); from Python "
    "RoutingSettings(key_file=...)), or --insecure-coordinator (insecure=True) on a network that you trust"
)


@dataclass(frozen=True, slots=True)
class Admission:
    """Proof of identity that a coordinator requires from joining replicas, and the function that revokes it.

    Args:
        proof: Value of `Hello.proof` that the coordinator accepts; "" if the channel authenticates replicas.
        end: Function to call when the coordinator ends, so that no further replica can join.
    """

    proof: str
    end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Joining:
    """Credentials that a replica uses to join a coordinator.

    Args:
        proof: Value to send as `Hello.proof`.
        channel: Security of the connections between the replica's ranks.
    """

    proof: str
    channel: Channel


class Access:
    """Base class of the rules that decide which processes may connect to a coordinator and its replicas.

    The base class accepts peers on any host that pass the channel's handshake.

    Args:
        host: Name or address of the interface to which sockets bind.
        fingerprint: Text that is equal in all processes with the same rules and secret; it does not reveal the secret.
    """

    def __init__(self, host: str, channel: Channel, fingerprint: str) -> None:
        self.host = host
        self.channel = channel
        self.fingerprint = fingerprint

    def check_hosts(self, hosts: Collection[str]) -> None:
        """Raise `ValueError` if ranks on these hosts cannot reach each other's sockets."""

    def check_address(self, address: str) -> None:
        """Raise `ValueError` if a coordinator with these rules cannot listen on this address."""

    def open_for_replicas(self, port: int) -> Admission:
        """Allow replicas to join the coordinator that listens on `port`; return the proof that they must send."""
        return Admission("", lambda: None)  # the channel already authenticates the replica

    def joining(self, port: int) -> Joining:
        """Return the credentials for the coordinator on `port`; raise `ConnectionError` if none can be found."""
        return Joining("", self.channel)


class LoopbackAccess(Access):
    """Rules for one host: any local process may be a client, but only processes of the same user may be replicas."""

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
    """Rules for a shared secret: processes that have it get full access from any host; others cannot connect."""

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
