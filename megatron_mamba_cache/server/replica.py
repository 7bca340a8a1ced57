"""Run an engine as a replica, in a thread of the front end's process or in a separate process."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import torch

from ..mcore.engine import MambaCacheEngine
from ..replicas.settings import RoutingSettings


class ReplicaThread:
    """Thread that starts the coordinator and runs an engine as its replica; no other thread uses the engine."""

    def __init__(self, engine: MambaCacheEngine, routing: RoutingSettings) -> None:
        self._engine = engine
        self._routing = routing
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._is_warm = threading.Event()
        self._may_join = threading.Event()
        self._has_begun = threading.Event()
        self._address: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> str:
        """Start the thread, wait until all replicas have joined, and return the coordinator's address.

        SIGTERM ends the process during the engine's warmup, which may take minutes. From the end of the warmup until
        all replicas have joined, SIGTERM is ignored. Raise `RuntimeError` if the engine fails.
        """
        with _ignored(signal.SIGINT):  # the coordinator's process inherits this and thus ignores Ctrl-C
            self._thread.start()
            self._is_warm.wait()
            with _ignored(signal.SIGTERM):
                self._may_join.set()
                self._has_begun.wait()
        if self._address is None:
            raise RuntimeError("the engine failed before it joined the coordinator") from self._error
        return self._address

    def join(self, timeout_s: float) -> bool:
        """Wait until the engine has stopped; return True if it stopped within `timeout_s` and without an error."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._error is None

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            asyncio.run(_serve(self._engine, self._routing, self._wait_to_join, self._note))
        except BaseException as error:  # Megatron's engine loop raises SystemExit
            self._error = error
        finally:
            self._is_warm.set()
            self._has_begun.set()

    def _wait_to_join(self) -> None:
        self._is_warm.set()
        self._may_join.wait()

    def _note(self, address: str) -> None:
        self._address = address
        self._has_begun.set()


def serve_replica(engine: MambaCacheEngine, routing: RoutingSettings) -> None:
    """Run an engine as a replica of the first process's coordinator until the coordinator stops it.

    The first process handles SIGINT and SIGTERM; this process ignores SIGINT and, after the warmup, SIGTERM.
    """
    with _ignored(signal.SIGINT), contextlib.ExitStack() as stack:
        asyncio.run(
            _serve(engine, routing, lambda: stack.enter_context(_ignored(signal.SIGTERM)), lambda _address: None)
        )


async def _serve(
    engine: MambaCacheEngine, routing: RoutingSettings, on_warm: Callable[[], None], note: Callable[[str], None]
) -> None:
    engine.warmup()
    on_warm()
    note(await engine.start_listening_to_data_parallel_coordinator(routing=routing))
    await engine.engine_loop_task


@contextlib.contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
