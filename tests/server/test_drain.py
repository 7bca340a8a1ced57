"""SIGTERM under load: accepted requests finish, and the exit status is 0."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.main import bound_socket
from megatron_mamba_cache.command_line.serving import Serving
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.limits import ServerLimits
from tests.command_line.command_runs import REPOSITORY
from tests.server.front_end import LongTokens, front_end, request_bytes, scripted_server, status_of, wait_until
from tests.server.running_server import RunningServer, running_server
from tests.server.scripted_agent import TEMPLATES, agent_tokenizer


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Context manager: run `serve --random-model`; yield the process and the URL that it prints."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megatron_mamba_cache",
            "serve",
            "--random-model",
            "--device",
            "cpu",
            "--port",
            "0",
            *flags,
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving "))
        url = line.split()[-1]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        yield process, url
    finally:
        process.kill()
        process.wait()


class KeptAlive:
    """Connection that stays open for many requests."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._connection = socket.create_connection((host, int(port)), timeout=30)

    def ask(self, request: bytes) -> tuple[int, str]:
        """Send a request; return the response's status and Retry-After, or 0 and "" if the connection is closed."""
        try:
            self._connection.sendall(request)
            response = HTTPResponse(self._connection)
            response.begin()
            response.read()
        except (OSError, HTTPException):
            return 0, ""
        return response.status, response.headers.get("Retry-After", "")


PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
ASKED = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}


@dataclass(slots=True)
class Answers:
    """Answers to a client, with times on the monotonic clock."""

    seen: list[tuple[float, int, str]] = field(default_factory=list)

    def ask_until(self, is_over: Callable[[], bool], ask: Callable[[], tuple[int, str]]) -> None:
        """Send a request every 20 ms until the server has ended."""
        while not is_over():
            status, retry_after = ask()
            self.seen.append((time.monotonic(), status, retry_after))
            if not status:
                return
            time.sleep(0.02)

    def assert_refused(self, begun: float, ended: float) -> None:
        """Assert that all answers from one second after `begun` to `ended` were 503 with Retry-After."""
        refused = [time for time, status, retry_after in self.seen if status == 503 and retry_after]
        assert refused and refused[0] - begun < 1, self.seen
        rest = [(status, retry_after) for time, status, retry_after in self.seen if refused[0] <= time < ended]
        assert set(rest) == {(503, "1")}, rest
        assert refused[-1] > ended - 1, (refused[-1], ended)


def test_draining_server_returns_503_and_finishes_accepted_requests() -> None:
    with served("--max-running-requests", "2") as (process, url), ThreadPoolExecutor(9) as pool:
        probe, request = KeptAlive(url), KeptAlive(url)
        assert probe.ask(PROBE) == (200, "") and request.ask(request_bytes(ASKED | {"max_tokens": 1})) == (200, "")
        answers = [pool.submit(answer_to, url, ASKED | {"stream": number % 2 == 0}) for number in range(6)]
        running = "mamba_cache_requests_running 2.0\nmamba_cache_requests_waiting 4.0"
        wait_until(lambda: running in re.sub("(?m)^#.*\n", "", httpx.get(f"{url}/metrics").text))
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        refused = [Answers() for _ in range(3)]
        asking = (
            lambda: probe.ask(PROBE),
            lambda: request.ask(request_bytes(ASKED)),
            lambda: KeptAlive(url).ask(PROBE),
        )
        for seen, ask in zip(refused, asking, strict=True):
            pool.submit(seen.ask_until, lambda: process.poll() is not None, ask)
        ends = [answer.result(120) for answer in answers]
        assert process.wait(30) == 0
    assert {reason for _, reason in ends} == {"length"}
    for seen in refused:
        seen.assert_refused(begun, max(ended for ended, _ in ends))


