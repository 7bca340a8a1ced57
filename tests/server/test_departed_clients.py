"""Log, metrics and dashboard count a request as 499 exactly if its client disconnects before the last byte."""

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.exchange import AccessLog
from tests.server.front_end import FrontEnd, LongTokens, front_end, request_bytes, wait_until
from tests.server.scripted_agent import TEMPLATES, agent_tokenizer

WHOLE: dict[str, Any] = {"prompt": "abc", "max_tokens": 3000}
STREAM = WHOLE | {"stream": True}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3000}
KINDS = {
    "whole": request_bytes(WHOLE),
    "stream": request_bytes(STREAM),
    "chat": request_bytes(CHAT | {"stream": True}, "/v1/chat/completions"),
    "message": request_bytes(CHAT | {"stream": True}, "/v1/messages"),
}


class Statuses:
    """Statuses of ended requests, as log, metrics and dashboard report them."""

    def __init__(self, server: FrontEnd, lines: list[Any]) -> None:
        self._server, self._lines = server, lines
        self._before = self._now()

    def wait_for(self, expected: dict[int, int]) -> None:
        """Wait until these requests have ended; assert that log, metrics and dashboard report the same statuses."""
        wait_until(lambda: self._now()[0].total() - self._before[0].total() >= sum(expected.values()))
        log, metrics, dashboard = (after - before for after, before in zip(self._now(), self._before, strict=True))
        assert log == metrics == Counter(expected), (log, metrics)
        assert dashboard["left"] == expected.get(499, 0)

    def _now(self) -> list[Counter[Any]]:
        metrics = self._server.server.metrics.num_responses()

        async def sampled() -> list[dict[str, int]]:
            history = self._server.server.history
            history.sample()
            body = history.body()
            return [dict(zip(body["fields"], one, strict=True)) for one in body["samples"]]

        samples = asyncio.run_coroutine_threadsafe(sampled(), self._server.listening.loop).result(20)
        return [
            Counter(line["status"] for line in self._lines),
            Counter({int(status): count for status, count in metrics.items()}),
            Counter({"left": sum(one["left"] for one in samples)}),
        ]


@contextmanager
def logged(tokenizer: Any) -> Iterator[tuple[FrontEnd, list[Any]]]:
    lines: list[Any] = []
    log = AccessLog("json", lambda line: lines.append(json.loads(line)))
    with front_end(tokenizer=tokenizer, access_log=log) as server:
        yield server, lines


@pytest.fixture(scope="module")
def logged_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FrontEnd, list[Any]]]:
    with logged(agent_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["hermes"])) as found:
        yield found


@pytest.fixture
def server(logged_server: tuple[FrontEnd, list[Any]]) -> FrontEnd:
    return logged_server[0]


@pytest.fixture
def statuses(logged_server: tuple[FrontEnd, list[Any]]) -> Statuses:
    return Statuses(*logged_server)


@pytest.fixture(scope="module")
def long_replies() -> Iterator[tuple[FrontEnd, list[Any]]]:
    with logged(LongTokens()) as found:
        yield found


