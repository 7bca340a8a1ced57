"""Each cache breakpoint that an API accepts becomes a breakpoint directly after the marked text."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.scripted_agent import TEMPLATES, TOOL, Agent, agent_of

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
OPENAIS = {"prompt_cache_breakpoint": {"mode": "explicit"}}
HALF_HOUR = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = TOOL["function"]
ASKED = {"role": "user", "content": "Weather?"}
END = "<|im_end|>"
CALLED = '"arguments": {"city": "Oslo"}}\n</tool_call>'
AFTER_TOOLS = ("}\n", "<|im_start|>", 0)
NEAR = 3  # tolerance in characters: a token may span the end of the marked text


def calling(*marks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a chat message with one tool call for each mark."""
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": "a", "type": "function", "function": function} | mark for mark in marks]
    return {"role": "assistant", "content": "I look.", "tool_calls": calls} | fields


def using(*marks: dict[str, Any]) -> dict[str, Any]:
    """Return the same message in the format of Anthropic's API."""
    uses = [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}} | mark for mark in marks]
    return {"role": "assistant", "content": [{"type": "text", "text": "I look."}, *uses]}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    """Return a user message with a tool result in the format of Anthropic's API."""
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content, **fields}]}


def part(text: str, mark: dict[str, Any], kind: str = "text") -> dict[str, Any]:
    """Return a content part with a mark."""
    return {"type": kind, "text": text} | mark


DONE = {"role": "tool", "tool_call_id": "a", "content": "5 degrees"}
CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
LETTERS = ["one", "two", "three", "four", "five", "six"]
# Requests, each with the texts before and after each of its breakpoints and with their TTLs in seconds.
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str, int]]]] = {
    "tool": (CHAT, {"messages": [ASKED], "tools": [TOOL | MARK]}, [AFTER_TOOLS]),
    "function": (
        CHAT,
        {"messages": [ASKED], "tools": [TOOL | {"function": FUNCTION | HOUR}]},
        [(*AFTER_TOOLS[:2], 3600)],
    ),
    "message": (CHAT, {"messages": [ASKED | MARK, calling({}), DONE]}, [("Weather?", END, 0)]),
    "result": (CHAT, {"messages": [ASKED, calling({}), DONE | HOUR]}, [("5 degrees", END, 3600)]),
    "message that calls": (CHAT, {"messages": [ASKED, calling({}, {}, **MARK), DONE]}, [(CALLED, END, 0)]),
    "call": (CHAT, {"messages": [ASKED, calling(MARK, {}), DONE]}, [(CALLED, "<tool_call>", 0)]),
    "last call": (CHAT, {"messages": [ASKED, calling({}, HOUR), DONE]}, [(CALLED, END, 3600)]),
    "part": (
        CHAT,
        {"messages": [{"role": "user", "content": [part("first", OPENAIS), part("second", {})]}]},
        [("first", "\nsecond", 0)],
    ),
    "the last four parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [part(text, HALF_HOUR) for text in LETTERS]}]},
        [(letter, "", 1800) for letter in LETTERS[2:]],
    ),
    "tool of a response": (
        RESPONSES,
        {"input": "x", "tools": [{"type": "function", **FUNCTION, **MARK}]},
        [AFTER_TOOLS],
    ),
    "input": (
        RESPONSES,
        {"input": [{"role": "user", "content": [part("one", OPENAIS, "input_text"), part("two", MARK, "input_text")]}]},
        [("one", "\ntwo", 0), ("two", END, 0)],
    ),
    "output": (
        RESPONSES,
        {
            "input": [
                CALL_ITEM,
                {"type": "function_call_output", "call_id": "a", "output": [part("5 degrees", HALF_HOUR)]},
            ]
        },
        [("5 degrees", END, 1800)],
    ),
    "tool_use": (MESSAGES, {"messages": [ASKED, using(MARK, {}), result("5")]}, [(CALLED, "<tool_call>", 0)]),
    "last tool_use": (MESSAGES, {"messages": [ASKED, using({}, HOUR), result("5")]}, [(CALLED, END, 3600)]),
    "tool_result": (
        MESSAGES,
        {"messages": [ASKED, using({}), result("5 degrees", **HOUR)]},
        [("5 degrees", END, 3600)],
    ),
    "empty result": (MESSAGES, {"messages": [ASKED, using({}), result([], **MARK)]}, [("<|im_start|>tool\n", END, 0)]),
    "instructions between": (
        MESSAGES,
        {"messages": [ASKED, {"role": "system", "content": [part("Be brief.", MARK)]}]},
        [("<|im_start|>system\nBe brief.", END, 0)],
    ),
    "request": (MESSAGES, {"messages": [ASKED, using({}), result([])], **MARK}, [("<|im_start|>tool\n", END, 0)]),
}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_of(tmp_path_factory.mktemp("agent") / "hermes", TEMPLATES["hermes"]) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
def test_breakpoint_is_directly_after_the_part_with_cache_control(agent: Agent, name: str) -> None:
    path, body, wanted = CASES[name]
    limit = {"max_tokens": 5} if path == MESSAGES else {}
    with agent.saying("Yes."):
        reply = httpx.post(agent.server.listening.url + path, json=body | limit, timeout=60)
    assert reply.status_code == 200, reply.text
    asked = agent.server.backend.asked[-1]
    prompt = agent.tokenizer.detokenize(asked.prompt.tolist(), skip_special_tokens=False)
    assert len(asked.breakpoints) == len(wanted)
    for found_mark, (before, after, keep_s) in zip(asked.breakpoints, wanted, strict=True):
        marked = prompt.index(before + after) + len(before)
        found = len(agent.tokenizer.detokenize(asked.prompt[: found_mark.position].tolist(), skip_special_tokens=False))
        assert abs(found - marked) <= NEAR, prompt[:found]
        assert found_mark.keep_s == keep_s
