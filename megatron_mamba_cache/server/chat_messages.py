"""Parsed replies as messages of chat completions, whole and in deltas."""

import uuid
from collections.abc import Sequence
from typing import Any

from .parsers.parts import CallArguments, CallBegin, Content, ParsedReply, Part, Reasoning


def chat_message(reply: ParsedReply, *, tells_reasoning: bool) -> dict[str, Any]:
    """Return a reply as a message."""
    content = None if reply.calls and not reply.content else reply.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning and tells_reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


class ChatDeltas:
    """The deltas of one reply; together they are its message."""

    def __init__(self, *, tells_reasoning: bool) -> None:
        self._tells_reasoning = tells_reasoning
        self._has_begun = False
        self._num_calls = 0

    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the delta of a step's parts; the first one has the role."""
        delta: dict[str, Any] = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text) if self._tells_reasoning:
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallBegin(name):
                    function = {"name": name, "arguments": ""}
                    calls[self._num_calls] = {"id": _call_id(), "type": "function", "function": function}
                    self._num_calls += 1
                case CallArguments(text):
                    call = calls.setdefault(self._num_calls - 1, {"function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
        if not delta.keys() & {"content", "reasoning_content", "tool_calls"}:
            delta["content"] = ""
        return delta


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
