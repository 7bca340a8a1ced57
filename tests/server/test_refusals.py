"""Refused and ignored fields, and admin routes that cross-site pages cannot use."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.policy.request_rules import RequestRules
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from tests.server.front_end import FrontEnd, front_end


@pytest.fixture(scope="module")
def server() -> Iterator[FrontEnd]:
    with front_end(keys=()) as server:
        yield server


class PlainTemplate(ByteTokenizer):
    """Tokenizer with a chat template that renders only messages."""

    chat_template = "{{ messages }}"


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("lost", "param", "what"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages", "tool calls"),
        ({"messages": [USER, {"role": "tool", "content": "5"}]}, "messages", "tool calls"),
    ],
)
def test_tools_and_calls_are_refused_when_the_template_drops_them(lost: dict[str, Any], param: str, what: str) -> None:
    with front_end(keys=(), tokenizer=PlainTemplate()) as plain, plain.client() as http:
        error = http.post("/v1/chat/completions", json={"messages": [USER]} | lost).json()["error"]
    assert error["param"] == param
    assert error["message"] == f"this model's chat template does not support {what}; leave them out"


@pytest.mark.parametrize("name", ["prompt_cache_key", "safety_identifier", "user", "service_tier"])
def test_request_fields_without_effect_are_ignored(server: FrontEnd, name: str) -> None:
    body = {"prompt": "x", "max_tokens": -1, name: "a"}
    with server.client() as http:
        assert http.post("/v1/completions", json=body).json()["error"]["param"] == "max_tokens"
        assert http.post("/v1/completions", json=body | {name: 1}).json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"prompt": [1, -1]}, "prompt.1", "greater than or equal to 0"),
        ({"prompt": [1, 2**31]}, "prompt.1", "less than or equal to 2147483647"),
        ({"prompt": [1, 1.5]}, "prompt.1", "valid integer"),
        ({"prompt": [[1], [-4]]}, "prompt.1.0", "greater than or equal to 0"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": ["a", 7]}, "prompt.1", "valid string"),
        ({"prompt": None}, "prompt", "valid string"),
        ({"prompt": "a", "stop": [""]}, "stop.0", "at least 1 character"),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    ],
)
def test_error_for_a_field_with_several_types_names_the_intended_type(
    server: FrontEnd, field: dict[str, Any], param: str, message: str
) -> None:
    with server.client() as http:
        error = http.post("/v1/completions", json=field).json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ") and message in error["message"]


def test_page_from_another_origin_cannot_flush_the_cache(server: FrontEnd) -> None:
    with server.client() as http:
        own = server.listening.url
        for origin in ("http://evil.example", "null", own.replace("127.0.0.1", "localhost"), "http://127.0.0.1:1"):
            reply = http.post("/admin/flush", headers={"Origin": origin})
            assert reply.status_code == 403 and origin in reply.json()["error"]["message"]
        assert server.backend.flushed == []
        assert http.post("/admin/flush", headers={"Origin": own}).status_code == 200
        assert http.post("/admin/flush").status_code == 200 and server.backend.flushed == [None, None]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_error_for_a_part_that_is_not_text_names_its_type(server: FrontEnd, kind: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]}
    with server.client() as http:
        error = http.post("/v1/chat/completions", json={"messages": [message]}).json()["error"]
    assert error["param"] == "messages.0.content.1.type" and error["code"] == "unsupported_field"
    assert f"a part of type '{kind}' is not supported by this server; send text" in error["message"]


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"])
def test_error_for_an_invalid_body_says_what_is_wrong(server: FrontEnd, body: bytes) -> None:
    with server.client() as http:
        reply = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_json"
    assert reply.json()["error"]["message"].startswith("the body is not valid JSON: ")


FUNCTION = '{"name": "f", "parameters": {"type": "object", "default": [%s]}}'
ROUTES_AND_OBJECTS = [
    ("/v1/chat/completions", '{"messages": [], "tools": [{"type": "function", "function": ' + FUNCTION + "}]}"),
    ("/tokenize", '{"messages": [], "tools": [{"type": "function", "function": ' + FUNCTION + "}]}"),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}'),
    ("/tokenize", '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}'),
    ("/v1/responses", '{"input": "x", "tools": [{"type": "function", ' + FUNCTION[1:] + "]}"),
    ("/v1/messages", '{"messages": [], "max_tokens": 1, "tools": [{"name": "f", "input_schema": {"a": %s}}]}'),
    ("/v1/messages/count_tokens", '{"messages": [], "tools": [{"name": "f", "input_schema": {"a": %s}}]}'),
    (
        "/v1/messages",
        '{"max_tokens": 1, "messages": [{"role": "assistant", "content": '
        '[{"type": "tool_use", "id": "a", "name": "f", "input": {"a": %s}}]}]}',
    ),
    ("/v1/completions", '{"prompt": "x", "temperature": %s}'),
    ("/v1/completions", '{"prompt": "x", "structured_outputs": {"json": {"a": %s}}}'),
    ("/v1/responses", '{"input": "x", "text": {"format": {"type": "json_schema", "name": "f", "schema": {"a": %s}}}}'),
    (
        "/v1/chat/completions",
        '{"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": %s}}}}',
    ),
]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
@pytest.mark.parametrize(("path", "body"), ROUTES_AND_OBJECTS)
def test_nan_and_invalid_unicode_are_refused_in_every_route(server: FrontEnd, path: str, body: str, value: str) -> None:
    messages = '"messages": [{"role": "user", "content": "x"}]'
    content = (body % value).replace('"messages": []', messages).encode()
    with server.client() as http:
        error = http.post(path, content=content, headers={"Content-Type": "application/json"}).json()["error"]
    names = ("parameters", "chat_template_kwargs", "input_schema", "input", "temperature", "json", "schema")
    field, _, sentence = error["message"].partition(": ")
    assert field.rpartition(".")[2] in names and error.get("param", field) == field
    assert ("finite" in sentence) or (value.startswith('"') and ("Unicode" in sentence or "number" in sentence)), error


def test_field_with_an_empty_name_is_refused(server: FrontEnd) -> None:
    with server.client() as http:
        error = http.post("/v1/completions", json={"prompt": "a", "": 1}).json()["error"]
    assert (error["param"], error["message"]) == ("", "`` is not a known field; leave it out")


def test_zero_top_logprobs_returns_no_alternatives(server: FrontEnd) -> None:
    message = {"role": "user", "content": "a"}
    with server.client() as http:
        for more in ({}, {"logprobs": False}):
            reply = http.post("/v1/chat/completions", json={"messages": [message], "top_logprobs": 0, **more})
            assert "chat template" in reply.json()["error"]["message"]  # all other checks passed


@pytest.mark.parametrize("token", [-1, 100, 2**31, 2**63, -(2**63) - 1, 2**70, 1.5])
def test_error_names_the_prompt_token_outside_the_vocabulary(token: Any) -> None:
    rules = RequestRules(CacheConfig(), vocab_size=100, num_blocks=100)
    refusal = rules.error_of(RequestSpec(0, np.array([5, token, 6], dtype=object), 7, SamplingSettings()))
    assert refusal is not None and refusal.startswith(f"token {token} in the prompt is outside the vocabulary of 100")
    assert rules.error_of(RequestSpec(0, np.array([0, 99]), 6, SamplingSettings())) is None