def answer_to(url: str, body: dict[str, Any]) -> tuple[float, str]:
    """Send a request; return the time when its response ended, and its finish reason."""
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    lines = reply.text.split("data: ")
    assert reply.status_code == 200 and (not body["stream"] or lines[-1].strip() == "[DONE]"), reply.text
    last = json.loads(lines[-2] if body["stream"] else reply.text)
    return time.monotonic(), last["choices"][0]["finish_reason"]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "body",
    [request_bytes(ASKED), request_bytes(CHAT, "/v1/chat/completions"), request_bytes({"prompt": "x" * 200_000})],
    ids=["completion", "chat", "large"],
)
def test_draining_server_refuses_requests_on_old_and_new_connections(body: bytes, is_stream: bool) -> None:
    with front_end() as server:
        accepted = server.connection(request_bytes(ASKED | {"stream": is_stream}))
        kept = KeptAlive(server.listening.url)
        assert kept.ask(PROBE) == (200, "")
        wait_until(lambda: server.backend.running)
        server.backend.deliver(Progress((97,)))
        server.listening.drain()
        wait_until(lambda: kept.ask(PROBE) == (503, "1"), 1)
        for connection in (kept, KeptAlive(server.listening.url)):
            for _ in range(3):
                assert connection.ask(body) == (503, "1")
                assert connection.ask(PROBE) == (503, "1")
        assert server.listening.thread.is_alive()
        server.backend.deliver(Progress((98,), end="length"))
        assert b'"finish_reason":"length"' in all_of(accepted)
        server.listening.thread.join(5)
        assert not server.listening.thread.is_alive() and kept.ask(PROBE) == (0, "")


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_refused_requests_and_probes_do_not_delay_the_end_of_draining() -> None:
    with front_end(drain_s=60) as server, ThreadPoolExecutor(4) as pool:
        accepted, over = server.connection(request_bytes(ASKED)), threading.Event()
        wait_until(lambda: server.backend.running)
        server.listening.drain()
        for request in (PROBE, request_bytes(ASKED), PROBE.replace(b"health", b"metrics")):
            pool.submit(Answers().ask_until, over.is_set, partial(KeptAlive(server.listening.url).ask, request))
        time.sleep(0.2)
        server.backend.deliver(Progress((97,), end="length"))
        server.listening.thread.join(5)
        over.set()
        assert not server.listening.thread.is_alive() and b"200 OK" in all_of(accepted)


def test_pipelined_request_is_refused_while_draining() -> None:
    with front_end() as server:
        connection = server.connection(request_bytes(ASKED) + request_bytes(ASKED))
        wait_until(lambda: server.backend.running)
        server.listening.drain()
        wait_until(lambda: server.server.rules.is_draining)
        server.backend.deliver(Progress((97,), end="length"))
        answers = all_of(connection)
        assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"HTTP/1.1 503 ") == 1


def seconds_to_the_end(process: subprocess.Popen[str]) -> float:
    """Send SIGTERM; return the seconds until the process exits with status 0."""
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    return time.monotonic() - begun


def test_idle_server_ends_within_a_second_with_a_summary() -> None:
    for attempt in range(3):  # repeated, because a busy machine may be too slow once
        with served() as (process, url), httpx.Client(base_url=url, timeout=60) as http:
            body = {"prompt": "abc", "max_tokens": 4}
            assert http.post("/v1/completions", json=body).status_code == 200  # its connection stays open
            seconds = seconds_to_the_end(process)
            assert process.stdout is not None
            output = process.stdout.read()
        assert output.count(" POST /v1/completions 200 ") == 1, output
        assert re.search("^stopped after .* s: 1 requests served, 0 refused", output, re.MULTILINE), output
        assert output.splitlines()[-1].startswith("stopped after"), output
        if seconds < 1 or attempt == 2:
            assert seconds < 1
            return


@pytest.mark.long
def test_open_streams_end_within_two_seconds_after_the_drain_limit() -> None:
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 5}
    with served("--drain-seconds", "1") as (process, url), httpx.Client(base_url=url, timeout=60) as http:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as silent, http.stream("POST", "/v1/completions", json=body) as read:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((host, int(port)))
            silent.sendall(request_bytes(body))
            lines = (line.removeprefix("data: ") for line in read.iter_lines() if line)
            next(lines)
            wait_until(lambda: "mamba_cache_requests_running 2.0" in httpx.get(f"{url}/metrics", timeout=60).text)
            seconds = seconds_to_the_end(process)
            events = list(lines)
        assert process.stdout is not None
        output = process.stdout.read()
    assert 1 <= seconds < 3
    assert "server was stopped" in json.loads(events[-1])["error"]["message"]
    assert "stopping: 2 requests may continue for 1 s" in output and ", 2 cut off" in output


