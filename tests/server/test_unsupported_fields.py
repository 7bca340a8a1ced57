"""Every request field of OpenAI's and vLLM's APIs is supported, has no effect, or is refused by name."""

from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from megatron_mamba_cache.server.schemas import ChatRequest, CompletionRequest
from megatron_mamba_cache.server.unsupported import CHAT, COMPLETION
from tests.server.front_end import FrontEnd, front_end

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCHEMAS: dict[str, Any] = {COMPLETIONS: CompletionRequest, CHATS: ChatRequest}
TABLES = {COMPLETIONS: COMPLETION, CHATS: CHAT}
PLAIN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "model": "another"},
    CHATS: {"messages": [{"role": "user", "content": "x"}], "model": "another"},
}
OPENAI: dict[str, set[str]] = {
    COMPLETIONS: set(get_type_hints(completion_create_params.CompletionCreateParamsStreaming)),
    CHATS: set(get_type_hints(chat_create_params.CompletionCreateParamsStreaming)),
}
FUNCTION = {"name": "f", "parameters": {}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": FUNCTION}
BOTH: dict[str, Any] = {  # values with an effect, for fields of both endpoints
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 0.9,
    "early_stopping": True,
    "include_stop_str_in_output": True,
    "logits_processors": ["x"],
    "spaces_between_special_tokens": 1,
    "truncate_prompt_tokens": 8,
    "truncation_side": "left",
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "guided_decoding_backend": "outlines",
    "guided_whitespace_pattern": " ",
    "structural_tag": "{}",
    "priority": 1,
    "return_tokens_as_token_ids": True,
    "kv_transfer_params": {},
    "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 3},
    "thinking_token_budget": 5,
}
ASKING: dict[str, dict[str, Any]] = {
    COMPLETIONS: BOTH | {"suffix": "x", "prompt_embeds": "x"},
    CHATS: BOTH
    | {
        "echo": True,
        "documents": [{"text": "x"}],
        "chat_template": "x",
        "mm_processor_kwargs": {"a": 1},
        "media_io_kwargs": {"a": 1},
        "functions": [FUNCTION],
        "function_call": {"name": "f"},
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav"},
        "web_search_options": {},
        "moderation": {"model": "x"},
        "prompt_cache_options": {"mode": "explicit"},
    },
}
REFUSED = [(path, name) for path, fields in ASKING.items() for name in fields]


@pytest.fixture(scope="module")
def server() -> Iterator[FrontEnd]:
    with front_end(keys=()) as server:
        yield server


def error_of(server: FrontEnd, path: str, **fields: Any) -> dict[str, Any]:
    """Send a request for an unknown model, which is checked last; return the error."""
    with server.client() as http:
        return http.post(path, json=PLAIN[path] | fields).json()["error"]


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_error_for_an_unsupported_field_names_the_field(server: FrontEnd, path: str, name: str) -> None:
    error = error_of(server, path, **{name: ASKING[path][name]})
    assert error["message"].startswith(f"`{name}` is not supported by this server; leave it out"), error
    assert (error["param"], error["code"], error["type"]) == (name, "unsupported_field", "invalid_request_error")


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_unsupported_fields_are_accepted_with_values_without_effect(server: FrontEnd, path: str, name: str) -> None:
    for value in (None, *TABLES[path][name].neutral):
        assert error_of(server, path, **{name: value})["code"] == "model_not_found", value


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_openai_field_is_either_supported_or_tested_as_unsupported(path: str) -> None:
    assert OPENAI[path] - set(SCHEMAS[path].model_fields) <= set(ASKING[path])
    assert set(TABLES[path]) == set(ASKING[path])
    assert not set(TABLES[path]) & set(SCHEMAS[path].model_fields)


@pytest.mark.parametrize("path", SCHEMAS)
def test_errors_distinguish_unknown_fields_from_unsupported_fields(server: FrontEnd, path: str) -> None:
    error = error_of(server, path, temprature=0.5)
    assert error["message"] == "`temprature` is not a known field; leave it out" and error["param"] == "temprature"


def test_error_for_an_unsupported_field_names_the_alternative(server: FrontEnd) -> None:
    expected = "`length_penalty` is not supported by this server; leave it out or send 1"
    assert error_of(server, COMPLETIONS, length_penalty=2)["message"] == expected
    assert error_of(server, COMPLETIONS, length_penalty=True)["message"] == expected  # true is not 1


@pytest.mark.parametrize("path", SCHEMAS)
def test_api_description_lists_every_unsupported_field(server: FrontEnd, path: str) -> None:
    with server.client() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas[SCHEMAS[path].__name__]["properties"]
    for name, row in TABLES[path].items():
        assert fields[name]["enum"] == [None, *row.neutral] and name in fields[name]["description"]


MESSAGES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"role": "narrator", "content": "x"}, "messages.0.role", ("system, developer, user, assistant",)),
    ({"role": "user", "content": None}, "messages.0.content", ("role user", "null", "send text")),
    ({"role": "user"}, "messages.0.content", ("missing",)),
    ({"role": "system", "content": None}, "messages.0.content", ("role system",)),
    ({"role": "function", "content": "5", "name": "f"}, "messages.0.role", ("not supported by this server", "tool")),
    ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function", ("Field required",)),
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls", ("only role assistant",)),
    (
        {"role": "assistant", "function_call": FUNCTION},
        "messages.0.function_call",
        ("is not supported",),
    ),
    (
        {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]},
        "messages.0.tool_calls.0.type",
        ("a tool of type 'custom' is not supported by this server; send functions",),
    ),
]


