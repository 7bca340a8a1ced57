"""The ranks of a test: processes that this one starts, or torchrun's, of which this is one."""

import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import rank_process
from tests.fork_server import fork_server

TIMEOUT_S = 300.0  # longer than collectives wait, so that ranks say what they waited for
GRACE_S = 10.0  # for the other ranks, once one has failed: they may wait for it
_TAIL = 6000


def is_rank() -> bool:
    """True if torchrun has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class SpawnedWorld:
    """Ranks in their own processes, which run until `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._logs = tempfile.TemporaryDirectory()
        self._requests: list[Connection] = []
        self._processes: list[BaseProcess] = []
        port = free_port()
        for rank in range(size):
            self._start(rank, port)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function of a module on every rank; return its results.

        Raises:
            AssertionError: With the tracebacks of the ranks that failed, or what those wrote that do not answer.
        """
        for requests in self._requests:
            with contextlib.suppress(BrokenPipeError):
                requests.send((f"{function.__module__}:{function.__name__}", arguments))
        replies = self._replies()
        silent = [rank for rank in range(self.size) if rank not in replies]
        failures = [f"rank {rank}:\n{reply}" for rank, (succeeded, reply) in replies.items() if not succeeded]
        failures += [f"rank {rank}:\nno answer; it wrote {self._where(rank)}" for rank in silent]
        if failures:
            self.close()  # the others may be anywhere
            raise AssertionError("\n".join(failures))
        return [replies[rank][1] for rank in range(self.size)]

    @property
    def is_closed(self) -> bool:
        """True if the ranks have ended."""
        return not self._processes

    def close(self) -> None:
        """End the processes."""
        for process, requests in zip(self._processes, self._requests, strict=True):
            process.kill()
            process.join()
            requests.close()
        self._processes, self._requests = [], []
        self._logs.cleanup()

    def _start(self, rank: int, port: int) -> None:
        # What is forked cannot use a device: the process that it is a fork of may have looked for one.
        context = multiprocessing.get_context("spawn") if rank_process.has_devices(self.size) else fork_server()
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_process.main, args=(rank, self.size, port, theirs, self._log(rank)))
        process.start()
        theirs.close()  # so that its end is heard
        self._requests.append(ours)
        self._processes.append(process)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"{rank}.log"

    def _replies(self) -> dict[int, tuple[bool, Any]]:
        """Return the replies that came in time: of all ranks, or those until soon after the first failure."""
        replies: dict[int, tuple[bool, Any]] = {}
        waiting = {requests: rank for rank, requests in enumerate(self._requests)}
        end = time.monotonic() + TIMEOUT_S
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            for requests in ready:
                rank = waiting.pop(requests)
                try:
                    replies[rank] = requests.recv()
                except (EOFError, ConnectionResetError):
                    replies[rank] = False, f"it ended, and wrote {self._log(rank).read_text()[-_TAIL:]}"
                if not replies[rank][0]:
                    end = min(end, time.monotonic() + GRACE_S)
            if not ready:
                break
        return replies

    def _where(self, rank: int) -> str:
        """Return the last part of a rank's output, which ends with the stacks of its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, rank_process.TELL_WHERE)
        time.sleep(1.0)
        return self._log(rank).read_text()[-_TAIL:]


class JoinedWorld:
    """The ranks that torchrun has started, this process among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        if not dist.is_initialized():
            rank_process.start(int(os.environ["RANK"]), size, "env://")

    is_closed = False

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function here, like the other ranks; return the results of all."""
        replies: list[Any] = [None] * self.size
        dist.all_gather_object(replies, function(*arguments))
        return replies

    def close(self) -> None:
        """Destroy this process's process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Worlds:
    """One world of each size, started at its first use."""

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
        """Close all groups of ranks."""
        for world in self._worlds.values():
            world.close()


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
