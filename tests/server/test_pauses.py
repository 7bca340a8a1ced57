"""Pause, resume and abort over HTTP: a paused server queues requests, an aborted reply keeps its tokens."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.running_server import RunningServer

LONG = {"prompt": "def add(a, b):", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "logprobs": 1}


@pytest.fixture
def paused(server: RunningServer) -> Iterator[RunningServer]:
    """Yield a paused server; resume it afterwards."""
    with server.client() as http:
        for _ in range(2):
            assert http.post("/admin/pause").json() == {"paused": True}
        yield server
        for _ in range(2):
            assert http.post("/admin/resume").json() == {"paused": False}


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def posted(server: RunningServer, body: dict[str, Any], request_id: str, path: str = "/v1/completions") -> Any:
    with server.client() as http:
        return http.post(path, json=body, headers={"X-Request-Id": request_id}).json()


def aborted(http: httpx.Client, *request_ids: str) -> int:
    body = {"request_ids": list(request_ids)} if request_ids else None
    return http.post("/admin/abort", json=body).json()["aborted"]


def num_generated(server: RunningServer) -> int:
    return server.between_steps(
        lambda engine: sum(len(e.record[-1].generated_tokens) for e in engine.requests.values())
    )


def test_paused_server_queues_requests_and_says_so(paused: RunningServer) -> None:
    with ThreadPoolExecutor(1) as threads, paused.client() as http:
        assert http.get("/health").json() == {"status": "paused"}
        reply: Future[Any] = threads.submit(posted, paused, LONG | {"max_tokens": 5}, "queued")
        wait_until(lambda: paused.backend.state.num_waiting == 1)
        time.sleep(0.1)
        assert not reply.done() and paused.backend.state.num_running == 0
        http.post("/admin/resume")
        assert http.get("/health").json() == {"status": "ready"}
        assert reply.result(30)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "running"])
def test_aborted_replies_have_their_tokens_and_the_reason(server: RunningServer, is_paused: bool) -> None:
    with ThreadPoolExecutor(2) as threads, server.client() as http:
        one: Future[Any] = threads.submit(posted, server, LONG | {"n": 2, "return_token_ids": True}, "one")
        two: Future[Any] = threads.submit(posted, server, LONG | {"max_tokens": 60}, "two")
        wait_until(lambda: num_generated(server) > 15)
        if is_paused:
            http.post("/admin/pause")
        assert aborted(http, "one", "unknown") == 2
        body = one.result(30)
        assert aborted(http, "one") == 0 and aborted(http, "unknown") == 0
        if is_paused:
            assert not two.done()
            http.post("/admin/resume")
        assert [choice["finish_reason"] for choice in body["choices"]] == ["abort"] * 2
        assert all(0 < len(choice["token_ids"]) < 1500 for choice in body["choices"])
        for choice in body["choices"]:
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert body["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in body["choices"])
        assert two.result(30)["choices"][0]["finish_reason"] == "length"


def test_abort_without_ids_ends_all_requests_also_those_in_the_queue(paused: RunningServer) -> None:
    with ThreadPoolExecutor(3) as threads, paused.client() as http:
        replies = [threads.submit(posted, paused, LONG, name) for name in ("one", "two", "three")]
        wait_until(lambda: paused.backend.state.num_waiting == 3)
        assert aborted(http) == 3 and aborted(http) == 0
        for reply in replies:
            (choice,) = reply.result(30)["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("", "abort")


def test_aborted_stream_ends_with_the_reason(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.client() as http, server.client() as admin:
        with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
            next(lines)
            assert aborted(admin, reply.headers["X-Request-Id"]) == 1
            *events, done = lines
        assert done == "[DONE]" and json.loads(events[-1])["choices"][0]["finish_reason"] == "abort"


def test_other_apis_report_an_aborted_reply_as_cut(server: RunningServer) -> None:
    apis = {
        "/v1/messages": {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1500,
            "model": "small_python_model",
        },
        "/v1/responses": {"input": "x", "max_output_tokens": 1500},
    }
    for path, body in apis.items():
        with ThreadPoolExecutor(1) as threads, server.client() as http:
            http.post("/admin/pause")
            reply: Future[Any] = threads.submit(posted, server, body, "one", path)
            wait_until(lambda: server.backend.state.num_waiting == 1)
            assert aborted(http, "one") == 1
            found = reply.result(30)
            http.post("/admin/resume")
        if path == "/v1/messages":
            assert found["stop_reason"] == "abort"
        else:
            assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "abort"})


def test_abort_with_an_invalid_body_is_refused(server: RunningServer) -> None:
    with server.client() as http:
        bad = http.post("/admin/abort", json={"request_ids": "one"})
        assert bad.status_code == 400 and "request_ids" in bad.json()["error"]["message"]
