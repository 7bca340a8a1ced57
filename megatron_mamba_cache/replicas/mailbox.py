"""Coordinator's socket, with limits on message size and log lines."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import zmq

from .access import Access, port_of
from .channels import set_heartbeats

logger = logging.getLogger(__name__)

_LINGER_MS = 5000
_HANDSHAKE_MS = 10_000
_MOST_UNREAD = 1000
_MOST_UNSENT = 65_536
"""Queued messages per connection; a peer that stops reading is disconnected."""
_MOST_MESSAGES_A_ROUND = 1000
_MOST_LINES_A_ROUND = 20


class Mailbox:
    """Socket that receives messages from replicas and clients, and sends messages to them.

    Args:
        port: Preferred port; another free port is used if it is taken. None: any free port.
        max_message_bytes: Maximum size of one frame; a connection that announces a larger frame is closed.
    """

    def __init__(self, port: int | None, access: Access, max_message_bytes: int) -> None:
        self._num_ignored = 0
        with ExitStack() as undo:
            self.context = zmq.Context()
            undo.callback(self.context.destroy, linger=0)
            self._end_admitting = access.channel.admit_clients(self.context)
            undo.callback(self._end_admitting)  # registered before the context, which waits for its sockets
            self.socket = _listening_router(self.context, port, access, max_message_bytes)
            self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            admission = access.open_for_replicas(port_of(self.address))
            undo.pop_all()
        self._end_joining, self.proof = admission.end, admission.proof

    def receive(self, wait_s: float) -> Iterator[list[bytes]]:
        """Wait for messages and yield the frames of each message that has arrived."""
        if not self.socket.poll(int(wait_s * 1000) + 1):
            return
        for _ in range(_MOST_MESSAGES_A_ROUND):
            try:
                yield self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def send(self, identity: bytes, message: bytes) -> None:
        """Send a message; raise `zmq.ZMQError` if the peer is not connected or does not read."""
        self.socket.send_multipart([identity, message], zmq.NOBLOCK)

    def ignore(self, sender: bytes, error: Exception) -> None:
        """Log an ignored message."""
        self._num_ignored += 1
        if self._num_ignored <= _MOST_LINES_A_ROUND:
            logger.warning("ignored a message of %r: %s: %s", sender, type(error).__name__, error)

    def summarize(self) -> None:
        """Log the number of messages that were ignored without a log line since the last call."""
        if self._num_ignored > _MOST_LINES_A_ROUND:
            logger.warning("ignored %s more messages", self._num_ignored - _MOST_LINES_A_ROUND)
        self._num_ignored = 0

    def close(self) -> None:
        """Send pending messages and close all connections."""
        self._end_joining()
        self.socket.close()
        self._end_admitting()
        self.context.term()


def _listening_router(
    context: zmq.Context[zmq.Socket[bytes]], port: int | None, access: Access, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """Return a ROUTER socket that is bound to `port`, or to any free port if it is taken."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # makes a send to a disconnected peer raise
    router.setsockopt(zmq.SNDHWM, _MOST_UNSENT)
    router.setsockopt(zmq.RCVHWM, _MOST_UNREAD)
    router.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    router.setsockopt(zmq.LINGER, _LINGER_MS)
    set_heartbeats(router)
    access.channel.secure_listener(router)
    host = f"tcp://{access.host}"
    try:
        if port is not None:
            router.bind(f"{host}:{port}")
    except zmq.ZMQError as error:
        logger.warning("port %s is not available (%s); using another one", port, error)
        port = None
    if port is None:
        router.bind_to_random_port(host)
    return router
