"""A model may have several names: requests may use any name, replies have the first."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running_server import KEYS, RunningServer, running_server

NAMES = ("first", "second/a", "third")
MESSAGES = [{"role": "user", "content": "def a"}]


@pytest.fixture(scope="module")
def named() -> Iterator[RunningServer]:
    with running_server("--served-model-name", *NAMES, *KEYS) as running:
        yield running


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "import os", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", {"input": "def a", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_model_name_is_accepted_and_replies_have_the_first_name(
    named: RunningServer, path: str, body: dict[str, Any]
) -> None:
    with named.client() as http:
        for name in NAMES:
            reply = http.post(path, json=body | {"model": name})
            assert (reply.status_code, reply.json()["model"]) == (200, "first")
        refused = http.post(path, json=body | {"model": "fourth"})
    assert refused.status_code == 404
    words = "the model 'fourth' is not served here; send 'first' or 'second/a' or 'third'"
    assert words in refused.json()["error"]["message"]


def test_models_are_listed_under_every_name(named: RunningServer) -> None:
    with named.client() as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == list(NAMES)
        for name in NAMES:
            assert http.get(f"/v1/models/{name}").json()["id"] == name
        assert http.post("/tokenize", json={"prompt": "x", "model": "third"}).status_code == 200
        assert http.get("/v1/models/fourth").status_code == 404
