"""A server with the example model or a random model in this process: uvicorn and the engine in separate threads."""

import asyncio
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from megatron_mamba_cache.command_line.arguments import command_parser, select_device
from megatron_mamba_cache.command_line.model_choice import chosen_directory
from megatron_mamba_cache.command_line.quiet import quiet_libraries
from megatron_mamba_cache.command_line.server_arguments import api_keys_of
from megatron_mamba_cache.command_line.serving import Serving
from megatron_mamba_cache.server.app import Server
from megatron_mamba_cache.server.engine_thread import EngineThread
from tests.server.front_end import BLUE, RED, Listening, listening

MODEL = "small_python_model"
KEYS = ("--api-key", RED, "--api-key", BLUE)

_READY_S = 60.0
_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


def at_once(ask: Callable[[_Asked], _Answer], wishes: Sequence[_Asked]) -> list[_Answer]:
    """Send requests concurrently, so that they share the engine's steps; return the answers."""
    with ThreadPoolExecutor(len(wishes)) as threads:
        return list(threads.map(ask, wishes))


def bearer(key: str = RED) -> dict[str, str]:
    """Return the header with an API key."""
    return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Server that has started, and its engine."""

    listening: Listening
    server: Server
    backend: EngineThread

    @property
    def url(self) -> str:
        """URL of the server."""
        return self.listening.url

    def between_steps(self, act: Callable[[Any], _Answer]) -> _Answer:
        """Call `act` with the engine between two steps."""
        return asyncio.run_coroutine_threadsafe(self.backend.between_steps(act), self.listening.loop).result(60)

    def held(self) -> dict[str, int]:
        """Return the number of slots and blocks that requests hold; check the cache's integrity."""

        def look(engine: Any) -> dict[str, int]:
            engine.context.check_integrity()
            snapshot = engine.context.snapshot()
            slots = {owner: snapshot.state_slots[owner] for owner in ("live", "reserved", "draft")}
            return {**slots, "in_use": snapshot.kv_blocks["in_use"], "requests": len(engine.requests)}

        return self.between_steps(look)

    def assert_nothing_held(self) -> None:
        """Assert that no request holds resources in the engine or permits of the queue gate."""
        deadline = time.monotonic() + 10
        while self.server.gate.num_inside and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.server.gate.num_inside == 0
        assert set(self.held().values()) == {0}, self.held()

    def client(self, key: str = RED, **settings: Any) -> httpx.Client:
        """Return an HTTP client that sends an API key."""
        return httpx.Client(base_url=self.url, headers=bearer(key), timeout=60, **settings)


def made_server(*flags: str) -> Server:
    """Return a server, not started yet, with flags of the `serve` command."""
    with quiet_libraries():
        arguments = command_parser().parse_args(["serve", "--port", "0", *flags])
        device = select_device(arguments.device)
        serving = Serving(arguments, api_keys_of(arguments), chosen_directory(arguments), device)
        return Server(EngineThread(serving.engine(), serving.settings.end_ids), serving.settings)


@contextmanager
def running_server(*flags: str) -> Iterator[RunningServer]:
    """Context manager: run a server on a free port with flags of the `serve` command."""
    server = made_server(*flags)
    assert isinstance(server.backend, EngineThread)
    try:
        with listening(server) as found:
            wait_until_ready(found.url)
            yield RunningServer(found, server, server.backend)
    finally:
        server.backend._engine.close()  # caches in the web framework keep the endpoints, and with them the engine


def wait_until_ready(url: str) -> None:
    """Wait until a server answers that it is ready."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} was not ready within {_READY_S:g} s")


def resident_mib() -> float:
    """Return the resident memory of this process, in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
