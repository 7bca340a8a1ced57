"""The socket that replicas and clients connect to."""

import logging
import socket

import zmq

from .heartbeats import set_heartbeats

logger = logging.getLogger(__name__)

_LINGER_MS = 5000


def listening_router(context: zmq.Context, port: int | None) -> zmq.Socket:
    """Return a router that listens on a port of this host, or on any other if that is None or taken."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who is gone is noticed when something is sent there
    router.setsockopt(zmq.SNDHWM, 0)  # nothing is dropped, and nobody slow holds the others up
    router.setsockopt(zmq.RCVHWM, 0)
    router.setsockopt(zmq.LINGER, _LINGER_MS)
    set_heartbeats(router)
    host = f"tcp://{socket.gethostname()}"
    try:
        if port is not None:
            router.bind(f"{host}:{port}")
    except zmq.ZMQError as error:
        logger.warning("port %s cannot be had (%s); taking another one", port, error)
        port = None
    if port is None:
        router.bind_to_random_port(host)
    return router
