"""OpenAI's responses API with OpenAI's client: items, streams, tools, earlier responses and refusals."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import response_create_params

from megatron_mamba_cache.server.errors import ApiError
from megatron_mamba_cache.server.responses_api.schemas import ResponsesRequest
from megatron_mamba_cache.server.responses_api.stored import StoredResponses
from tests.server.front_end import BLUE, RED
from tests.server.running_server import MODEL, RunningServer
from tests.server.scripted_agent import TEMPLATES, TOOL, WRITTEN, Agent, agent_of

TOOLS: Any = [{"type": "function", **TOOL["function"]}]
REPLY = "<think>\nHm.\n</think>\n\nI look.\n" + WRITTEN["hermes"] % "Oslo"
REPLIED = "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look.\n"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_of(tmp_path_factory.mktemp("agent") / "hermes", TEMPLATES["hermes"]) as found:
        yield found


def asked(agent: Agent, reply: str, end: str = "stop", **fields: Any) -> Any:
    """Send a request without streaming; return the response."""
    with agent.saying(reply, end):
        return agent.client.responses.create(**{"model": "scripted", "input": "Weather?", "tools": TOOLS} | fields)


def described(item: Any) -> dict[str, Any]:
    return item.model_dump(exclude={"id", "call_id"}, exclude_none=True)


def test_response_has_separate_items_for_reasoning_text_and_calls(agent: Agent) -> None:
    response = asked(agent, REPLY, metadata={"a": "b" * 512}, reasoning={"effort": "low", "summary": "auto"})
    reasoning, text, call = response.output
    assert reasoning.content[0].text == "Hm." and text.content[0].text == response.output_text == "I look."
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "get_weather", {"city": "Oslo", "days": 3},
    )  # fmt: skip
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.metadata == {"a": "b" * 512} and response.tools[0].name == "get_weather"
    assert response.usage.input_tokens == len(agent.prompts()[-1]) and response.usage.total_tokens > 60
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_streamed_response_equals_the_response_without_streaming(agent: Agent) -> None:
    whole = asked(agent, REPLY)
    with (
        agent.saying(REPLY),
        agent.client.responses.stream(model="scripted", input="Weather?", tools=TOOLS) as stream,
    ):
        events = list(stream)
        streamed = stream.get_final_response()
    assert [described(item) for item in streamed.output] == [described(item) for item in whole.output]
    assert streamed.usage == whole.usage and streamed.status == "completed"
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert kinds.count("response.function_call_arguments.delta") > 10
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "I look."


SUMMARY_EVENTS = ["part.added", "text.delta", "text.done", "part.done"]


@pytest.mark.parametrize(("summary", "is_given"), [("auto", True), ("detailed", True), ("none", False), (None, False)])
def test_reasoning_is_returned_as_a_summary_on_request(agent: Agent, summary: str | None, is_given: bool) -> None:
    fields: Any = {"model": "scripted", "input": "Weather?", "tools": TOOLS, "reasoning": {"summary": summary}}
    whole = asked(agent, REPLY, **fields)
    assert whole.output[0].content[0].text == "Hm." and whole.reasoning.summary == summary
    assert [part.text for part in whole.output[0].summary] == ["Hm."] * is_given
    with agent.saying(REPLY), agent.client.responses.stream(**fields) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [described(item) for item in streamed.output] == [described(item) for item in whole.output]
    prefix = "response.reasoning_summary_"
    summaries = [event for event in events if event.type.startswith(prefix)]
    kinds = dict.fromkeys(event.type.removeprefix(prefix) for event in summaries)  # in order, without duplicates
    assert list(kinds) == SUMMARY_EVENTS * is_given
    assert "".join(event.delta for event in summaries if event.type.endswith("delta")) == "Hm." * is_given
    (added,) = [event for event in events if event.type == "response.output_item.added" and event.output_index == 0]
    assert {event.item_id for event in summaries} <= {added.item.id}


@pytest.mark.parametrize("remembers", [False, True])
def test_prompt_of_each_turn_starts_with_the_tokens_of_earlier_turns(agent: Agent, remembers: bool) -> None:
    history: list[Any] = [{"role": "user", "content": f"Remembers {remembers}."}]
    previous: dict[str, Any] = {}
    for number in range(5):
        reply = "<think>\nHm.\n</think>\n\n" + WRITTEN["hermes"] % f"city {number}"
        response = asked(agent, reply, input=history, instructions="Be brief.", store=remembers, **previous)
        exact = [*agent.prompts()[-1], *agent.tokens(reply)]
        result = {"type": "function_call_output", "call_id": response.output[-1].call_id, "output": f"{number} degrees"}
        new = [result, {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}]
        if remembers:
            history, previous = new, {"previous_response_id": response.id}
        else:
            history = [*history, *(item.model_dump(exclude_none=True) for item in response.output), *new]
        asked(agent, "Done.", input=history, instructions="Be brief.", store=False, **previous)
        assert list(agent.prompts()[-1][: len(exact)]) == exact
    text = agent.tokenizer.detokenize(agent.prompts()[-1])
    assert text.count("Be brief.") == 1 and text.count("degrees") == text.count("And?") == 5


def test_stored_response_is_readable_only_by_its_owner_until_deleted(server: RunningServer) -> None:
    red = openai.OpenAI(base_url=f"{server.url}/v1", api_key=RED, max_retries=0)
    blue = openai.OpenAI(base_url=f"{server.url}/v1", api_key=BLUE, max_retries=0)
    greedy: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 80}
    first = red.responses.create(input="import os\n" * 60, **greedy)
    assert first.status == "incomplete" and first.incomplete_details.reason == "max_output_tokens"
    assert red.responses.retrieve(first.id).output_text == first.output_text
    second = red.responses.create(input="\n\ndef a", previous_response_id=first.id, **greedy)
    skipped = second.usage.input_tokens_details.cached_tokens
    assert skipped >= first.usage.total_tokens - 64 and second.usage.input_tokens - skipped < 2 * 64
    for refused in (
        lambda: blue.responses.retrieve(first.id),
        lambda: blue.responses.delete(first.id),
    ):
        with pytest.raises(openai.NotFoundError, match="is not stored on this server"):
            refused()
    for client, previous in ((blue, first.id), (red, "resp_none")):
        with pytest.raises(openai.BadRequestError, match=f"response with id '{previous}' not found") as found:
            client.responses.create(input="x", previous_response_id=previous, **greedy)
        assert (found.value.code, found.value.param) == ("previous_response_not_found", "previous_response_id")
    unkept = red.responses.create(input="x", store=False, **greedy)
    with pytest.raises(openai.NotFoundError):
        red.responses.retrieve(unkept.id)
    red.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id):
        red.responses.create(input="x", previous_response_id=second.id, **greedy)


def test_stored_responses_are_bounded_per_api_key() -> None:
    stored = StoredResponses(1000)
    stored.keep("blue", [], {"id": "blue", "previous_response_id": None})
    for number in range(100):
        output = [{"id": f"item {number}"}]
        body = {"id": f"{number}", "previous_response_id": None, "text": "x" * (number % 40), "output": output}
        stored.keep("red", [{"role": "user", "content": "y" * (number % 30)}], body)
        stored.find("red", f"{number}")
        assert 0 < stored.num_bytes("red") <= 1000 and stored.item("red", f"item {number}") == output[0]
    stored.keep("red", [], {"id": "large", "previous_response_id": None, "text": "x" * 1000})
    for owner, response_id in (("red", "0"), ("red", "large"), ("red", "blue"), ("none", "99")):
        with pytest.raises(ApiError, match="is not stored on this server"):
            stored.find(owner, response_id)
    for owner, item_id in (("red", "item 0"), ("blue", "item 99"), ("none", "item 99")):
        with pytest.raises(ApiError, match="is not stored on this server"):
            stored.item(owner, item_id)
    assert len(stored._response_of) == len(stored._stored["red"])
    stored.find("blue", "blue")
    stored.forget("blue", "blue")
    assert stored.num_bytes("blue") == 0


NAMED = {"type": "function", "name": "f"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice requires a call, but the request has no tools"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice names 'f', which is not in tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}},
        "tool_choice names 'f', which is not in tools",
    ),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice.type: a tool of type 'web_search' is not supported by this server",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "a part of type 'input_image' is not",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item with id 'x' not found: it is not stored on this server"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "an item of type 'compaction' is not supported"),
    ({"input": []}, "at least 1 item"),
    ({"background": True}, "`background` is not supported by this server; leave it out"),
    (
        {"conversation": "x"},
        "`conversation` is not supported by this server; leave it out, or send previous_response_id",
    ),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type: Input should be 'text', 'json_object'"),
    ({"truncation": "always"}, "`truncation` is not supported by this server"),
    ({"include": ["message.output_text.logprobs"]}, "`include` is not supported by this server"),
    ({"max_output_tokens": 0}, "max_output_tokens: "),
    ({"temprature": 1}, "`temprature` is not a known field; leave it out"),
    ({"model": "another"}, "the model 'another' is not served here"),
    ({"input": [{"role": "user", "content": "x"}] * 5000}, "at most 4096 items"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_responses_api_refuses_unsupported_values(agent: Agent, fields: dict[str, Any], words: str) -> None:
    body = {"model": "scripted", "input": "x"} | fields
    reply = httpx.post(f"{agent.server.listening.url}/v1/responses", json=body, timeout=60)
    assert reply.status_code in (400, 404) and words in reply.json()["error"]["message"], reply.text


def test_every_responses_field_of_openais_client_library_is_known() -> None:
    known = {*ResponsesRequest.model_fields, *ResponsesRequest.unsupported}
    assert set(response_create_params.ResponseCreateParamsBase.__annotations__) <= known


def test_responses_api_accepts_values_without_effect(agent: Agent) -> None:
    fields = {
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "auto",
        "background": False,
        "prompt_cache_key": "x",
        "stream_options": {"include_obfuscation": False},
        "parallel_tool_calls": True,
    }
    assert asked(agent, "Yes.", **fields).output_text == "Yes."
    assert asked(agent, "").output == [] and asked(agent, "Ye", end="length").status == "incomplete"
    cut = asked(agent, REPLY[:-20])
    assert cut.status == "completed" and cut.output[-1].status == "incomplete"


def test_error_during_a_response_stream_is_an_error_event(agent: Agent) -> None:
    with agent.saying("Ye", end="error"):
        events = list(agent.client.responses.create(model="scripted", input="x", stream=True))
    assert events[-1].type == "error" and "the request failed" in events[-1].message
