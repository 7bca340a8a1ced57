"""How a socket's connections are protected: not at all, or by CURVE with keys that follow from one secret."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85


class Channel(Protocol):
    """What the two ends of a connection do before they bind or connect."""

    def secure_listener(self, socket: zmq.Socket) -> None:
        """Prepare a socket that will bind."""

    def secure_connection(self, socket: zmq.Socket) -> None:
        """Prepare a socket that will connect."""

    def admit_clients(self, context: zmq.Context) -> Callable[[], None]:
        """Begin to check the keys of clients that connect to this context's sockets; return what ends it."""


class PlainChannel:
    """Whatever reaches the port is served."""

    def secure_listener(self, socket: zmq.Socket) -> None:
        """Do nothing."""

    def secure_connection(self, socket: zmq.Socket) -> None:
        """Do nothing."""

    def admit_clients(self, context: zmq.Context) -> Callable[[], None]:
        """Do nothing."""
        return lambda: None


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair of CURVE, both in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def derive(cls, secret: bytes, purpose: bytes) -> Self:
        """Return the pair that follows from a secret for a purpose of at most 16 bytes."""
        encoded = z85.encode(hashlib.blake2b(secret, digest_size=32, person=purpose).digest())
        return cls(zmq.curve_public(encoded), encoded)


class CurveChannel:
    """Both ends know one secret: neither a client's connection nor a server that lacks it gets past the handshake.

    Raises:
        ModuleNotFoundError: If libzmq was built without CURVE.
    """

    def __init__(self, secret: bytes) -> None:
        if not zmq.has("curve"):
            raise ModuleNotFoundError("this pyzmq has no CURVE, which keys need: pip install --force-reinstall pyzmq")
        self._server = KeyPair.derive(secret, b"server")
        self._client = KeyPair.derive(secret, b"client")

    def secure_listener(self, socket: zmq.Socket) -> None:
        """Let it take only connections that know the server's public key, which is as secret as the secret."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._server.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server.secret)

    def secure_connection(self, socket: zmq.Socket) -> None:
        """Let it speak only with a server of this secret."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._client.secret)

    def admit_clients(self, context: zmq.Context) -> Callable[[], None]:
        """Refuse all other keys; see `Channel`."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=self)
        return authenticator.stop

    def callback(self, _domain: str, client_key: bytes) -> bool:
        """Return whether a client's public key is the one of this secret; the authenticator asks."""
        return client_key == self._client.public
