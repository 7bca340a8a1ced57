"""Rounds of an agent: each turn computes only its new tokens and at most two further blocks."""

import json
from typing import Any

import openai
import pytest

from tests.server.running_server import MODEL, RED, RunningServer, running_server

BLOCK = 64
DRAFTS = ("--num-speculative-tokens", "3")
ROUNDS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
SYSTEM = {"role": "system", "content": "import os\nimport sys\n" * 20}


@pytest.mark.parametrize(
    ("parser", "flags"),
    [
        ("json", ()),
        ("hermes", DRAFTS),
        pytest.param("json", DRAFTS, marks=pytest.mark.long),
        pytest.param("hermes", (), marks=pytest.mark.long),
    ],
)
def test_each_agent_round_prefills_only_its_new_tokens(parser: str, flags: tuple[str, ...]) -> None:
    with running_server("--tool-call-parser", parser, "--api-key", RED, *flags) as server:
        turns = rounds(server)
    for number in range(1, ROUNDS):
        before, usage = turns[number - 1], turns[number]
        known = before.prompt_tokens + before.completion_tokens
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"round {number}: {usage.prompt_tokens} tokens, {known} known, {cached} skipped")
        assert usage.prompt_tokens > known
        assert cached >= known - 2 * BLOCK


def rounds(server: RunningServer) -> list[Any]:
    """Run the rounds; return the usage of each."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=RED, max_retries=0)
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "Weather?"}]
    turns = []
    for number in range(ROUNDS):
        chat = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=number
        )
        message, usage = chat.choices[0].message, chat.usage
        assert usage is not None and usage.prompt_tokens_details is not None and message.tool_calls
        (call,) = message.tool_calls
        result = json.dumps({"degrees": list(range(20 + number))})
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        turns.append(usage)
    return turns
