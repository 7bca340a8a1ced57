"""Real replicas in processes of their own, a coordinator, and a client."""

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.sampling_params import SamplingParams

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 120
END_TIMEOUT_S = 20


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    """Return parameters of a greedy request that ends by length; `options` travel with them."""
    params = SamplingParams(num_tokens_to_generate=num_tokens, top_k=1, termination_id=-1)
    params.add_attributes(options)
    return params


@dataclass(slots=True)
class ReplicaProcess:
    """A started replica."""

    process: subprocess.Popen[str]
    name: str = ""

    @classmethod
    def start(cls, options: dict[str, Any]) -> Self:
        """Start without waiting for it."""
        command = [sys.executable, "-m", "tests.routing.replica_process", json.dumps(options)]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        environment = os.environ | settings
        return cls(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True))

    def wait_until_ready(self) -> str:
        """Return the coordinator's address once the replica takes part."""
        assert self.process.stdout is not None
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if not select.select([self.process.stdout], [], [], 1.0)[0]:
                continue
            line = self.process.stdout.readline()
            assert line, f"a replica ended with status {self.process.wait()} before it took part"
            if line.startswith("{"):
                ready = json.loads(line)
                self.name = ready["replica"]
                return ready["address"]
        raise TimeoutError(f"a replica did not start within {START_TIMEOUT_S} s")


@dataclass(slots=True)
class Fleet:
    """Replicas of launches of their own, the first of which has started the coordinator."""

    replicas: list[ReplicaProcess] = field(default_factory=list)
    address: str = ""

    def launch(self, options: Sequence[dict[str, Any]], routing: dict[str, Any] | None = None) -> None:
        """Start one replica for each options; the others start while the first one does, and join once it is there."""
        first = ReplicaProcess.start({**options[0], "routing": routing or {}})
        self.replicas.append(first)
        self.address = first.wait_until_ready()
        others = [ReplicaProcess.start({**extra, "address": self.address}) for extra in options[1:]]
        self.replicas += others
        for replica in others:
            replica.wait_until_ready()

    def launch_world(self, options: Sequence[dict[str, Any]]) -> None:
        """Start the ranks of one launch."""
        self.replicas = [ReplicaProcess.start(rank) for rank in options]
        (self.address,) = {replica.wait_until_ready() for replica in self.replicas}

    def named(self, name: str) -> ReplicaProcess:
        """Return a replica by its name."""
        return next(replica for replica in self.replicas if replica.name == name)

    def wait_for_ends(self) -> list[int]:
        """Return the exit statuses of all processes."""
        return [replica.process.wait(END_TIMEOUT_S) for replica in self.replicas]

    def num_aborted_steps(self) -> list[int]:
        """Return the failed steps of each replica that was stopped; call it after `wait_for_ends`."""
        reports = [replica.process.communicate()[0] for replica in self.replicas]
        return [json.loads(report)["steps_aborted"] for report in reports if report]

    def end(self) -> None:
        """End what still runs."""
        for replica in self.replicas:
            replica.process.kill()
            replica.process.wait()


@dataclass(slots=True)
class Answer:
    """What a client gets for a request."""

    tokens: list[int]
    replica: str
    cached_tokens: int
    error: str
    seconds: float


class Client:
    """Megatron's client."""

    def __init__(self, address: str) -> None:
        self.inference = InferenceClient(address)

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
