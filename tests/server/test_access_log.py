"""Access log and request ids: one line for each request, however it ends, with the id in the response."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.server.app import Server, ServerSettings
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.exchange import AccessLog, AccessLogFormat, Exchange
from megatron_mamba_cache.server.limits import ServerLimits
from megatron_mamba_cache.server.tenants import ApiKeys
from tests.server.front_end import BLUE, RED, FrontEnd, is_listening, listening, request_bytes, wait_until
from tests.server.scripted_backend import ScriptedBackend

ASKED = {"prompt": "abc", "max_tokens": 2}
FIELDS = [
    *("time", "request_id", "key", "method", "path", "status", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("first_token_seconds", "seconds", "error"),
]
NOON = datetime(2026, 1, 2, 12, 0, 0, 345678, UTC)


@contextmanager
def logged(form: AccessLogFormat = "json", **limits: Any) -> Iterator[tuple[FrontEnd, list[Any]]]:
    """Run a front end; yield it and the parsed lines of its log."""
    lines: list[Any] = []
    log = AccessLog(form, lambda line: lines.append(json.loads(line) if form == "json" else line), lambda: NOON)
    keys = ApiKeys((RED, BLUE), names={RED: "red-team"})
    settings = ServerSettings("scripted", ByteTokenizer(), frozenset(), keys, ServerLimits(**limits), log)
    server = Server(ScriptedBackend(), settings)
    assert isinstance(server.backend, ScriptedBackend)
    with listening(server) as found:
        wait_until(lambda: is_listening(found.url))
        yield FrontEnd(found, server, server.backend), lines


def only(lines: list[Any]) -> Any:
    wait_until(lambda: lines)
    assert len(lines) == 1, lines
    return lines.pop()


def test_completed_request_is_logged_with_key_name_token_counts_and_times() -> None:
    with logged() as (server, lines), server.client() as http:
        connection = server.connection(request_bytes(ASKED))
        wait_until(lambda: server.backend.running)
        server.backend.deliver(Progress((97, 98), cached_tokens=2, end="length"))
        assert b"x-request-id" in connection.recv(65_536).lower()
        line = only(lines)
        assert list(line) == FIELDS
        assert line["time"] == "2026-01-02T12:00:00.345Z"
        assert (line["key"], line["method"], line["path"], line["status"]) == (
            "red-team",
            "POST",
            "/v1/completions",
            200,
        )
        assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (3, 2, 2)
        assert 0 < line["first_token_seconds"] <= line["seconds"] < 60 and line["error"] is None
        assert http.get("/v1/models").status_code == 200
        line = only(lines)
        assert line["prompt_tokens"] is None and line["first_token_seconds"] is None


def test_failed_stream_is_logged_with_its_error() -> None:
    with logged() as (server, lines):
        connection = server.connection(request_bytes(ASKED | {"stream": True}))
        wait_until(lambda: server.backend.running)
        server.backend.deliver(Progress((97,)))
        server.backend.deliver(Progress(end="error", error="out of luck"))
        line = only(lines)
        assert (line["status"], line["error"], line["completion_tokens"]) == (200, "engine_error", 1)
        connection.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_request_is_logged_as_499_when_its_client_disconnects(is_stream: bool) -> None:
    with logged() as (server, lines):
        connection = server.connection(request_bytes(ASKED | {"stream": is_stream}))
        wait_until(lambda: server.backend.running)
        server.backend.deliver(Progress((97,)))
        connection.close()
        line = only(lines)
        assert line["status"] == 499 and line["prompt_tokens"] == 3


def test_request_is_logged_as_499_when_its_client_disconnects_before_the_body() -> None:
    with logged() as (server, lines):
        server.connection(request_bytes(b"{", declared_size=500)).close()
        line = only(lines)
        assert line["status"] == 499 and line["key"] == "red-team"


def test_log_lines_of_refused_requests_have_the_error_code_but_no_key() -> None:
    with logged() as (server, lines), server.client(BLUE) as http:
        assert httpx.post(f"{server.listening.url}/v1/completions", headers={"Authorization": "Bearer sk-1"}).is_error
        refused = only(lines)
        assert (refused["status"], refused["error"], refused["key"]) == (401, "invalid_api_key", None)
        assert http.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        line = only(lines)
        assert line["error"] and re.fullmatch("key-[0-9a-f]{8}", line["key"])
        assert http.get("/nothing").status_code == 404
        only(lines)
        text_of_log = json.dumps([refused, line])
        assert "sk-1" not in text_of_log and BLUE not in text_of_log


def test_health_probes_are_logged_only_when_their_key_is_refused() -> None:
    with logged() as (server, lines), server.client() as http:
        for path in ("/health", "/metrics", "/dashboard/history"):
            assert http.get(path).status_code == 200
        assert httpx.get(f"{server.listening.url}/metrics").status_code == 401
        assert only(lines)["path"] == "/metrics"


def test_logged_path_is_escaped_and_has_no_query() -> None:
    with logged("text") as (server, lines), server.client() as http:
        http.get("/v1/models/a%0A2026%20%F0%9F%98%80?secret=1")
        line = only(lines)
        assert line.startswith("2026-01-02T12:00:00.345Z GET /v1/models/a%0A2026%20%F0%9F%98%80 404 key=red-team ")
        assert "secret" not in line


def test_text_log_omits_missing_values_and_log_format_off_writes_nothing() -> None:
    lines: list[str] = []
    exchange = Exchange("id-1", "GET", "/v1/models", arrived=10.0, key_name="ann", status=200, ended=10.25)
    for form in ("text", "off"):
        AccessLog(form, lines.append, lambda: NOON).note(exchange)  # type: ignore[arg-type]
    assert lines == ["2026-01-02T12:00:00.345Z GET /v1/models 200 key=ann seconds=0.25 id=id-1"]


def test_server_continues_when_its_log_pipe_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", broken)
    AccessLog("text").note(Exchange("id-1", "GET", "/", arrived=0.0))


@pytest.mark.parametrize("sane", ["a", "req_0-1.2:3", "x" * 128])
def test_valid_request_id_is_in_every_response_and_in_the_log(sane: str) -> None:
    with logged() as (server, lines), server.client() as http:
        for path in ("/v1/models", "/nothing", "/health"):
            assert http.get(path, headers={"X-Request-Id": sane}).headers.get_list("x-request-id") == [sane]
        denied = httpx.get(f"{server.listening.url}/v1/models", headers={"X-Request-Id": sane})
        assert denied.status_code == 401 and denied.headers["x-request-id"] == sane
        wait_until(lambda: len(lines) == 3)
        assert {line["request_id"] for line in lines} == {sane}


@pytest.mark.parametrize("insane", [b"", b"x" * 129, b"two words", b"caf\xc3\xa9", b'"', b"a,b"])
def test_invalid_request_id_is_replaced(insane: bytes) -> None:
    with logged() as (server, lines), server.client() as http:
        given = http.get("/v1/models", headers={b"X-Request-Id": insane}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", given) and only(lines)["request_id"] == given
        assert http.get("/v1/models").headers["x-request-id"] != given


def test_summary_counts_requests_by_outcome() -> None:
    with logged() as (server, lines), server.client() as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/nothing").status_code == 404
        assert http.get("/health").status_code == 200
        connection = server.connection(request_bytes(ASKED))
        wait_until(lambda: server.backend.running)
        assert server.server.app.num_open == 1
        server.listening.loop.call_soon_threadsafe(server.server.end, "the server was stopped")
        wait_until(lambda: len(lines) == 3)
        connection.close()
        found = server.server.app.summary()
    pattern = r"stopped after [0-9.]+ s: 1 requests served, 1 refused, 0 failed, 0 left by clients, 1 cut off"
    assert re.fullmatch(pattern, found), found
