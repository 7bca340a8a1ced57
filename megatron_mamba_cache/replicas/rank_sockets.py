"""Sockets between the ranks of a replica, and between ranks that share experts.

Megatron binds its own to the hostname's interface, sends every prompt over them to any subscriber, and waits forever
for a rank that has ended.
"""

import time
from typing import Any

import zmq

from .channels import Channel
from .replica_link import ReplicaLink

_LINGER_MS = 1000
_POLL_MS = 100


class RankSocket(zmq.Socket[bytes]):
    """A socket that binds to its context's interface and uses its channel."""

    context: "RankContext"

    def bind(self, address: str) -> Any:
        """Bind to the same port of the context's interface."""
        self.context.channel.secure_listener(self)
        return super().bind(f"tcp://{self.context.host}:{address.rsplit(':', 1)[1]}")

    def connect(self, address: str) -> Any:
        """Connect, except to the coordinator: a `ReplicaLink` replaces that socket."""
        if self.type == zmq.DEALER:
            return super().connect("inproc://replaced")
        self.context.channel.secure_connection(self)
        return super().connect(address)

    def wait_for_subscribers(self, num_subscribers: int, timeout_s: float) -> None:
        """Wait until `num_subscribers` ranks have subscribed; raise `ConnectionError` after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while num_subscribers:
            if self.poll(_POLL_MS):
                num_subscribers -= self.recv() == b"\x01"
            elif time.monotonic() > end:
                raise ConnectionError(
                    f"{num_subscribers} ranks of this replica have not subscribed to "
                    f"{self.getsockopt_string(zmq.LAST_ENDPOINT)} within {timeout_s:g} s; see why they did not start"
                )


class RankContext(zmq.Context[RankSocket]):
    """Makes the sockets of Megatron's engine.

    Args:
        host: Interface on which they listen.
        max_message_bytes: Most bytes of one frame; a connection that announces more is closed.
    """

    host: str = ""
    channel: Channel
    max_message_bytes: int = -1
    publishers: list[RankSocket] = []  # noqa: RUF012 - zmq takes attributes that the class lacks for options

    def __init__(self, host: str, channel: Channel, max_message_bytes: int) -> None:
        super().__init__()
        self.host = host
        self.channel = channel
        self.max_message_bytes = max_message_bytes
        self.publishers = []

    def wait_for_ranks(self, num_members: int, num_experts: int, timeout_s: float) -> None:
        """Wait until all ranks receive this rank's messages; call it before publishing.

        Args:
            num_members, num_experts: Ranks of the replica, and ranks that share its experts.

        Raises:
            ConnectionError: If that takes longer than `timeout_s`.
        """
        of_replica, of_experts = self.publishers[:2], self.publishers[2:]  # in Megatron's order of creation
        for publisher in of_replica:
            publisher.wait_for_subscribers(num_members, timeout_s)
        for publisher in of_experts:
            publisher.wait_for_subscribers(num_experts - 1, timeout_s)

    def socket(self, socket_type: int, socket_class: Any = RankSocket, **settings: Any) -> Any:
        """Return a socket; an XPUB instead of a PUB, since it reports subscribers."""
        is_publisher = socket_type == zmq.PUB
        made = super().socket(zmq.XPUB if is_publisher else socket_type, socket_class, **settings)
        if is_publisher:
            self.publishers.append(made)
            made.setsockopt(zmq.XPUB_VERBOSE, 1)  # report every subscription, repeated ones included
        made.setsockopt(zmq.MAXMSGSIZE, self.max_message_bytes)
        made.setsockopt(zmq.LINGER, _LINGER_MS)
        return made


class PeerSocket:
    """A socket of Megatron's engine that fails if the rank it waits for has ended.

    The coordinator notices the death and notifies all ranks that cannot go on.

    Args:
        socket: The socket to read; closed with this one.
        link: This rank's link to the coordinator; checked while no message arrives.
    """

    def __init__(self, socket: zmq.Socket[bytes], link: ReplicaLink) -> None:
        self._socket = socket
        self._link = link

    def recv(self, flags: int = 0) -> bytes:
        """Return the next message.

        Raises:
            zmq.Again: If there is none, with `zmq.NOBLOCK`.
            ReplicaFencedError: If the coordinator has declared this replica dead, or is gone.
        """
        self._wait(flags)
        message: bytes = self._socket.recv(flags)
        return message

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        """Return the parts of the next message; raises as `recv`."""
        self._wait(flags)
        parts: list[bytes] = self._socket.recv_multipart(flags)
        return parts

    def send(self, message: bytes) -> None:
        self._socket.send(message)

    def close(self) -> None:
        self._socket.close()

    def _wait(self, flags: int) -> None:
        """Return once there is a message, or at once with `zmq.NOBLOCK`."""
        while not self._socket.poll(0 if flags & zmq.NOBLOCK else _POLL_MS):
            self._link.check()
            if flags & zmq.NOBLOCK:
                return
