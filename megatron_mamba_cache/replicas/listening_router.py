"""The socket that replicas and clients connect to."""

import logging

import zmq

from .access import Access
from .heartbeats import set_heartbeats

logger = logging.getLogger(__name__)

_LINGER_MS = 5000
_HANDSHAKE_MS = 10_000
_MOST_UNREAD = 1000
_MOST_UNSENT = 65_536
"""Messages per connection. A peer that sends too fast waits; one that stops reading counts as disconnected."""


def listening_router(
    context: zmq.Context[zmq.Socket[bytes]], port: int | None, access: Access, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """Return a router that listens on a port of the access's interface; on any free port if it is None or taken.

    Args:
        max_message_bytes: Most bytes of one frame; a connection that announces more is closed.
    """
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected peer raises
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
