"""An engine as a replica of a launch: in a thread beside the front end, or alone in any other process."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import torch

from ..mcore.engine import MambaCacheEngine
from ..replicas.settings import RoutingSettings


class ReplicaThread:
    """Starts a coordinator and serves it in a thread of its own.

    Args:
        engine: A `ReplicaEngine` that has no other user.
        routing: Settings of the coordinator.
    """

    def __init__(self, engine: MambaCacheEngine, routing: RoutingSettings) -> None:
        self._engine = engine
        self._routing = routing
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._has_begun = threading.Event()
        self._address: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    def start(self) -> str:
        """Start, and return the coordinator's address once all replicas have joined.

        Raises:
            RuntimeError: If the engine fails first.
        """
        with _signals_ignored():  # the coordinator inherits this, so it ends with the engines, not before
            self._thread.start()
            self._has_begun.wait()
        if self._address is None:
            raise RuntimeError("the engine could not join a coordinator") from self._error
        return self._address

    def join(self, timeout_s: float) -> bool:
        """Wait for the engine to end once the coordinator was told to stop; return whether it ended without error."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._error is None

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            asyncio.run(_serve(self._engine, self._routing, self._note))
        except BaseException as error:  # Megatron turns its loop's errors into SystemExit
            self._error = error
        finally:
            self._has_begun.set()

    def _note(self, address: str) -> None:
        self._address = address
        self._has_begun.set()


def serve_replica(engine: MambaCacheEngine, routing: RoutingSettings) -> None:
    """Serve the first process's coordinator until it stops the engines; signals are left to the first process."""
    with _signals_ignored():
        asyncio.run(_serve(engine, routing, lambda _address: None))


async def _serve(engine: MambaCacheEngine, routing: RoutingSettings, note: Callable[[str], None]) -> None:
    engine.warmup()
    note(await engine.start_listening_to_data_parallel_coordinator(routing=routing))
    await engine.engine_loop_task


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
