"""Sockets between the ranks of a replica, and between expert-parallel ranks.

Megatron binds its sockets to the hostname's interface, sends every prompt to any subscriber, and waits forever for a
rank that has ended.
"""

import time
from typing import Any

import zmq

from .channels import Channel
from .replica_link import ReplicaLink

_LINGER_MS = 1000
_POLL_MS = 100


class RankSocket(zmq.Socket[bytes]):
    """Socket that uses the interface and channel of its context."""

    context: "RankContext"

    def bind(self, address: str) -> Any:
        """Bind to the port in `address`, but on the context's interface."""
        self.context.channel.secure_listener(self)
        return super().bind(f"tcp://{self.context.host}:{address.rsplit(':', 1)[1]}")

    def connect(self, address: str) -> Any:
        """Connect, except to the coordinator, for which a `ReplicaLink` is used."""
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
                    f"{self.getsockopt_string(zmq.LAST_ENDPOINT)} within {timeout_s:g} s; see their logs"
                )


class RankContext(zmq.Context[RankSocket]):
    """ZMQ context that creates the sockets for Megatron's engine.

    Args:
        host: Interface to which the sockets bind.
        max_message_bytes: Maximum size of one frame; a connection that announces a larger frame is closed.
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
        """Wait until all ranks have subscribed to this rank; call it before publishing.

        Args:
            num_members, num_experts: Number of ranks in the replica, and expert-parallel size.

        Raises:
            ConnectionError: If a rank has not subscribed within `timeout_s`.
        """
        of_replica, of_experts = self.publishers[:2], self.publishers[2:]  # in Megatron's order of creation
        for publisher in of_replica:
            publisher.wait_for_subscribers(num_members, timeout_s)
        for publisher in of_experts:
            publisher.wait_for_subscribers(num_experts - 1, timeout_s)

    def socket(self, socket_type: int, socket_class: Any = RankSocket, **settings: Any) -> Any:
        """Return a new socket, with XPUB instead of PUB because XPUB reports subscribers."""
        is_publisher = socket_type == zmq.PUB
        made = super().socket(zmq.XPUB if is_publisher else socket_type, socket_class, **settings)
        if is_publisher:
            self.publishers.append(made)
            made.setsockopt(zmq.XPUB_VERBOSE, 1)  # report every subscription, including repetitions
        made.setsockopt(zmq.MAXMSGSIZE, self.max_message_bytes)
        made.setsockopt(zmq.LINGER, _LINGER_MS)
        return made


class PeerSocket:
    """Socket that raises instead of waiting for a rank that has ended.

    The coordinator detects the end of a rank and notifies all ranks that cannot continue.

    Args:
        socket: Socket to read; it is closed together with this socket.
        link: Link to the coordinator, which is checked while no message arrives.
    """

    def __init__(self, socket: zmq.Socket[bytes], link: ReplicaLink) -> None:
        self._socket = socket
        self._link = link

    def recv(self, flags: int = 0) -> bytes:
        """Return the next message.

        Raises:
            zmq.Again: If there is no message and `flags` has `zmq.NOBLOCK`.
            ReplicaFencedError: If the coordinator has ended or has declared this replica dead.
        """
        self._wait(flags)
        message: bytes = self._socket.recv(flags)
        return message

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        """Return the frames of the next message; raise like `recv`."""
        self._wait(flags)
        parts: list[bytes] = self._socket.recv_multipart(flags)
        return parts

    def send(self, message: bytes) -> None:
        self._socket.send(message)

    def close(self) -> None:
        self._socket.close()

    def _wait(self, flags: int) -> None:
        """Wait until there is a message; with `zmq.NOBLOCK`, return immediately."""
        while not self._socket.poll(0 if flags & zmq.NOBLOCK else _POLL_MS):
            self._link.check()
            if flags & zmq.NOBLOCK:
                return
