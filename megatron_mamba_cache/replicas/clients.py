"""Clients for a coordinator: Megatron's, extended by aborts and by the coordinator's key."""

import asyncio
import os
from collections.abc import Iterable

import msgpack
import zmq
from megatron.core.inference.inference_client import InferenceClient

from ..mcore.pausable_engine import GeneratedTokens
from .channels import CurveChannel
from .coordinator_secrets import read_key_file
from .front_end import ABORT


class ReplicaClient(InferenceClient):
    """Megatron's `InferenceClient` with the operations of one engine for all replicas; they may be repeated."""

    async def pause(self) -> None:
        """Pause all replicas and wait until they have: `PausableEngine.pause`."""
        await self.pause_engines()

    def resume_generation(self) -> None:
        """Let all replicas continue after `pause`."""
        self.unpause_engines()

    async def abort(self, request_ids: Iterable[int]) -> list[GeneratedTokens]:
        """End requests and return the tokens that each has generated; their futures get their records.

        Args:
            request_ids: Ids of this client's requests, counted from 0 in the order of `add_request`. An id of a request
                that has ended has no tokens.
        """
        asked = list(request_ids)
        running = {
            request_id: self.completion_futures[request_id]
            for request_id in asked
            if request_id in self.completion_futures
        }
        if running:
            self.socket.send(msgpack.packb([ABORT, list(running)]))
            await asyncio.wait(running.values())
        return [
            GeneratedTokens.of(running[request_id].result()) if request_id in running else GeneratedTokens([], [])
            for request_id in asked
        ]


class KeyedInferenceClient(ReplicaClient):
    """Client with a connection that is secured by a key file.

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
