"""Start a coordinator in a separate process."""

import faulthandler
import logging
import multiprocessing
import signal
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

from .settings import RoutingSettings

_LOGGERS = ("megatron", "torch", "torch.utils.cpp_extension", "megatron_mamba_cache")


@dataclass(frozen=True, slots=True)
class LaunchedCoordinator:
    """Handle for a coordinator's process.

    The coordinator outlives this process as long as replicas or clients are connected; this process does not wait for
    it at exit.

    Args:
        ready: Event that is set when all expected replicas have joined.
        presence: Connection that stays open as long as this process takes part.
    """

    process: BaseProcess
    address: str
    ready: Event
    presence: Connection

    def leave(self) -> None:
        """Let the coordinator end once no replica or client is connected."""
        self.presence.close()


def launch_coordinator(
    tokenizer: Any, port: int | None, settings: RoutingSettings, num_replicas: int
) -> LaunchedCoordinator:
    """Start a coordinator and return once it listens.

    The coordinator ends when clients stop the engines, or when this process has left and no replica or client is
    connected.

    Args:
        tokenizer: Picklable tokenizer.
        port: Preferred port; another free port is used if it is taken. None: any free port.
        num_replicas: Number of replicas to wait for before the coordinator is ready; `settings.num_replicas` overrides
            it.

    Raises:
        RuntimeError: If the coordinator's process ends before it listens.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    starter, presence = context.Pipe(duplex=False)
    ready = context.Event()
    process = context.Process(
        target=_run,
        args=(_Quiet.of_this_process(), theirs, starter, ready, tokenizer, port, settings, num_replicas),
        name="inference-coordinator",
    )
    process.start()
    # Otherwise this process and the coordinator would wait for each other at exit.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # private, so typeshed omits it
    theirs.close()
    starter.close()
    try:
        address = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the coordinator ended with exit status {process.exitcode}; see its log") from None
    finally:
        ours.close()
    return LaunchedCoordinator(process, address, ready, presence)


@dataclass(frozen=True, slots=True)
class _Quiet:
    """Warning filters and log levels to apply in the coordinator's process."""

    hides_warnings: bool
    levels: tuple[int, ...]

    @staticmethod
    def of_this_process() -> "_Quiet":
        hides_warnings = ("ignore", None, Warning, None, 0) in warnings.filters[:1]
        return _Quiet(hides_warnings, tuple(logging.getLogger(name).level for name in _LOGGERS))

    def apply(self) -> None:
        if self.hides_warnings:
            warnings.simplefilter("ignore")
        for name, level in zip(_LOGGERS, self.levels, strict=True):
            logging.getLogger(name).setLevel(level)


def _run(
    quiet: _Quiet,
    pipe: Connection,
    starter: Connection,
    ready: Event,
    tokenizer: Any,
    port: int | None,
    settings: RoutingSettings,
    num_replicas: int,
) -> None:
    quiet.apply()
    from .serving_coordinator import ServingCoordinator  # imported late, because Megatron emits warnings

    for number in (signal.SIGTERM, signal.SIGINT):
        faulthandler.unregister(number)  # Megatron prints a stack trace on these signals, which are harmless here
    # Nothing is sent over `starter`, so it becomes readable only when the other end closes.
    coordinator = ServingCoordinator(pipe, tokenizer, port, settings, num_replicas, starter.poll)
    try:
        coordinator.wait_for_replicas()
        ready.set()
        coordinator.start()
    finally:
        coordinator.stop()
