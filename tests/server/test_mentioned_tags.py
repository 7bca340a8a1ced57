"""Tags and mentions of tags over HTTP: all three APIs return the same parts, streamed or not."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.front_end import front_end
from tests.server.parsers.tagged_replies import KINDS, Tag, tagged_tokenizer, tokens_of
from tests.server.scripted_agent import ASKED, TEMPLATES, TOOL, TagAgent

TEMPLATE = TEMPLATES["hermes"].replace("assistant\n{%", "assistant\n<think>\n{%")
THOUGHTS = "The user writes </think> and <tool_call> in `the </think> text`."
CONTENT = 'A <tool_call> is a tag, and "</think>" is one:\n```\n<tool_call>\n{"name": "get_weather"}\n```'
ARGUMENTS = {"city": "<tool_call>\n</think>", "days": 3}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS})
CALLED = [Tag("<tool_call>"), f"\n{CALL}\n", Tag("</tool_call>")]
REPLY: Any = [f"{THOUGHTS}\n", Tag("</think>"), f"\n\n{CONTENT}\n", *CALLED]


@pytest.fixture(scope="module", params=KINDS)
def agent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TagAgent]:
    tokenizer = tagged_tokenizer(tmp_path_factory.mktemp("http") / request.param, request.param, TEMPLATE)
    with front_end(keys=(), tokenizer=tokenizer) as server:
        yield TagAgent(server, tokenizer)


def test_mentioned_tags_are_text_in_chat_completions(agent: TagAgent) -> None:
    for choice in agent.answered(REPLY, n=2).choices:
        message = choice.message
        assert (message.reasoning_content, message.content) == (THOUGHTS, CONTENT)
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [ARGUMENTS]
        assert choice.finish_reason == "tool_calls"
    deltas, finish = agent.ask_streamed(REPLY)
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHTS
    assert "".join(delta.content or "" for delta in deltas) == CONTENT and finish == "tool_calls"


def test_mentioned_tags_are_text_in_the_messages_api(agent: TagAgent) -> None:
    client = anthropic.Anthropic(base_url=agent.server.listening.url, api_key="none", max_retries=0)
    tool: Any = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    with agent.saying(REPLY):
        message = client.messages.create(model="scripted", max_tokens=900, messages=ASKED, tools=[tool])
    found = [block.model_dump() for block in message.content]
    assert [block["type"] for block in found] == ["thinking", "text", "tool_use"]
    assert (found[0]["thinking"], found[1]["text"], found[2]["input"]) == (THOUGHTS, CONTENT, ARGUMENTS)


def test_mentioned_tags_are_text_in_the_responses_api(agent: TagAgent) -> None:
    with agent.saying(REPLY):
        tool: Any = {"type": "function", **TOOL["function"]}
        response = agent.client.responses.create(model="scripted", input="Weather?", tools=[tool])
    reasoning, text, call = response.output
    assert (reasoning.content[0].text, text.content[0].text) == (THOUGHTS, CONTENT)
    assert json.loads(call.arguments) == ARGUMENTS


@pytest.mark.parametrize(("cut", "finish"), [({"end": "length"}, "length"), ({"stop": ["` the", "`the"]}, "stop")])
def test_reply_that_ends_within_reasoning_has_no_content(agent: TagAgent, cut: Any, finish: str) -> None:
    chat = agent.answered([THOUGHTS], **cut)
    message, begun = chat.choices[0].message, THOUGHTS.partition("`the")[0] if "stop" in cut else THOUGHTS
    assert message.reasoning_content == begun.rstrip() and not message.content and not message.tool_calls
    assert chat.choices[0].finish_reason == finish
    assert chat.usage.completion_tokens_details.reasoning_tokens == chat.usage.completion_tokens > 30


def test_usage_counts_only_reasoning_tokens_as_reasoning(agent: TagAgent) -> None:
    until = len(tokens_of(agent.tokenizer, REPLY[:2]))
    usage = agent.answered(REPLY).usage
    assert usage.completion_tokens_details.reasoning_tokens == until


def test_next_turn_contains_the_exact_tokens_of_a_reply_that_mentions_tags(agent: TagAgent) -> None:
    message = agent.answered(REPLY).choices[0].message.model_dump(exclude_none=True)
    exact = [*agent.prompts()[-1], *agent.tokens(REPLY)]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    agent.ask([Tag("</think>"), "Done."], messages=[*ASKED, message, result])
    assert list(agent.prompts()[-1][: len(exact)]) == exact