@pytest.mark.parametrize(("message", "param", "words"), MESSAGES)
def test_error_for_an_invalid_message_names_the_field_and_reason(
    server: FrontEnd, message: dict[str, Any], param: str, words: tuple[str, ...]
) -> None:
    error = error_of(server, CHATS, messages=[message])
    assert error["param"] == param and all(word in error["message"] for word in words), error


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_every_conversation_role_is_accepted(server: FrontEnd, role: str) -> None:
    assert error_of(server, CHATS, messages=[{"role": role, "content": "x"}])["code"] == "model_not_found"


@pytest.mark.parametrize("path", SCHEMAS)
@pytest.mark.parametrize("stream", [None, False])
def test_stream_options_are_refused_without_streaming(server: FrontEnd, path: str, stream: bool | None) -> None:
    error = error_of(server, path, stream_options={"include_usage": True}, stream=stream)
    assert error["message"] == "stream_options requires stream to be true", error
    error = error_of(server, path, stream_options={"include_obfuscation": True}, stream=True)
    assert error["param"] == "stream_options.include_obfuscation" and "is not supported" in error["message"]
    options = {"include_usage": True, "include_obfuscation": False}
    assert error_of(server, path, stream_options=options, stream=True)["code"] == "model_not_found"


TOOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [TOOL, TOOL]}, "tools", "two tools are named f; give each tool a different name"),
    ({"tools": [{"type": "function", "function": {"name": 'a"\n'}}]}, "tools.0.function.name", "match pattern"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "Field required"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}},
        "tool_choice.mode",
        "Input should be 'auto' or 'required'",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice.type",
        "a tool of type 'custom' is not supported by this server; send functions",
    ),
    ({"tools": [TOOL, {"type": 5, "function": FUNCTION}]}, "tools.1.type", "valid string"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "continue_final_message requires add_generation_prompt to be false",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), TOOLS)
def test_unsupported_tools_are_refused(server: FrontEnd, fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(server, CHATS, **fields)
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_function_tools_are_accepted_with_every_tool_choice(server: FrontEnd, choice: str | None) -> None:
    assert error_of(server, CHATS, tools=[TOOL], tool_choice=choice)["code"] == "model_not_found"


BODIES: list[tuple[bytes, str | None, tuple[str, ...]]] = [
    (b'{"prompt": "x",}', "application/json", ("not valid JSON", "character 15")),
    (b'{"prompt": "x"', "application/json", ("not valid JSON",)),
    (b'{"prompt": "x"}', None, ("Content-Type is missing", "send application/json")),
    (b'{"prompt": "x"}', "text/plain", ("Content-Type is 'text/plain'", "send application/json")),
    (b'{"prompt": "x"}', "application/x-www-form-urlencoded", ("x-www-form-urlencoded", "send application/json")),
    (b"[]", "application/json; charset=utf-8", ("the body must be a JSON object",)),
    (b"7", "application/json", ("the body must be a JSON object",)),
    (b"", "application/json", ("the body is empty", "JSON object")),
]


@pytest.mark.parametrize(("body", "content_type", "words"), BODIES)
def test_error_for_a_malformed_body_has_the_reason(
    server: FrontEnd, body: bytes, content_type: str | None, words: tuple[str, ...]
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    with server.client() as http:
        reply = http.post(COMPLETIONS, content=body, headers=headers)
    error = reply.json()["error"]
    assert reply.status_code == 400 and all(word in error["message"] for word in words), error
    assert set(error) == {"message", "type", "param", "code"}
