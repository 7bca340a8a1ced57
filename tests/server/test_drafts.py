"""Speculative decoding in a server: drafts are counted, and a disconnect frees their slots."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.front_end import wait_until
from tests.server.running_server import RunningServer, running_server

BODY: dict[str, Any] = {"prompt": "class Harbour:\n" + "    boats = []\n" * 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--num-speculative-tokens", "3", "--draft-states", "window") as server:
        yield server


def test_draft_token_metrics_equal_the_engines_counts(server: RunningServer) -> None:
    def counted() -> tuple[int, int]:
        counters = server.between_steps(lambda engine: engine.context.snapshot()).counters
        return counters.draft_tokens, counters.accepted_tokens

    before = counted()
    with server.client() as http:
        usage = http.post("/v1/completions", json=BODY | {"max_tokens": 40, "n": 2}).json()["usage"]
    drafted, accepted = (now - then for now, then in zip(counted(), before, strict=True))
    assert 0 < accepted < drafted
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
        "draft_tokens": drafted,
    }


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_requests_draft_slots(server: RunningServer, stream: bool) -> None:
    body = json.dumps(BODY | {"max_tokens": 3000, "n": 2, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\ncontent-type: application/json"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: server.held()["draft"])
    wait_until(lambda: not any(server.held().values()), 5)
    server.assert_nothing_held()
