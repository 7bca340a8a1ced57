"""Routes to tokenize and detokenize in vLLM's format, and the version and ping routes."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_mamba_cache import __version__
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from tests.server.front_end import front_end
from tests.server.running_server import MODEL, RunningServer
from tests.server.scripted_agent import TEMPLATES, agent_tokenizer

TEXT = "import os\n\n\ndef main(é):\n    return '<|endoftext|>'\n"
MESSAGES = [{"role": "user", "content": "def a"}]


def posted(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    with server.client() as http:
        reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_tokenize_route_returns_the_tokens_of_a_completion_prompt_and_round_trips(server: RunningServer) -> None:
    found = posted(server, "/tokenize", model=MODEL, prompt=TEXT)
    assert set(found) == {"count", "max_model_len", "tokens", "token_strs"} and found["token_strs"] is None
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 4096
    assert posted(server, "/detokenize", model=MODEL, tokens=found["tokens"]) == {"prompt": TEXT}
    body = {"prompt": TEXT, "max_tokens": 1, "return_token_ids": True}
    assert posted(server, "/v1/completions", **body)["choices"][0]["prompt_token_ids"] == found["tokens"]


def test_tokenize_route_returns_the_tokens_of_a_chat(server: RunningServer) -> None:
    found = posted(server, "/tokenize", messages=MESSAGES, return_token_strs=True)
    chat = posted(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert found["count"] == chat["usage"]["prompt_tokens"] == len(found["token_strs"])
    text = posted(server, "/detokenize", tokens=found["tokens"])["prompt"]
    tokenizer = server.server.settings.tokenizer
    assert text == tokenizer.render_chat(MESSAGES)
    assert found["token_strs"] == [tokenizer.token_of(token) for token in found["tokens"]]


class BeginningTokenizer(ByteTokenizer):
    """Tokenizer that adds a token before each text."""

    def tokenize(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        return [*([] if add_special_tokens is False else [0]), *super().tokenize(text)]


@pytest.mark.parametrize(("add", "expected"), [(None, [0]), (True, [0]), (False, [])])
def test_tokenize_route_omits_special_tokens_on_request(add: bool | None, expected: list[int]) -> None:
    with front_end(tokenizer=BeginningTokenizer()) as server, server.client() as http:
        for text, own in (("a", [97]), ("", [])):
            reply = http.post("/tokenize", json={"prompt": text, "add_special_tokens": add})
            assert reply.json()["tokens"] == [*expected, *own]


def test_empty_texts_and_texts_without_special_tokens_round_trip(server: RunningServer) -> None:
    for text in (TEXT, "x"):
        found = posted(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        assert posted(server, "/detokenize", tokens=found) == {"prompt": text}
    assert posted(server, "/tokenize", prompt="") | {"max_model_len": 0} == {
        "count": 0,
        "max_model_len": 0,
        "tokens": [],
        "token_strs": None,
    }
    assert posted(server, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "send either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "tools": [{}]}, "tools.0.type", "Field required"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": "x"}, "add_special_tokens", "boolean"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "cannot be tokenized"),
        ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}, "prompt", "cannot be tokenized"),
        ("/tokenize", {"prompt": "x" * 3_000_000, "add_special_tokens": False}, "prompt", "4096"),
        ("/tokenize", {"prompt": "x", "nothing": 1}, "nothing", "not a known field"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens.1", "token 1000000 is outside the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "greater than or equal to 0"),
    ],
)
def test_tokenizing_routes_refuse_malformed_bodies(
    server: RunningServer, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    with server.client() as http:
        reply = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"], error


def test_tokenizing_routes_refuse_other_models(server: RunningServer) -> None:
    with server.client() as http:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert http.post(path, json=body | {"model": "gpt-5"}).status_code == 404


def test_tokenizing_routes_need_an_api_key_and_ping_does_not(server: RunningServer) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert httpx.post(server.url + path, json=body, timeout=60).status_code == 401
    assert httpx.get(f"{server.url}/version", timeout=60).status_code == 401
    for method in ("GET", "POST"):
        reply = httpx.request(method, f"{server.url}/ping", timeout=60)
        assert reply.status_code == 200 and reply.json() == {"status": "ready"}


def test_version_route_returns_package_versions(server: RunningServer) -> None:
    with server.client() as http:
        found = http.get("/version").json()
    assert found["version"] == __version__ and found["megatron-core"].startswith("0.16") and found["torch"]


def test_ping_route_returns_the_same_status_as_health() -> None:
    with front_end() as server:
        server.server.rules.is_draining = True
        for method in ("GET", "POST"):
            assert httpx.request(method, f"{server.listening.url}/ping", timeout=60).status_code == 503


def test_model_description_has_the_same_fields_as_in_vllm(server: RunningServer) -> None:
    with server.client() as http:
        (listed,) = http.get("/v1/models").json()["data"]
        assert listed == http.get(f"/v1/models/{MODEL}").json()
    assert listed.pop("created") > 1.7e9
    assert listed == {
        "id": MODEL,
        "object": "model",
        "owned_by": "megatron-mamba-cache",
        "root": MODEL,
        "parent": None,
        "max_model_len": server.server.backend.max_sequence_length,
    }


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_tokenizer_info_route_describes_the_tokenizer_when_enabled(name: str, tmp_path: Path) -> None:
    tokenizer = agent_tokenizer(tmp_path / name, TEMPLATES[name])
    with front_end(tokenizer=tokenizer, describes_tokenizer=True) as server, server.client() as http:
        found = http.get("/tokenizer_info").json()
        assert httpx.get(f"{server.listening.url}/tokenizer_info").status_code == 401
    written = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
    assert found["chat_template"] == TEMPLATES[name] == tokenizer.chat_template
    assert found["tokenizer_class"] == written["tokenizer_class"]
    assert {key: found[key] for key in written if key != "chat_template"} == {
        key: value for key, value in written.items() if key != "chat_template"
    }


def test_tokenizer_info_reports_the_class_of_a_tokenizer_that_has_no_files() -> None:
    with front_end(describes_tokenizer=True) as server, server.client() as http:
        assert http.get("/tokenizer_info").json() == {"tokenizer_class": "ByteTokenizer", "chat_template": None}


def test_tokenizer_info_route_is_disabled_by_default(server: RunningServer) -> None:
    with server.client() as http:
        assert http.get("/tokenizer_info").status_code == 404
