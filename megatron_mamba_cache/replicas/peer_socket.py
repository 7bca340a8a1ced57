"""A socket that reads from other ranks, of this replica or of its expert group, and raises when the replica is dead."""

import zmq

from .replica_link import ReplicaLink

_POLL_MS = 100


class PeerSocket:
    """Wraps a socket of Megatron's engine, which would wait forever for a rank that has ended.

    The coordinator notices the death, whatever this rank is doing, and tells all ranks that cannot go on.

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
        """Send a message."""
        self._socket.send(message)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _wait(self, flags: int) -> None:
        """Return once there is a message, or at once with `zmq.NOBLOCK`."""
        while not self._socket.poll(0 if flags & zmq.NOBLOCK else _POLL_MS):
            self._link.check()
            if flags & zmq.NOBLOCK:
                return
