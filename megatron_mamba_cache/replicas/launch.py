"""Run a coordinator in a process of its own."""

import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

from .serving_coordinator import ServingCoordinator
from .settings import RoutingSettings


@dataclass(frozen=True, slots=True)
class LaunchedCoordinator:
    """A coordinator's process.

    It outlives this process, which does not wait for it at exit, as long as replicas or clients are there.

    Args:
        address: Where replicas and clients connect.
        ready: Set once all expected replicas have joined.
        presence: Open while this process takes part.
    """

    process: BaseProcess
    address: str
    ready: Event
    presence: Connection

    def leave(self) -> None:
        """Let it end as soon as neither replicas nor clients are there; so does the end of this process."""
        self.presence.close()


def launch_coordinator(
    tokenizer: Any, port: int | None, settings: RoutingSettings, num_replicas: int
) -> LaunchedCoordinator:
    """Start a coordinator and return once it listens.

    It ends when clients stop the engines, or when this process has left it and nobody else is there.

    Args:
        tokenizer: It is pickled.
        port: Tried first; None: any.
        num_replicas: To wait for before it is ready, unless the settings say another number.

    Raises:
        RuntimeError: If the process ends instead.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    starter, presence = context.Pipe(duplex=False)
    ready = context.Event()
    process = context.Process(
        target=_run,
        args=(theirs, starter, ready, tokenizer, port, settings, num_replicas),
        name="inference-coordinator",
    )
    process.start()
    # Or this process would wait for it at exit, and it for the end of this process.
    multiprocessing.process._children.discard(process)
    theirs.close()
    starter.close()
    try:
        address = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the coordinator ended with status {process.exitcode}; its log says why") from None
    finally:
        ours.close()
    return LaunchedCoordinator(process, address, ready, presence)


def _run(
    pipe: Connection,
    starter: Connection,
    ready: Event,
    tokenizer: Any,
    port: int | None,
    settings: RoutingSettings,
    num_replicas: int,
) -> None:
    # Nothing is ever sent there: what can be read is its end.
    coordinator = ServingCoordinator(pipe, tokenizer, port, settings, num_replicas, starter.poll)
    try:
        coordinator.wait_for_replicas()
        ready.set()
        coordinator.start()
    finally:
        coordinator.stop()