def reset(connection: socket.socket) -> None:
    """Close a connection with RST, like a client that is killed or has unread input."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


LEAVING: dict[str, Callable[[socket.socket], None]] = {
    "close": lambda connection: connection.close(),
    "reset": reset,
    "half-close": lambda connection: connection.shutdown(socket.SHUT_WR),
}


def read_until(connection: socket.socket, ending: bytes) -> bytes:
    found = b""
    while ending not in found:
        part = connection.recv(2**20)
        assert part, found[-100:]
        found += part
    return found


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("kind", KINDS)
def test_disconnect_before_the_first_token_counts_as_499(
    server: FrontEnd, statuses: Statuses, kind: str, leave: str
) -> None:
    connection = server.connection(KINDS[kind])
    wait_until(lambda: server.backend.running)
    LEAVING[leave](connection)
    statuses.wait_for({499: 1})
    assert not server.backend.running
    connection.close()


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("kind", ["stream", "chat", "message"])
def test_disconnect_during_a_stream_counts_as_499(server: FrontEnd, statuses: Statuses, kind: str, leave: str) -> None:
    connection = server.connection(KINDS[kind])
    wait_until(lambda: server.backend.running)
    server.backend.deliver(Progress((97,)))
    read_until(connection, b"data: ")
    LEAVING[leave](connection)
    statuses.wait_for({499: 1})
    connection.close()


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("kind", KINDS)
def test_disconnect_after_the_last_byte_keeps_the_status(
    server: FrontEnd, statuses: Statuses, kind: str, leave: str
) -> None:
    connection = server.connection(KINDS[kind])
    wait_until(lambda: server.backend.running)
    server.backend.deliver(Progress((97,), end="length"))
    read_until(connection, b"\r\n0\r\n\r\n" if kind != "whole" else b'"usage"')
    LEAVING[leave](connection)
    statuses.wait_for({200: 1})
    connection.close()


@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_disconnect_with_megabytes_unread_counts_as_499(
    long_replies: tuple[FrontEnd, list[Any]], body: dict[str, Any], leave: str
) -> None:
    server, statuses = long_replies[0], Statuses(*long_replies)
    connection = server.connection(request_bytes(body), receive_buffer=4096)
    wait_until(lambda: server.backend.running)
    server.backend.deliver(Progress((97,) * 3000 * 4, end="length"))
    connection.recv(100)
    wait_until(lambda: server.server.gate.num_inside == 0)
    assert server.server.app.num_open == 1
    LEAVING[leave](connection)
    statuses.wait_for({499: 1})


def test_response_of_megabytes_read_to_the_end_counts_as_200(long_replies: tuple[FrontEnd, list[Any]]) -> None:
    server, statuses = long_replies[0], Statuses(*long_replies)
    connection = server.connection(request_bytes(WHOLE).replace(b"host: x", b"host: x\r\nconnection: close"))
    wait_until(lambda: server.backend.running)
    server.backend.deliver(Progress((97,) * 3000 * 4, end="length"))
    while connection.recv(2**20):
        pass
    statuses.wait_for({200: 1})


def test_disconnect_before_the_body_is_complete_counts_as_499(server: FrontEnd, statuses: Statuses) -> None:
    for leave in LEAVING.values():
        connection = server.connection(request_bytes(b"{", declared_size=500))
        wait_until(lambda: sum(map(server.server.bodies.num_bytes, server.owners)) == 1)
        leave(connection)
        wait_until(lambda: sum(map(server.server.bodies.num_bytes, server.owners)) == 0)
    statuses.wait_for({499: 3})


def test_unread_error_responses_are_counted_by_their_status(server: FrontEnd, statuses: Statuses) -> None:
    with server.client() as http:
        assert http.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        assert http.get("/nothing").status_code == 404
        assert http.options("/v1/completions", headers={"Origin": "https://a.example"}).status_code == 405
        assert http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    connection = server.connection(KINDS["stream"])
    wait_until(lambda: server.backend.running)
    server.backend.deliver(Progress(end="error", error="out of luck"))
    read_until(connection, b"\r\n0\r\n\r\n")
    connection.close()
    statuses.wait_for({400: 1, 404: 1, 405: 1, 401: 1, 200: 1})


def test_requests_on_one_connection_are_counted_separately(server: FrontEnd, statuses: Statuses) -> None:
    connection = server.connection(KINDS["stream"] + KINDS["whole"])
    wait_until(lambda: server.backend.running)
    server.backend.deliver(Progress((97,), end="length"))
    read_until(connection, b"\r\n0\r\n\r\n")
    wait_until(lambda: server.backend.running)
    connection.close()
    statuses.wait_for({200: 1, 499: 1})


def test_probes_and_scrapes_are_counted_separately_unless_unauthorized(server: FrontEnd, statuses: Statuses) -> None:
    def probes() -> dict[tuple[str, str], float]:
        (family,) = server.server.metrics.probe_responses.collect()
        return {
            (one.labels["path"], one.labels["status"]): one.value
            for one in family.samples
            if one.name == "mamba_cache_probe_responses_total"
        }

    before = Counter(probes())
    with server.client() as http:
        paths = ("/health", "/ping", "/metrics", "/dashboard/history")
        for path in paths:
            assert http.get(path).status_code == 200
        text = http.get("/metrics").text
        assert http.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert 'mamba_cache_probe_responses_total{path="/health",status="200"}' in text
    statuses.wait_for({401: 1})
    expected = Counter({(path, "200"): 1 for path in paths})
    expected["/metrics", "200"] += 1
    wait_until(lambda: Counter(probes()) - before == expected)


def test_failure_during_a_response_does_not_count_as_499(
    server: FrontEnd, statuses: Statuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("megatron_mamba_cache.server.responses.EventStream._fail", broken)
    monkeypatch.setattr("megatron_mamba_cache.server.responses._encoded", broken)
    connection = server.connection(KINDS["stream"])
    wait_until(lambda: server.backend.running)
    server.backend.deliver(Progress((97,)))
    assert all(iter(lambda: connection.recv(65_536), b""))
    statuses.wait_for({500: 1})
