"""Socket heartbeats, and optional CURVE encryption with keys derived from one secret."""

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
    """Configuration of the two ends of a connection; the base class neither checks nor encrypts."""

    def secure_listener(self, socket: zmq.Socket[Any]) -> None:
        """Configure a socket before it binds."""

    def secure_connection(self, socket: zmq.Socket[Any]) -> None:
        """Configure a socket before it connects."""

    def admit_clients(self, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
        """Start checking the keys of this context's clients; return a function that stops it."""
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
    """Channel with CURVE keys from one secret; peers without the secret fail the handshake."""

    def __init__(self, secret: bytes) -> None:
        if not zmq.has("curve"):
            raise ModuleNotFoundError(
                "pyzmq is installed without CURVE, which keys need: pip install --force-reinstall pyzmq"
            )
        self._server = KeyPair.derive(secret, b"server")
        self._client = KeyPair.derive(secret, b"client")

    def secure_listener(self, socket: zmq.Socket[Any]) -> None:
        """Accept only clients that have the secret, from which the server's public key is derived."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._server.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server.secret)

    def secure_connection(self, socket: zmq.Socket[Any]) -> None:
        """Connect only to a server that has this secret."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._client.secret)

    def admit_clients(self, context: zmq.Context[zmq.Socket[bytes]]) -> Callable[[], None]:
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=self)
        return authenticator.stop

    def callback(self, _domain: str, client_key: bytes) -> bool:
        """Return whether a client's public key is derived from this secret."""
        return client_key == self._client.public


def set_heartbeats(socket: zmq.Socket[Any]) -> None:
    """Ping the peer every second and close a connection after 5 s of silence.

    Call it on both sides before the socket binds or connects: libzmq drops the timeout that a peer requests
    (`HEARTBEAT_TTL`) as soon as the peer sends any other message.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
