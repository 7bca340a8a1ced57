"""Heartbeats of ZMQ sockets, and optional CURVE encryption with keys derived from one secret."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000


class Channel:
    """Security of a connection's two sockets; the base class neither authenticates peers nor encrypts."""

    def secure_listener(self, socket: zmq.Socket[Any]) -> None:
        """Configure the listening socket of a connection; call before it binds."""

    def secure_connection(self, socket: zmq.Socket[Any]) -> None:
        """Configure the connecting socket of a connection; call before it connects."""

    def admit_clients(self, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
        """Start to check the keys of clients that connect to this context; return a function that stops the check."""
        return lambda: None


@dataclass(frozen=True, slots=True)
class KeyPair:
    """CURVE key pair, with both keys in Z85 encoding."""

    public: bytes
    secret: bytes

    @classmethod
    def derive(cls, secret: bytes, purpose: bytes) -> Self:
        """Derive a key pair from a secret and a purpose of at most 16 bytes."""
        encoded = z85.encode(hashlib.blake2b(secret, digest_size=32, person=purpose).digest())
        return cls(zmq.curve_public(encoded), encoded)


class CurveChannel(Channel):
    """Channel encrypted with CURVE keys derived from one secret; peers without the secret fail the handshake."""

    def __init__(self, secret: bytes) -> None:
        if not zmq.has("curve"):
            raise ModuleNotFoundError(
                "a coordinator key needs a pyzmq with CURVE; install one: pip install --force-reinstall pyzmq"
            )
        self._server = KeyPair.derive(secret, b"server")
        self._client = KeyPair.derive(secret, b"client")

    def secure_listener(self, socket: zmq.Socket[Any]) -> None:
        """Set the server's keys, so that only clients that have the secret can complete the handshake."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._server.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server.secret)

    def secure_connection(self, socket: zmq.Socket[Any]) -> None:
        """Set the client's keys, so that the handshake succeeds only with a server that has the same secret."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._client.secret)

    def admit_clients(self, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=self)
        return authenticator.stop

    def callback(self, _domain: str, client_key: bytes) -> bool:
        """Return True if a client's public key is the one derived from the secret; called by pyzmq."""
        return client_key == self._client.public


def set_heartbeats(socket: zmq.Socket[Any]) -> None:
    """Make a socket ping its peers every second and close a connection after 5 s without an answer.

    Call this before the socket binds or connects, on both sides: libzmq ignores the timeout that a peer requests
    (`HEARTBEAT_TTL`) as soon as the peer sends any other message.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
