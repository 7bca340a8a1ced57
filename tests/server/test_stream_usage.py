"""Usage in each event of a stream, and request ids chosen by clients."""

import json
from typing import Any

import pytest

from tests.server.running_server import RunningServer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "def a"}], "top_k": 1, "max_tokens": 4}
COMPLETION: dict[str, Any] = {"prompt": ["def a", "class B"], "top_k": 1, "max_tokens": 4}


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client() as http:
        text = http.post(path, json=body | {"stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_every_stream_event_has_usage_when_continuous_usage_is_on(
    server: RunningServer, path: str, body: dict[str, Any], include_usage: bool
) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    found = events(server, path, body | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts) and counts[0] >= 1
    assert counts[-1] == 4 * len(body.get("prompt", [0])) and not any(counts[0] == count for count in counts[-1:])
    assert [bool(event["choices"]) for event in found] == [True] * (len(found) - include_usage) + [
        False
    ] * include_usage


def test_response_id_ends_with_the_clients_request_id(server: RunningServer) -> None:
    with server.client() as http:
        whole = http.post("/v1/completions", json=COMPLETION | {"request_id": "abc-7"}).json()
    assert whole["id"] == "cmpl-abc-7"
    assert {event["id"] for event in events(server, "/v1/chat/completions", CHAT | {"request_id": "é"})} == {
        "chatcmpl-é"
    }
    assert events(server, "/v1/chat/completions", CHAT)[0]["id"] != "chatcmpl-é"


def test_one_completion_request_may_have_hundreds_of_prompts(server: RunningServer) -> None:
    body = {"prompt": [f"def a{number}" for number in range(500)], "max_tokens": 1, "top_k": 1}
    with server.client() as http:
        reply = http.post("/v1/completions", json=body)
        assert reply.status_code == 200 and len(reply.json()["choices"]) == 500
        refused = http.post("/v1/completions", json=body | {"n": 3}).json()["error"]
    assert refused["param"] == "n" and "1500 choices" in refused["message"] and "--max-choices" in refused["message"]
