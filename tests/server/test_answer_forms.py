"""Formatted answers and required calls over HTTP, with a model that does not follow instructions."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import httpx
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.running_server import KEYS, RED, RunningServer, at_once, running_server

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
NOW: Any = {"type": "function", "function": {"name": "now", "description": "What time it is"}}
ASKED: list[Any] = [{"role": "user", "content": "Weather?"}]
QUOTED = 'it\'s "a"\nb'


class City(BaseModel):
    """Pydantic model from which clients generate a schema."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    size: Literal["small", "large"]
    districts: list[Annotated[int, Field(ge=0, le=99)]] = Field(min_length=1, max_length=2)


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder", "nemotron_nano_v2", "granite", "json"])
def caller(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """Client of a server that uses a model family's call format."""
    with running_server("--tool-call-parser", request.param, "--reasoning-parser", "none") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=RED, max_retries=0)


def is_city(arguments: str) -> bool:
    return bool(jsonschema_rs.is_valid(CITY, json.loads(arguments)))


def test_required_tool_call_is_generated_in_every_call_format(caller: openai.OpenAI) -> None:
    def ask(seed: int) -> None:
        settings: Any = {"model": "small_python_model", "messages": ASKED, "tools": [WEATHER, NOW], "seed": seed}
        chat = caller.chat.completions.create(tool_choice="required", parallel_tool_calls=False, **settings)
        choice = chat.choices[0]
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        if call.function.name == "get_weather":
            assert is_city(call.function.arguments), call
        else:
            assert call.function.name == "now" and json.loads(call.function.arguments) == {}
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        chunks = list(caller.chat.completions.create(tool_choice=named, stream=True, **settings))
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [part.function.name for part in parts if part.id] == ["get_weather"]
        assert is_city("".join(part.function.arguments or "" for part in parts))
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    at_once(ask, range(4))


def test_reply_is_an_answer_or_a_call_when_both_are_allowed(caller: openai.OpenAI) -> None:
    answer: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}

    def ask(seed: int) -> None:
        chat = caller.chat.completions.create(
            model="small_python_model",
            messages=ASKED,
            tools=[WEATHER],
            response_format=answer,
            parallel_tool_calls=False,
            seed=seed,
        )
        message = chat.choices[0].message
        if message.tool_calls:
            assert all(is_city(call.function.arguments) for call in message.tool_calls if call.type == "function")
        else:
            City.model_validate_json(message.content or "")

    at_once(ask, range(4))


@pytest.mark.parametrize("stream", [False, True])
def test_openai_client_parses_a_reply_into_its_pydantic_model(client: openai.OpenAI, stream: bool) -> None:
    settings: Any = {"model": "small_python_model", "messages": ASKED, "response_format": City, "seed": 3}
    if stream:
        with client.chat.completions.stream(**settings) as events:
            chat = events.get_final_completion()
    else:
        chat = client.chat.completions.parse(**settings)
    assert isinstance(chat.choices[0].message.parsed, City) and chat.choices[0].finish_reason == "stop"
    tool = openai.pydantic_function_tool(City)
    called = client.chat.completions.parse(
        model="small_python_model",
        messages=ASKED,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=4,
    )
    (first, *_) = called.choices[0].message.tool_calls or ()
    assert isinstance(first.function.parsed_arguments, City)


def test_responses_api_supports_answer_formats_and_required_tool_calls(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="small_python_model", input="A city?", text_format=City)
    assert isinstance(parsed.output_parsed, City) and parsed.text.format.type == "json_schema"  # type: ignore[union-attr]
    flat: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
    forced: Any = {"type": "function", "name": "get_weather"}
    called = client.responses.create(model="small_python_model", input="?", tools=[flat], tool_choice=forced)
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert is_city(call.arguments) and called.tool_choice.name == "get_weather"  # type: ignore[union-attr]
    plain = client.responses.create(
        model="small_python_model", input="?", text={"format": {"type": "json_object"}}, max_output_tokens=40
    )
    assert plain.output_text.startswith("{")


def test_messages_api_supports_answer_formats_and_required_tool_calls(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key=RED, max_retries=0)
    settings: Any = {"model": "small_python_model", "max_tokens": 200, "messages": ASKED}
    tools: Any = [{"name": "get_weather", "input_schema": CITY}]
    one = {"type": "any", "disable_parallel_tool_use": True}
    for choice in (one, {"type": "tool", "name": "get_weather"}):
        message = client.messages.create(tools=tools, tool_choice=choice, **settings)
        assert message.stop_reason == "tool_use"
        calls = [block for block in message.content if block.type == "tool_use"]
        assert calls and all(jsonschema_rs.is_valid(CITY, call.input) for call in calls)
    answer = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
    message = client.messages.create(output_config=answer, **settings)
    City.model_validate_json("".join(block.text for block in message.content if block.type == "text"))


ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"structured_outputs": {"regex": r"\d{3}-[a-f]{2}"}}, r"\d{3}-[a-f]{2}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no", QUOTED]}}, "yes|no|" + re.escape(QUOTED)),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" /[0-9]{2}/ "z"'}}, r"a\d\dz"),
    "json text": ({"structured_outputs": {"json": '{"const": 7}'}}, "7"),
    "guided regex": ({"guided_regex": "[xy]{4}"}, "[xy]{4}"),
    "guided choice": ({"guided_choice": ["left", "right"]}, "left|right"),
    "guided json": ({"guided_json": {"enum": [1, None]}}, "1|null"),
    "guided grammar": ({"guided_grammar": 'start: "q" "r"?'}, "qr?"),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": True}}},
        ".+",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_answer_matches_the_requested_format(server: RunningServer, route: str, name: str) -> None:
    fields, pattern = ANSWERS[name]
    asked = {"prompt": "x = "} if route == "/v1/completions" else {"messages": ASKED}
    with server.client() as http:
        bodies = [{**asked, **fields, "max_tokens": 60, "seed": seed} for seed in range(3)]
        replies = at_once(lambda body: http.post(route, json=body).json(), bodies)
    for reply in replies:
        choice = reply["choices"][0]
        text = choice["text"] if route == "/v1/completions" else choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, text, re.S), reply
        else:
            assert name == "schema" and choice["finish_reason"] == "length", reply


