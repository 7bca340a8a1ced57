"""A front end with a scripted backend that listens in a thread, and raw connections to it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from megatron_mamba_cache.command_line.main import bound_socket
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.server.app import Server, ServerSettings
from megatron_mamba_cache.server.exchange import AccessLog
from megatron_mamba_cache.server.limits import ServerLimits
from megatron_mamba_cache.server.load_record import LoadRecord
from megatron_mamba_cache.server.parsers.families import reply_syntax
from megatron_mamba_cache.server.running import DrainingServer
from megatron_mamba_cache.server.tenants import ApiKeys
from megatron_mamba_cache.server.traces import Traces
from tests.server.scripted_backend import ScriptedBackend

RED, BLUE = "red-key", "blue-key"


@dataclass(frozen=True, slots=True)
class Listening:
    """Server that listens on a port.

    Args:
        drain: Function that has the effect of SIGTERM.
    """

    url: str
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    drain: Callable[[], None]


@contextmanager
def listening(server: Server, on_ready: Callable[[], None] = lambda: None) -> Iterator[Listening]:
    """Context manager: let a server listen on a free port; call `on_ready` once it is ready."""
    listener = bound_socket("127.0.0.1", 0)
    url = "http://{}:{}".format(*listener.getsockname())
    running, begun = DrainingServer(server, on_ready=on_ready), Future()  # type: ignore[var-annotated]

    def run() -> None:
        with asyncio.Runner() as runner:  # cancels the remaining tasks on exit, as in `serve`
            begun.set_result(runner.get_loop())
            runner.run(running.serve(sockets=[listener]))

    thread = threading.Thread(target=run, name="http", daemon=True)  # daemon: a thread that hangs must not block pytest
    thread.start()
    loop = begun.result(60)
    try:
        yield Listening(url, loop, thread, lambda: loop.call_soon_threadsafe(running.drain) and None)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(running.drain)
        thread.join(60)
        if thread.is_alive():
            raise TimeoutError(f"the server at {url} has not stopped")


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Front end that listens on a port, and its backend."""

    listening: Listening
    server: Server
    backend: ScriptedBackend

    @property
    def owners(self) -> list[str]:
        """Owners of both API keys."""
        return [self.server.settings.keys.owner_of(f"Bearer {key}") or "" for key in (RED, BLUE)]

    def client(self, key: str = RED) -> httpx.Client:
        """Return an HTTP client that sends an API key."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.listening.url, headers=headers, timeout=60)

    def connection(self, *parts: bytes, receive_buffer: int | None = None) -> socket.socket:
        """Open a connection and send `parts`."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        host, port = self.listening.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        for part in parts:
            connection.sendall(part)
        return connection


class LongTokens(ByteTokenizer):
    """Tokenizer whose tokens each decode to a thousand characters."""

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        return "x" * 1000 * len(tokens)


def scripted_server(
    *,
    tokenizer: Any = None,
    keys: tuple[str, ...] = (RED, BLUE),
    backend: ScriptedBackend | None = None,
    access_log: AccessLog | None = None,
    load_record: LoadRecord | None = None,
    describes_tokenizer: bool = False,
    traces: Traces | None = None,
    **limits: Any,
) -> Server:
    """Return a server over a scripted backend.

    Args:
        tokenizer: None: a tokenizer with one token per byte.
        access_log, load_record, traces: None: off.
        describes_tokenizer: Field of `ServerSettings`.
        limits: Fields of `ServerLimits`.
    """
    tokenizer = tokenizer or ByteTokenizer()
    syntax = reply_syntax(getattr(tokenizer, "chat_template", ""))
    limit, log = ServerLimits(**limits), access_log or AccessLog()
    settings = ServerSettings("scripted", tokenizer, frozenset(), ApiKeys(keys), limit, log, syntax=syntax)
    settings = replace(
        settings,
        load_record=load_record or LoadRecord(),
        describes_tokenizer=describes_tokenizer,
        traces=traces or Traces(),
    )
    return Server(backend or ScriptedBackend(), settings)


@contextmanager
def front_end(**settings: Any) -> Iterator[FrontEnd]:
    """Context manager: run a server with a scripted backend; see `scripted_server`."""
    server = scripted_server(**settings)
    assert isinstance(server.backend, ScriptedBackend)
    with listening(server) as found:
        wait_until(lambda: is_listening(found.url))
        yield FrontEnd(found, server, server.backend)


def is_listening(url: str) -> bool:
    """Return True if a server answers at this URL."""
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code in (200, 503)
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: If the condition is not true within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.01)


def request_bytes(
    body: dict[str, Any] | bytes, path: str = "/v1/completions", key: str = RED, declared_size: int | None = None
) -> bytes:
    """Return the bytes of a POST request.

    Args:
        declared_size: Value of Content-Length; None: the size of the body.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if declared_size is None else declared_size
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    return head.encode() + content


def status_of(connection: socket.socket) -> int:
    """Return the status of the next response on a connection; 0 if it was closed instead."""
    try:
        head = connection.recv(65_536)
    except ConnectionError:
        return 0
    return int(head.split()[1]) if head else 0
