"""A conversation as a chat template reads it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from .parsers.parts import ParsedReply


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and what else the template reads.

    Args:
        messages: In OpenAI's form, oldest first; arguments of tool calls are objects.
        tools: Definitions of functions in OpenAI's form.
        values: Further variables of the template.
        adds_prompt: Whether the text goes on to where the assistant's reply begins.
        continues: Whether the last message is left open, to be continued.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    adds_prompt: bool = True
    continues: bool = False

    @property
    def has_calls(self) -> bool:
        """True when a message calls a tool or has its result."""
        return any("tool_calls" in message or message["role"] == "tool" for message in self.messages)

    def text(self, tokenizer: Any) -> str:
        """Return the conversation as the tokenizer's template renders it.

        Raises:
            ValueError: If the template is missing or refuses it.
        """
        return str(
            tokenizer.render_chat(
                self.messages,
                self.tools,
                self.values,
                adds_prompt=self.adds_prompt,
                continues=self.continues,
            )
        )

    def answered(self, reply: ParsedReply) -> Self:
        """Return the conversation with a reply as its last message."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [called(call.name, call.arguments) for call in reply.calls]
        return replace(self, messages=[*self.messages, message], adds_prompt=False, continues=False)


def called(name: str, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """Return a tool call for a template; arguments that are not a JSON object stay text."""
    identified = {} if call_id is None else {"id": call_id}
    return {**identified, "type": "function", "function": {"name": name, "arguments": arguments_value(arguments)}}


def arguments_value(arguments: str) -> Any:
    """Return the value of a call's arguments; those that are not a JSON object stay text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
