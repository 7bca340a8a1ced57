"""Client for a coordinator that requires a key."""

import os

import zmq
from megatron.core.inference.inference_client import InferenceClient

from .channels import CurveChannel
from .coordinator_secrets import read_key_file


class KeyedInferenceClient(InferenceClient):
    """Megatron's `InferenceClient` with a connection that is secured by a key file.

    Args:
        inference_coordinator_address: Address such as "tcp://host:5555".
        key_file: Key file of the coordinator; see `read_key_file`.

    Raises:
        ValueError: If the file is not a valid key file.
        ModuleNotFoundError: If pyzmq cannot use keys.
    """

    socket: zmq.Socket[bytes]

    def __init__(self, inference_coordinator_address: str, key_file: str | os.PathLike[str]) -> None:
        channel = CurveChannel(read_key_file(key_file))
        super().__init__("inproc://replaced")
        self.socket.close(linger=0)
        self.socket = self.context.socket(zmq.DEALER)
        channel.secure_connection(self.socket)
        self.socket.connect(inference_coordinator_address)