def test_constrained_request_does_not_change_concurrent_replies(server: RunningServer) -> None:
    plain = {"prompt": "import os\n", "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    formed = {"prompt": "x = ", "max_tokens": 60, "seed": 1, "structured_outputs": {"json": CITY}, "n": 4}
    with server.client() as http:
        alone = http.post("/v1/completions", json=plain).json()["choices"][0]["token_ids"]
        bodies = (formed, plain, formed, plain)
        replies = at_once(lambda body: http.post("/v1/completions", json=body).json(), bodies)
    assert replies[1]["choices"][0]["token_ids"] == replies[3]["choices"][0]["token_ids"] == alone
    assert all(is_city(choice["text"]) for reply in replies[::2] for choice in reply["choices"])
    assert replies[0]["choices"] == replies[2]["choices"]


NAMED: Any = {"type": "function", "function": {"name": "other"}}
DEEP: Any = {"type": "integer"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format", "schema"),
    ({"guided_json": "{"}, "guided_json", "the text is not valid JSON"),
    ({"guided_json": "[]"}, "guided_json", "the value must be a JSON schema (an object, true or false), found list"),
    ({"guided_json": {"type": "odd"}}, "guided_json", "is not a type of JSON Schema"),
    ({"guided_json": {"not": {"const": 1}}}, "guided_json", "not cannot be enforced"),
    ({"guided_json": {"const": "x" * 2**20}}, "guided_json", "at most 262144 are allowed"),
    ({"guided_json": {"anyOf": [{"const": n} for n in range(10_000)]}}, "guided_json", "at most 2000 are allowed"),
    ({"guided_json": DEEP}, "guided_json", "recursion limit"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    ({"guided_choice": ["a"] * 10_001}, "guided_choice", "at most 10000 items"),
    ({"guided_grammar": "start: ???"}, "guided_grammar", "Expected value"),
    ({"guided_grammar": 'begin: "a"'}, "guided_grammar", "start"),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        "structured_outputs.regex",
        "each set a format for the answer",
    ),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "not supported"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "each set a format"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos cannot be combined with guided_regex"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "min_tokens cannot be combined with guided_regex"),
    ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice", "tool_choice names 'other', which is not in tools"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice requires a call, but the request has no tools"),
]


@pytest.mark.parametrize(("fields", "field", "words"), BAD, ids=[f"{bad[1]}-{bad[2][:16]}" for bad in BAD])
def test_error_for_an_unsupported_answer_format_names_its_field(
    server: RunningServer, fields: dict[str, Any], field: str, words: str
) -> None:
    with server.client() as http:
        reply: httpx.Response = http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 4, **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith(field) and words in error["message"], error


def test_required_call_is_refused_when_the_models_call_format_is_unknown() -> None:
    with running_server(*KEYS, "--tool-call-parser", "none") as server, server.client() as http:
        fields = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required"}
        reply = http.post("/v1/chat/completions", json=fields)
        assert reply.status_code == 400 and "--tool-call-parser" in reply.json()["error"]["message"]


def test_constrained_reply_depends_only_on_its_seed() -> None:
    """Drafts and cached states must not change the reply."""
    body = {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}, "n": 3}
    found = []
    for flags in ((), ("--num-speculative-tokens", "3")):
        with running_server(*flags) as server, server.client() as http:
            for _ in range(2):
                reply = http.post("/v1/chat/completions", json={**body, "seed": 11, "return_token_ids": True}).json()
                found.append([choice["token_ids"] for choice in reply["choices"]])
                assert all(is_city(choice["message"]["content"]) for choice in reply["choices"])
    assert found == [found[0]] * 4


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 1}])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_ignore_eos_and_min_tokens_are_refused_when_calls_are_constrained(
    client: openai.OpenAI, choice: Any, fields: dict[str, Any]
) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    settings: Any = {"model": "small_python_model", "messages": ASKED, "max_tokens": 4, "extra_body": fields}
    name = next(iter(fields))
    message = f"{name} cannot be combined with tools: the format of a constrained reply decides where it ends"
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(tools=[strict], tool_choice=choice, **settings)


def test_strict_tools_do_not_constrain_text_when_calls_are_optional(caller: openai.OpenAI) -> None:
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    settings: Any = {"model": "small_python_model", "messages": ASKED, "max_tokens": 30, "temperature": 0}
    held = caller.chat.completions.create(tools=[strict, NOW], **settings)
    free = caller.chat.completions.create(tools=[WEATHER, NOW], **settings)
    assert held.choices[0].message.content == free.choices[0].message.content
    assert held.choices[0].finish_reason == free.choices[0].finish_reason


def test_unsupported_schema_of_a_strict_tool_is_refused(client: openai.OpenAI) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {"const": 1}}}}}
    for strict, choice in ((True, "auto"), (False, "auto"), (False, "required")):
        tools: Any = [{"type": "function", "function": {**function, "strict": strict}}]
        settings: Any = {"model": "small_python_model", "messages": ASKED, "tools": tools, "max_tokens": 2}
        if (strict, choice) == (False, "auto"):
            client.chat.completions.create(tool_choice=choice, **settings)
            continue
        with pytest.raises(openai.BadRequestError, match="not"):
            client.chat.completions.create(tool_choice=choice, **settings)
