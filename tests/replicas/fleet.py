"""Real replicas in separate processes, a coordinator, and a client."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

import zmq
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.replicas.clients import ReplicaClient
from tests.fork_server import fork_server
from tests.replicas import replica_process

PATIENCE_S = 300  # no claim: machines that run tests can be very busy


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    """Return parameters of a greedy request that ends by length; `options` travel with them."""
    params = SamplingParams(num_tokens_to_generate=num_tokens, top_k=1, termination_id=-1)
    params.add_attributes(options)
    return params


@dataclass(slots=True)
class ReplicaProcess:
    """A started replica, or a rank of one."""

    process: BaseProcess
    reports: Connection
    name: str = ""
    listening: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, options: dict[str, Any]) -> Self:
        """Start the process without waiting until it is ready."""
        ours, theirs = fork_server().Pipe(duplex=False)
        process = fork_server().Process(target=replica_process.main, args=(options, theirs))
        process.start()
        theirs.close()  # so that its end is heard
        return cls(process, ours)

    def wait_until_ready(self) -> str:
        """Wait until the replica has joined the coordinator, and return the coordinator's address."""
        ready = self.report()
        self.name = ready["replica"]
        self.listening = ready["listening"]
        return ready["address"]

    def report(self) -> dict[str, Any]:
        """Wait for the process's next report and return it."""
        assert self.reports.poll(PATIENCE_S), f"a replica has said nothing for {PATIENCE_S} s"
        try:
            return self.reports.recv()
        except EOFError:
            self.process.join()
            raise AssertionError(f"a replica ended with status {self.process.exitcode} and without a word") from None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.process.pid, number)

    def wait_for_end(self) -> int:
        """Wait for the process to end, and return its exit status."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, f"{self.name} still runs after {PATIENCE_S} s"
        return self.process.exitcode


@dataclass(slots=True)
class Fleet:
    """Separately launched replicas, the first of which has started the coordinator."""

    replicas: list[ReplicaProcess] = field(default_factory=list)
    address: str = ""

    def launch(self, options: Sequence[dict[str, Any]], routing: dict[str, Any] | None = None) -> None:
        """Start one replica per entry of `options`, concurrently; they join the first replica's coordinator."""
        first = ReplicaProcess.start({**options[0], "routing": routing or {}})
        self.replicas.append(first)
        self.address = first.wait_until_ready()
        others = [ReplicaProcess.start({**extra, "address": self.address}) for extra in options[1:]]
        self.replicas += others
        for replica in others:
            replica.wait_until_ready()

    def launch_world(self, options: Sequence[dict[str, Any]]) -> None:
        """Start one process per entry of `options`, as the ranks of one launch."""
        self.replicas = [ReplicaProcess.start(rank) for rank in options]
        (self.address,) = {replica.wait_until_ready() for replica in self.replicas}

    def named(self, name: str) -> ReplicaProcess:
        """Return a replica by its name."""
        return next(replica for replica in self.replicas if replica.name == name)

    def wait_for_ends(self) -> list[int]:
        """Return the exit statuses of all processes."""
        return [replica.wait_for_end() for replica in self.replicas]

    def wait_until_nothing_listens(self) -> None:
        """Wait until the coordinator has ended and its port is free."""
        host, port = self.address.removeprefix("tcp://").rsplit(":", 1)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                socket.create_connection((host, int(port)), PATIENCE_S).close()
            except ConnectionRefusedError:
                return
            time.sleep(0.1)
        raise AssertionError(f"the coordinator still runs after {PATIENCE_S} s")

    def end(self) -> None:
        """End the remaining processes."""
        for replica in self.replicas:
            replica.process.kill()
            replica.process.join()
            replica.reports.close()


@dataclass(slots=True)
class Answer:
    """Reply to a client's request."""

    tokens: list[int]
    replica: str
    cached_tokens: int
    error: str
    seconds: float


class Client:
    """Client of the coordinator."""

    def __init__(self, address: str) -> None:
        self.inference = ReplicaClient(address)

    async def __aenter__(self) -> Self:
        await self.inference.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.inference.socket.setsockopt(zmq.LINGER, 0)  # or it waits for a coordinator that has gone
        self.inference.stop()

    def send(self, prompt: Any, params: SamplingParams) -> asyncio.Future[Answer]:
        """Send a request; the answer can be awaited."""
        future, start = self.inference.add_request(prompt, params), time.monotonic()

        async def answer() -> Answer:
            merged = (await future).merge()
            errors = [event.payload.message for event in merged.events if event.payload is not None]
            sampling = merged.sampling_params
            return Answer(
                list(merged.generated_tokens),
                getattr(sampling, "replica", ""),
                getattr(sampling, "cached_tokens", 0),
                errors[-1] if merged.failed() else "",
                time.monotonic() - start,
            )

        return asyncio.ensure_future(answer())
