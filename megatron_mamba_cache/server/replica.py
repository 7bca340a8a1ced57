"""Run a replica's engine in a thread of the front end's process, or in a separate process."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import torch

from ..mcore.engine import MambaCacheEngine
from ..replicas.settings import RoutingSettings


class ReplicaThread:
    """Thread that starts a coordinator and runs a replica's engine for it; nothing else uses the engine."""

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
        """Start the thread; return the coordinator's address once all replicas have joined.

        Until the engine is warm, which may take minutes, SIGTERM ends the process as usual; then it is ignored until
        the replicas have joined. Raise `RuntimeError` if the engine fails.
        """
        with _ignored(signal.SIGINT):  # the coordinator inherits this, so it outlives the engines
            self._thread.start()
            self._is_warm.wait()
            with _ignored(signal.SIGTERM):
                self._may_join.set()
                self._has_begun.wait()
        if self._address is None:
            raise RuntimeError("the engine could not join a coordinator") from self._error
        return self._address

    def join(self, timeout_s: float) -> bool:
        """Wait until the engine has stopped; return True if it stopped in time and without an error."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._error is None

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            asyncio.run(_serve(self._engine, self._routing, self._wait_to_join, self._note))
        except BaseException as error:  # Megatron's loop raises SystemExit for its errors
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
    """Run a replica's engine for the first process's coordinator until the coordinator stops the engines.

    The first process handles signals. Until the engine is warm, SIGTERM ends this process as usual.
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
