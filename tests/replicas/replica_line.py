"""A replica's link, connected to a stand-in for the coordinator."""

import msgpack
import zmq

from megatron_mamba_cache.policy.routing import ReplicaName
from megatron_mamba_cache.replicas.replica_link import ReplicaLink
from megatron_mamba_cache.replicas.wire import Hello

MAX_BYTES = 4000
HELLO = Hello(ReplicaName("a"), 1, 2, "experts")


class Line:
    """A replica's link, and the socket at the coordinator's end of its connection."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.link = ReplicaLink(self.context, f"tcp://127.0.0.1:{port}", HELLO, MAX_BYTES)
        self.identity, self.hello = self.router.recv_multipart()

    def say(self, *messages: bytes) -> None:
        for message in messages:
            self.router.send_multipart([self.identity, message])
        assert self.link._socket.poll(120_000)

    def heard(self) -> list[object]:
        return msgpack.unpackb(self.router.recv_multipart()[1])
