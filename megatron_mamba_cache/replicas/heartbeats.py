"""How long a connection may be silent, the same on both sides."""

import zmq

_INTERVAL_MS = 1000
_SILENCE_MS = 5000


def set_heartbeats(socket: zmq.Socket) -> None:
    """Let ZMQ's I/O thread ask the other side for a sign of life, and close the connection that gives none for 5 s.

    Call it before the socket binds or connects. Both sides need it: libzmq forgets the patience that a peer asks for
    (`HEARTBEAT_TTL`) as soon as that peer sends anything else.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, _INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
