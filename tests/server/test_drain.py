"""SIGTERM under load, to a server in a process of its own: what was accepted ends, and the status is 0."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.serve import bound_socket
from megatron_mamba_cache.command_line.serving import Serving
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.limits import ServerLimits
from tests.command_line.command_runs import REPOSITORY
from tests.server.front_end import LongTokens, front_end, request_bytes, scripted_server, status_of, wait_until
from tests.server.running_server import running_server

NUM_CLIENTS = 6


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `serve --random-model` until the block ends; yield the process and the URL that it prints."""
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


def stream(url: str, number: int, body: dict[str, Any], events: list[list[str]], begun: threading.Barrier) -> None:
    """Stream one request; keep its events."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        events[number].append(next(lines))
        begun.wait(60)
        events[number].extend(lines)


def terminate_under_load(process: subprocess.Popen[str], url: str, body: dict[str, Any]) -> list[list[str]]:
    """Send SIGTERM once all clients have their first event; return all events of each."""
    events: list[list[str]] = [[] for _ in range(NUM_CLIENTS)]
    begun = threading.Barrier(NUM_CLIENTS + 1)
    threads = [threading.Thread(target=stream, args=(url, n, body, events, begun)) for n in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(httpx.TransportError):
        for _ in range(100):  # until the port is closed; before that nothing new is taken
            assert httpx.get(f"{url}/health", timeout=60).status_code == 503
            time.sleep(0.02)
    for thread in threads:
        thread.join(120)
    return events


def test_accepted_requests_finish_after_sigterm_and_the_status_is_0() -> None:
    with served("--max-running-requests", "3") as (process, url):
        body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "stream": True}
        events = terminate_under_load(process, url, body)
        assert process.wait(30) == 0
    for of_client in events:
        assert of_client[-1] == "[DONE]"
        assert json.loads(of_client[-2])["choices"][0]["finish_reason"] == "length"


def seconds_to_the_end(process: subprocess.Popen[str]) -> float:
    """Send SIGTERM; return how long the process takes to end, with status 0."""
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    return time.monotonic() - begun


def test_an_idle_server_ends_within_a_second_and_says_what_it_did() -> None:
    for attempt in range(3):  # a machine that runs tests may be too busy once
        with served() as (process, url), httpx.Client(base_url=url, timeout=60) as http:
            body = {"prompt": "abc", "max_tokens": 4}
            assert http.post("/v1/completions", json=body).status_code == 200  # its connection stays open
            seconds = seconds_to_the_end(process)
            assert process.stdout is not None
            said = process.stdout.read()
        assert said.count(" POST /v1/completions 200 ") == 1, said
        assert re.search("^stopped after .* s: 1 requests served, 0 refused", said, re.MULTILINE), said
        assert said.splitlines()[-1].startswith("stopped after"), said
        if seconds < 1 or attempt == 2:
            assert seconds < 1
            return


@pytest.mark.long
def test_streams_end_within_two_seconds_after_the_drain_limit_whether_their_clients_read_or_not() -> None:
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
        said = process.stdout.read()
    assert 1 <= seconds < 3
    assert "server was stopped" in json.loads(events[-1])["error"]["message"]
    assert "stopping: 2 requests may continue for 1 s" in said and ", 2 cut off" in said


def test_the_default_drain_fits_a_grace_period_of_30_seconds() -> None:
    seconds = command_parser().parse_args(["serve"]).drain_seconds
    assert seconds == ServerLimits().drain_s and seconds + 2 + 1 < 30


def test_requests_that_are_not_done_at_the_drain_limit_end_with_an_error() -> None:
    with running_server("--random-model", "--drain-seconds", "0.5") as server, server.client() as http:
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            next(lines)
            server.listening.drain()
            events = list(lines)
        server.listening.thread.join(30)
        assert not server.listening.thread.is_alive()
    assert len(events) < 4000 and "server was stopped" in json.loads(events[-1])["error"]["message"]


def test_a_second_signal_ends_everything_at_once() -> None:
    with running_server("--random-model", "--drain-seconds", "600") as server, server.client() as http:
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            next(lines)
            server.listening.drain()
            server.listening.drain()
            events = list(lines)
    assert "server was stopped" in json.loads(events[-1])["error"]["message"]


def test_a_signal_is_heard_from_the_moment_that_the_server_says_where_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def printed(line: str, **_: Any) -> None:
        if "serving scripted" in line:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("builtins.print", printed)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the server did not hear the signal"))
    try:
        server = scripted_server()
        serving = SimpleNamespace(_first_line="", settings=server.settings)
        assert Serving._serve(serving, server, bound_socket("127.0.0.1", 0)) == 0  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_request_whose_body_is_not_whole_does_not_hold_up_the_end() -> None:
    with front_end() as server:
        connection = server.connection(request_bytes(b"{", told_size=500))
        wait_until(lambda: sum(map(server.server.bodies.num_bytes, server.owners)) == 1)
        server.listening.drain()
        connection.settimeout(5)
        assert status_of(connection) == 503
        server.listening.thread.join(3)
        assert not server.listening.thread.is_alive()


def test_clients_that_do_not_read_hold_up_the_end_no_longer_than_the_limit_and_leave_no_trace_in_the_log(
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
