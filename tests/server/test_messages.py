"""Anthropic's messages API with Anthropic's client: blocks, streams, tools, thinking, usage and refusals."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_message_count_tokens_params
from anthropic.types.beta import message_create_params as beta_message_create_params

from megatron_mamba_cache.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from tests.server.front_end import RED
from tests.server.running_server import MODEL, RunningServer
from tests.server.scripted_agent import TEMPLATES, TOOL, WRITTEN, Agent, agent_of

FUNCTION = TOOL["function"]
TOOLS: Any = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
]
ASKED: list[Any] = [{"role": "user", "content": "Weather?"}]
REPLY = "<think>\nHm.\n</think>\n\nI look.\n" + WRITTEN["hermes"] % "Oslo"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_of(tmp_path_factory.mktemp("agent") / "hermes", TEMPLATES["hermes"]) as found:
        yield found


@pytest.fixture
def client(agent: Agent) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=agent.server.listening.url, api_key="none", max_retries=0)


def asked(agent: Agent, client: anthropic.Anthropic, reply: str, end: str = "stop", **fields: Any) -> Any:
    """Send a request without streaming; return the message."""
    settings: Any = {"model": "scripted", "max_tokens": 100, "messages": ASKED, "tools": TOOLS} | fields
    with agent.saying(reply, end):
        return client.messages.create(**settings)


def test_reply_has_separate_content_blocks_for_thinking_text_and_calls(
    agent: Agent, client: anthropic.Anthropic
) -> None:
    message = asked(agent, client, REPLY)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.") and (text.type, text.text) == ("text", "I look.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo", "days": 3})
    assert (message.stop_reason, message.stop_sequence, message.role) == ("tool_use", None, "assistant")
    assert message.usage.input_tokens == len(agent.prompts()[-1]) and message.usage.cache_read_input_tokens == 0


CALL = '<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>'


@pytest.mark.parametrize(
    ("reply", "arguments"),
    [
        (REPLY, {"city": "Oslo", "days": 3}),
        (CALL % "{}", {}),
        (CALL % '{"city": "\\ud800", "days": [NaN, 1e999]}', {"city": "\ufffd", "days": ["NaN", "1e999"]}),
        (CALL % "{bad}", {"malformed_input": "{bad}"}),
        (CALL % "[1]", {"malformed_input": "[1]"}),
        (CALL % '"hello"', {"malformed_input": "hello"}),
        (CALL % "5", {"malformed_input": "5"}),
        (CALL.partition("%")[0] + '{"city": "Oslo", "days": tru', {"malformed_input": '{"city": "Oslo", "days": tru'}),
    ],
)
def test_streamed_message_equals_the_message_without_streaming(
    agent: Agent, client: anthropic.Anthropic, reply: str, arguments: dict[str, Any]
) -> None:
    whole = asked(agent, client, reply)
    with (
        agent.saying(reply),
        client.messages.stream(model="scripted", max_tokens=100, messages=ASKED, tools=TOOLS) as stream,
    ):
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    kinds = {"id"}
    assert [block.model_dump(exclude=kinds) for block in streamed.content] == [
        block.model_dump(exclude=kinds) for block in whole.content
    ]
    assert whole.content[-1].input == arguments
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert events[0] == "message_start" and events[-1] == "message_stop" and events.count("input_json") == 1


@pytest.mark.parametrize("thinks", [False, True])
def test_prompt_of_each_turn_starts_with_the_tokens_of_earlier_turns(
    agent: Agent, client: anthropic.Anthropic, thinks: bool
) -> None:
    messages = [{"role": "user", "content": f"Thinking {thinks}."}]
    for number in range(5):
        reply = "<think>\nHm.\n</think>\n\n" * thinks + WRITTEN["hermes"] % f"city {number}"
        message = asked(agent, client, reply, messages=messages, system=[{"type": "text", "text": "Be brief."}])
        result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": f"{number} degrees"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in message.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        exact = [*agent.prompts()[-1], *agent.tokens(reply)]
        asked(agent, client, "Done.", messages=messages, system="Be brief.")
        assert list(agent.prompts()[-1][: len(exact)]) == exact
    text = agent.tokenizer.detokenize(agent.prompts()[-1])
    assert text.index("Be brief.") < text.index("Thinking") and text.endswith(
        "<|im_start|>tool\n4 degrees<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stop_reason_says_why_the_reply_ended(agent: Agent, client: anthropic.Anthropic) -> None:
    assert asked(agent, client, "Yes.").stop_reason == "end_turn"
    assert asked(agent, client, "Yes.", end="length").stop_reason == "max_tokens"
    stopped = asked(agent, client, "Yes. No.", stop_sequences=[" N"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", " N", "Yes.")
    cut = asked(agent, client, '<tool_call>{"name": "get_weather", "arguments": {"city": "Os', end="length")
    assert cut.stop_reason == "max_tokens" and cut.content[0].input == {"malformed_input": '{"city": "Os'}
    assert asked(agent, client, '<tool_call>{"name": "get_weather", "arguments": {').stop_reason == "end_turn"
    assert asked(agent, client, "").content == []


def test_reply_ends_at_the_context_length(agent: Agent, client: anthropic.Anthropic) -> None:
    cut = asked(agent, client, "Yes.", end="length", max_tokens=10_000)
    request = agent.server.backend.asked[-1]
    assert cut.stop_reason == "model_context_window_exceeded"
    assert len(request.prompt) + request.max_tokens == agent.server.backend.max_sequence_length
    messages = [{"role": "user", "content": "x " * agent.server.backend.max_sequence_length}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="scripted", max_tokens=1, messages=messages)  # type: ignore[arg-type]


def test_reasoning_text_is_omitted_on_request(agent: Agent, client: anthropic.Anthropic) -> None:
    omitted: Any = {"thinking": {"type": "adaptive", "display": "omitted"}}
    whole = asked(agent, client, REPLY, **omitted)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"] and not whole.content[0].thinking
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    settings: Any = {"model": "scripted", "max_tokens": 100, "messages": ASKED, "tools": TOOLS} | omitted
    with agent.saying(REPLY), client.messages.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "thinking" not in kinds and [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert streamed.content[0].thinking == "" and streamed.content[1].text == "I look."


def test_system_messages_between_turns_are_in_the_prompt(agent: Agent, client: anthropic.Anthropic) -> None:
    messages = [*ASKED, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    asked(agent, client, "Yes.", messages=messages, system="Be kind.")
    text = agent.tokenizer.detokenize(agent.prompts()[-1], skip_special_tokens=False)
    assert text.index("system\nBe kind.") < text.index("user\nWeather?") < text.index("system\nBe brief.")


def test_replies_and_errors_have_the_request_id(agent: Agent, client: anthropic.Anthropic) -> None:
    assert len(asked(agent, client, "Yes.", extra_headers={"x-request-id": "ours"})._request_id) == len("ours")
    with pytest.raises(anthropic.BadRequestError) as found:
        client.messages.create(model="scripted", max_tokens=0, messages=ASKED)
    assert found.value.request_id and found.value.body["request_id"] == found.value.request_id  # type: ignore[index]
    reply = httpx.get(f"{agent.server.listening.url}/v1/models", timeout=60)
    assert "request-id" not in reply.headers and reply.headers["x-request-id"]


def test_reply_ends_after_one_call_when_parallel_calls_are_disabled(agent: Agent, client: anthropic.Anthropic) -> None:
    reply = WRITTEN["hermes"] % "Oslo" * 2
    assert len(asked(agent, client, reply).content) == 2
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(asked(agent, client, reply, tool_choice=choice).content) == 1
    assert asked(agent, client, reply, tool_choice={"type": "none"}).content[0].text == reply


@pytest.mark.parametrize("begun", ["The answer is (", [{"type": "text", "text": "The answer is ("}]])
def test_reply_continues_a_final_assistant_message(
    agent: Agent, client: anthropic.Anthropic, begun: str | list[Any]
) -> None:
    messages = [*ASKED, {"role": "assistant", "content": begun}]
    assert asked(agent, client, "B)", messages=messages).content[0].text == "B)"
    text = agent.tokenizer.detokenize(agent.prompts()[-1], skip_special_tokens=False)
    assert text.endswith("Weather?<|im_end|>\n<|im_start|>assistant\nThe answer is (")
    counted = client.messages.count_tokens(model="scripted", messages=messages, tools=TOOLS)
    assert counted.input_tokens == len(agent.prompts()[-1])


@pytest.mark.parametrize("begun", ["", [], [{"type": "text", "text": " "}]])
def test_empty_final_assistant_message_does_not_change_the_reply(
    agent: Agent, client: anthropic.Anthropic, begun: str | list[Any]
) -> None:
    asked(agent, client, "Yes.")
    asked(agent, client, "Yes.", messages=[*ASKED, {"role": "assistant", "content": begun}])
    assert agent.prompts()[-1] == agent.prompts()[-2]


USED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "odd"}}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'"),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools.0.input_schema: Field required"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a block of type 'image' is not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text: Field required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, USED]}]},
        "messages.0.content.1.type: a message with role user cannot contain a block of type 'tool_use'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a", "signature": ""}]}]},
        "messages.0.content.0.type: a message with role user cannot contain a block of type 'thinking'",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, *ASKED]},
        "messages.0.content.0.type: a message with role assistant cannot contain a block of type 'tool_result'",
    ),
    (
        {"messages": [*ASKED, {"role": "assistant", "content": [USED]}]},
        "a final assistant message must have text and no tool_use",
    ),
    ({"system": [{"type": "image"}]}, "a block of type 'image' is not supported"),
    ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers` is not supported by this server; leave it out"),
    ({"speed": "fast"}, '`speed` is not supported by this server; leave it out or send "standard"'),
    ({"fallbacks": [{"model": "x"}]}, "`fallbacks` is not supported by this server; leave it out"),
    ({"thread": {"id": "x"}}, "`thread` is not supported by this server; leave it out"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type: Input should be 'enabled', 'disabled' or 'adaptive'"),
    (
        {"messages": [*ASKED, {"role": "system", "content": "x", "clear_at": "next_user_message"}]},
        "`clear_at` is not supported by this server",
    ),
    (
        {"messages": [{"role": "system", "content": [USED]}, *ASKED]},
        "messages.0.content.0.type: a message with role system cannot contain a block of type 'tool_use'",
    ),
    ({"context_management": {"edits": [{"type": "x"}]}}, "`context_management` is not supported by this server"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: Field required"),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"model": "another"}, "the model 'another' is not served here"),
    ({"temprature": 1}, "`temprature` is not a known field; leave it out"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_messages_api_refuses_unsupported_values(
    agent: Agent, client: anthropic.Anthropic, fields: dict[str, Any], words: str
) -> None:
    body = {"model": "scripted", "max_tokens": 5, "messages": ASKED} | fields
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and set(fields) <= {"max_tokens", "temprature"}:
            continue
        sent = {name: value for name, value in body.items() if name != "max_tokens" or path == "/v1/messages"}
        with pytest.raises((anthropic.BadRequestError, anthropic.NotFoundError)) as found:
            client.post(path, body=sent, cast_to=dict[str, Any])
        error = found.value.response.json()
        kind = "not_found_error" if "model" in fields else "invalid_request_error"
        assert error["type"] == "error" and error["error"]["type"] == kind and words in error["error"]["message"], error


def test_messages_api_accepts_values_without_effect(agent: Agent, client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    extra = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "cache_control": {"type": "ephemeral"},
        "mcp_servers": [],
        "speed": "standard",
        "fallbacks": "default",
        "diagnostics": {"previous_message_id": None},
    }
    message = asked(agent, client, "Yes.", thinking=thinking, metadata={"user_id": "a"}, extra_body=extra)
    assert message.content[0].text == "Yes."


def test_every_field_of_anthropics_client_library_is_known() -> None:
    """Fields that the library sends as headers are excluded."""
    for request, params in (
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (MessagesRequest, beta_message_create_params.MessageCreateParamsBase),
        (CountTokensRequest, beta_message_count_tokens_params.MessageCountTokensParams),
    ):
        known = {*request.model_fields, *request.unsupported, "betas", "user_profile_id", "workspace_id", "stream"}
        assert set(params.__annotations__) <= known


def test_counted_tokens_equal_the_input_tokens_of_the_message(agent: Agent, client: anthropic.Anthropic) -> None:
    asked(agent, client, "Yes.", system="Be brief.")
    counted = client.messages.count_tokens(model="scripted", messages=ASKED, tools=TOOLS, system="Be brief.")
    assert counted.input_tokens == len(agent.prompts()[-1])


def test_error_during_a_stream_is_an_error_event(agent: Agent, client: anthropic.Anthropic) -> None:
    with agent.saying("Ye", end="error"), pytest.raises(anthropic.APIStatusError) as found:
        list(client.messages.create(model="scripted", max_tokens=5, messages=ASKED, stream=True))
    assert found.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_conversation_with_the_example_model_hits_the_cache_and_needs_a_key(server: RunningServer) -> None:
    """The prompt equals the prompt of a chat completion; the next turn skips all but its last blocks."""
    client = anthropic.Anthropic(base_url=server.url, api_key=RED, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "import os\n" * 60}]
    greedy: Any = {"model": MODEL, "max_tokens": 80, "extra_body": {"top_k": 1}}
    first = client.messages.create(messages=messages, **greedy)
    text = first.content[0].text
    with server.client() as http:
        body = {"messages": messages, "max_tokens": 80, "top_k": 1}
        assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "\n\ndef a"}]
    usage = client.messages.create(messages=messages, **greedy).usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens >= first.usage.input_tokens + 80 - 64 and usage.input_tokens < 2 * 64 < total
    reply = httpx.post(f"{server.url}/v1/messages", headers={"x-api-key": "wrong"}, json={}, timeout=60)
    assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
    assert json.loads(reply.text)["type"] == "error"
