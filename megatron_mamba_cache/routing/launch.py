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

    Args:
        address: Where replicas and clients connect.
        ready: Set once all expected replicas have joined.
    """

    process: BaseProcess
    address: str
    ready: Event


def launch_coordinator(
    tokenizer: Any, port: int | None, settings: RoutingSettings, num_replicas: int
) -> LaunchedCoordinator:
    """Start a coordinator and return once it listens; it ends when clients stop the engines.

    Args:
        tokenizer: It is pickled.
        port: Tried first; None: any.
        num_replicas: To wait for before it is ready, unless the settings say another number.

    Raises:
        RuntimeError: If the process ends instead.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ready = context.Event()
    process = context.Process(
        target=_run, args=(theirs, ready, tokenizer, port, settings, num_replicas), name="inference-coordinator"
    )
    process.start()
    theirs.close()
    try:
        address = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the coordinator ended with status {process.exitcode}; its log says why") from None
    finally:
        ours.close()
    return LaunchedCoordinator(process, address, ready)


def _run(
    pipe: Connection, ready: Event, tokenizer: Any, port: int | None, settings: RoutingSettings, num_replicas: int
) -> None:
    coordinator = ServingCoordinator(pipe, tokenizer, port, settings, num_replicas)
    try:
        coordinator.wait_for_replicas()
        ready.set()
        coordinator.start()
    finally:
        coordinator.stop()
