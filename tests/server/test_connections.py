"""Clients that disconnect, stop reading or send nothing do not hold resources."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.job_progress import Mail
from tests.server.front_end import FrontEnd, LongTokens, front_end, request_bytes, status_of, wait_until

ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 3000}
STREAMED = ASKED | {"stream": True}
AHEAD = {
    "a request": request_bytes({"prompt": "x", "max_tokens": 1}),
    "a line": b"\r\n",
    "no request": b"garbage garbage\r\n\r\n",
}


def assert_nothing_inside(server: FrontEnd) -> None:
    wait_until(lambda: not server.backend.running and server.server.gate.num_inside == 0, 5)


@pytest.fixture(scope="module")
def server() -> Iterator[FrontEnd]:
    with front_end() as server:
        yield server


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("body", [ASKED, STREAMED], ids=["whole", "stream"])
@pytest.mark.parametrize("is_together", [True, False], ids=["together", "later"])
def test_disconnect_is_detected_despite_pipelined_requests(
    server: FrontEnd, ahead: str, body: dict[str, Any], is_together: bool
) -> None:
    parts = (request_bytes(body), AHEAD[ahead])
    connection = server.connection(b"".join(parts) if is_together else parts[0])
    wait_until(lambda: server.backend.running)
    if not is_together:
        connection.sendall(parts[1])
    server.backend.deliver(Progress((97,)))
    connection.close()
    assert_nothing_inside(server)


def test_pipelined_requests_are_answered_in_order(server: FrontEnd) -> None:
    first, second = request_bytes(ASKED), request_bytes(ASKED | {"prompt": "defg"})
    with server.connection(first + second) as connection:
        for prompt_tokens in (3, 4):
            wait_until(lambda: server.backend.running)
            server.backend.deliver(Progress((97,), end="length"))
            reply = connection.recv(65_536)
            while not reply.endswith(b"}"):
                reply += connection.recv(65_536)
            assert reply.startswith(b"HTTP/1.1 200") and f'"prompt_tokens":{prompt_tokens},'.encode() in reply


def test_client_that_pipelines_too_much_is_disconnected(server: FrontEnd) -> None:
    connection = server.connection(request_bytes(ASKED))
    wait_until(lambda: server.backend.running)
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            connection.sendall(b"x" * 65_536)
    assert_nothing_inside(server)


def test_only_a_client_that_stops_reading_is_disconnected() -> None:
    with front_end(send_timeout_s=0.5, tokenizer=LongTokens()) as server, ThreadPoolExecutor() as pool:
        idle, busy = (server.connection(request_bytes(STREAMED), receive_buffer=2**16) for _ in range(2))
        wait_until(lambda: len(server.backend.running) == 2)
        read = pool.submit(all_of, busy)
        server.backend.deliver(Progress((97,) * 10_000))
        wait_until(lambda: len(server.backend.running) == 1, 5)
        server.backend.deliver(Progress(end="length"))
        assert read.result(20) > 10_000_000
        assert_nothing_inside(server)
        idle.close()


def test_finished_request_leaves_the_queue_before_its_client_reads_the_reply() -> None:
    with front_end(tokenizer=LongTokens()) as server:
        connection = server.connection(request_bytes(STREAMED | {"n": 3}), receive_buffer=4096)
        wait_until(lambda: len(server.backend.running) == 3)
        for end in (None, "length"):
            server.backend.deliver(Progress((97,) * 2000, end=end))
        wait_until(lambda: server.server.gate.num_inside == 0, 5)
        assert all_of(connection) > 3 * 4_000_000


def test_unread_progress_entries_of_a_choice_are_merged() -> None:
    async def run() -> None:
        mail = Mail()
        mail.put(1, Progress((1,), log_probs=(0.5,), cached_tokens=3))
        mail.put(0, Progress((9,)))
        mail.put(1, Progress((2, 3), log_probs=(0.6, 0.7), cached_tokens=3, draft_tokens=4, end="stop"))
        joined = Progress((1, 2, 3), log_probs=(0.5, 0.6, 0.7), cached_tokens=3, draft_tokens=4, end="stop")
        assert [await mail.take(), await mail.take()] == [(1, joined), (0, Progress((9,)))]

    asyncio.run(run())


def all_of(connection: socket.socket) -> int:
    """Return all bytes of a stream."""
    size, end = 0, b""
    while not end.endswith(b"0\r\n\r\n"):
        part = connection.recv(2**20)
        assert part, "cut off"
        if size // 2**20 < (size + len(part)) // 2**20:
            time.sleep(0.1)  # all reads take longer than the limit, each part takes less
        size, end = size + len(part), (end + part)[-16:]
    connection.close()
    return size


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half a head"])
def test_idle_connection_is_closed_after_the_keep_alive_timeout(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mamba_cache.server.running.KEEP_ALIVE_S", 0.2)
    with front_end(body_timeout_s=0.2) as server, server.connection(head) as connection:
        connection.settimeout(5)
        assert status_of(connection) == 0
