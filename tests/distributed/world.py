"""Several ranks for a test: processes that this one starts, or those that torchrun has started, this one among them."""

import contextlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import rank_process

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300.0  # longer than collectives wait, so that ranks say what they waited for
_TAIL = 6000


def is_rank() -> bool:
    """Whether torchrun has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class SpawnedWorld:
    """Ranks in processes of their own, which live until `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes = [self._start(rank, size, port) for port in [free_port()] for rank in range(size)]
        self._replies: list[queue.Queue[str]] = [queue.Queue() for _ in range(size)]
        self._errors: list[list[str]] = [[] for _ in range(size)]
        for rank, process in enumerate(self._processes):
            _in_thread(process.stdout, self._replies[rank].put)
            _in_thread(process.stderr, self._errors[rank].append)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function of a module on every rank; return what it returned on each.

        Raises:
            AssertionError: With the tracebacks of the ranks that failed, or what those wrote that do not answer.
        """
        request = f"{function.__module__}:{function.__name__} {pickle.dumps(arguments).hex()}\n"
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
        end = time.monotonic() + TIMEOUT_S
        replies = [self._reply(rank, end) for rank in range(self.size)]
        failures = [f"rank {rank}:\n{reply}" for rank, (succeeded, reply) in enumerate(replies) if not succeeded]
        if failures:
            self.close()  # the others may be anywhere
            raise AssertionError("\n".join(failures))
        return [reply for _, reply in replies]

    @property
    def is_closed(self) -> bool:
        """Whether the ranks are gone."""
        return not self._processes

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []

    def _start(self, rank: int, size: int, port: int) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(REPOSITORY), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if not rank_process.has_devices(size):
            environment["CUDA_VISIBLE_DEVICES"] = ""  # gloo sends nothing that lies on a device
        return subprocess.Popen(
            [sys.executable, "-m", rank_process.__name__, str(rank), str(size), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def _reply(self, rank: int, end: float) -> tuple[bool, Any]:
        while time.monotonic() < end:
            try:
                return pickle.loads(bytes.fromhex(self._replies[rank].get(timeout=1.0)))
            except queue.Empty:
                if self._processes[rank].poll() is not None:
                    break
        self._processes[rank].send_signal(rank_process.TELL_WHERE)
        time.sleep(1.0)
        return False, "no answer; it wrote " + "".join(self._errors[rank])[-_TAIL:]


class JoinedWorld:
    """The ranks that torchrun has started, this process among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        if not dist.is_initialized():
            rank_process.start(int(os.environ["RANK"]), size, "env://")

    is_closed = False

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function here, as the other ranks do; return what it returned on each of them."""
        replies: list[Any] = [None] * self.size
        dist.all_gather_object(replies, function(*arguments))
        return replies

    def close(self) -> None:
        """Leave the world."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Worlds:
    """One world of each size, started when it is first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, SpawnedWorld | JoinedWorld] = {}

    def of(self, size: int) -> SpawnedWorld | JoinedWorld:
        """Return a world; under torchrun of another size the test is skipped."""
        joined = int(os.environ.get("WORLD_SIZE", "1"))
        if is_rank() and joined != size:
            pytest.skip(f"needs {size} ranks, torchrun has started {joined}")
        if size not in self._worlds or self._worlds[size].is_closed:
            self._worlds[size] = JoinedWorld(size) if is_rank() else SpawnedWorld(size)
        return self._worlds[size]

    def close(self) -> None:
        """Close them all."""
        for world in self._worlds.values():
            world.close()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _in_thread(lines: Any, take: Callable[[str], object]) -> None:
    threading.Thread(target=lambda: [take(line) for line in lines], daemon=True).start()
