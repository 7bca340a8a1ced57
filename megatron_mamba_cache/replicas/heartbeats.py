"""Heartbeat settings, the same on both sides of a connection."""

from typing import Any

import zmq

_INTERVAL_MS = 1000
_SILENCE_MS = 5000


def set_heartbeats(socket: zmq.Socket[Any]) -> None:
    """Make ZMQ's I/O thread ping the peer every second, and close a connection that stays silent for 5 s.

    Call it before the socket binds or connects. Both sides need it: libzmq drops the timeout that a peer asks for
    (`HEARTBEAT_TTL`) as soon as that peer sends anything else.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, _INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