def test_default_drain_time_fits_in_a_grace_period_of_30_seconds() -> None:
    seconds = command_parser().parse_args(["serve"]).drain_seconds
    assert seconds == ServerLimits().drain_s and seconds + 2 + 1 < 30


@contextmanager
def begun_stream(server: RunningServer) -> Iterator[Iterator[str]]:
    """Context manager: send a request for a long stream; yield its events from the second on."""
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as reply:
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        next(lines)
        yield lines


def test_unfinished_requests_fail_at_the_drain_limit() -> None:
    with running_server("--random-model", "--drain-seconds", "0.5") as server:
        with begun_stream(server) as lines:
            server.listening.drain()
            events = list(lines)
        server.listening.thread.join(30)
        assert not server.listening.thread.is_alive()
    assert len(events) < 4000 and "server was stopped" in json.loads(events[-1])["error"]["message"]


def test_paused_server_aborts_its_requests_when_it_is_stopped() -> None:
    with running_server("--random-model", "--drain-seconds", "600") as server:
        with begun_stream(server) as lines, server.client() as admin:
            admin.post("/admin/pause")
            server.listening.drain()
            *events, done = lines
        server.listening.thread.join(30)
        assert not server.listening.thread.is_alive()
    assert done == "[DONE]" and json.loads(events[-1])["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", ASKED | {"n": 2}, "server_error"),
        ("/v1/chat/completions", CHAT, "server_error"),
        ("/v1/responses", {"input": "abc"}, "server_error"),
        ("/v1/messages", CHAT | {"model": "scripted"}, "overloaded_error"),
    ],
)
def test_request_without_tokens_at_the_drain_limit_gets_a_retryable_error(
    path: str, body: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    tokenizer = agent_tokenizer(tmp_path, TEMPLATES["hermes"])
    with front_end(drain_s=0.1, tokenizer=tokenizer) as server, server.client() as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, path, json=body)
        wait_until(lambda: server.backend.running)
        server.listening.drain()
        found = answer.result(30)
        assert (found.status_code, found.headers.get("Retry-After")) == (503, "1")
        assert found.json()["error"]["type"] == kind and "server was stopped" in found.text


def test_second_signal_ends_the_server_immediately() -> None:
    with running_server("--random-model", "--drain-seconds", "600") as server, begun_stream(server) as lines:
        server.listening.drain()
        server.listening.drain()
        events = list(lines)
    assert "server was stopped" in json.loads(events[-1])["error"]["message"]


def test_signals_are_handled_by_the_time_the_address_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def printed(line: str, **_: Any) -> None:
        if "serving scripted" in line:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("builtins.print", printed)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the server did not hear the signal"))
    try:
        server = scripted_server()
        serving = SimpleNamespace(_first_line="", _log_level="warning", settings=server.settings)
        assert Serving._serve(serving, server, bound_socket("127.0.0.1", 0)) == 0  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_incomplete_body_does_not_delay_shutdown() -> None:
    with front_end() as server:
        connection = server.connection(request_bytes(b"{", declared_size=500))
        wait_until(lambda: sum(map(server.server.bodies.num_bytes, server.owners)) == 1)
        server.listening.drain()
        connection.settimeout(5)
        assert status_of(connection) == 503
        server.listening.thread.join(3)
        assert not server.listening.thread.is_alive()


def test_unread_responses_delay_shutdown_no_longer_than_the_drain_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_mamba_cache.server.running._BACKSTOP_S", 0.2)
    body = {"prompt": "abc", "max_tokens": 3000, "stream": True}
    with front_end(drain_s=0.2, tokenizer=LongTokens()) as server:
        connection = server.connection(request_bytes(body), receive_buffer=4096)
        wait_until(lambda: server.backend.running)
        server.backend.deliver(Progress((97,) * 10_000))
        server.listening.drain()
        server.listening.thread.join(5)
        assert not server.listening.thread.is_alive()
        connection.close()
    assert "Traceback" not in capfd.readouterr().err
