"""Conversations for chat templates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from .parsers.parts import ParsedReply
from .strict_json import strict_value

_MARK = "\u2400"
DEVELOPER = "developer"
INSTRUCTING = ("system", DEVELOPER)
_NO_PARAMETERS = {"type": "object", "properties": {}}
MARKING_TOOL = {"type": "function", "function": {"name": _MARK, "description": _MARK, "parameters": _NO_PARAMETERS}}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A position in a conversation: other conversations may share the text before it."""

    message: int | None = None  # index of its message; None: it is after the tools
    end: int = 0  # characters of the message's content before it
    keep_s: int = 0  # seconds for which the cached prefix has more priority
    call: int | None = None  # index of the tool call that it follows; None: it is in the content


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and the other inputs of a chat template."""

    messages: Sequence[dict[str, Any]]  # in OpenAI's form, oldest first; arguments of tool calls are objects
    tools: Sequence[Mapping[str, Any]] = ()  # definitions of functions in OpenAI's form
    values: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    adds_prompt: bool = True  # True if the text goes on to where the assistant's reply begins
    continues: bool = False  # True if the last message is left open, to be continued
    breakpoints: tuple[Breakpoint, ...] = ()  # in order

    @property
    def has_calls(self) -> bool:
        """True when a message calls a tool or has its result."""
        return any("tool_calls" in message or message["role"] == "tool" for message in self.messages)

    @property
    def marked_head(self) -> tuple[Breakpoint, ...]:
        """Breakpoints after the tools and after the instructions, if either is marked; else none.

        Both begin a prompt, in an order that the template decides, so a mark of one means both.
        """
        roles = [message["role"] for message in self.messages]
        count = next((at for at, role in enumerate(roles) if role not in INSTRUCTING), len(roles))
        if not (count and self.tools):
            return ()
        ends = (Breakpoint(), Breakpoint(count - 1, len(self.messages[count - 1]["content"])))
        keep_s = [mark.keep_s for mark in self.breakpoints if replace(mark, keep_s=0) in ends]
        return tuple(replace(end, keep_s=max(keep_s)) for end in ends) if keep_s else ()

    def text(self, tokenizer: Any) -> str:
        """Return the conversation as the tokenizer's template renders it; raise `ValueError` if it cannot."""
        return str(
            tokenizer.render_chat(
                self.messages, self.tools, self.values, adds_prompt=self.adds_prompt, continues=self.continues
            )
        )

    def marked(self, mark: Breakpoint) -> Self:
        """Return a conversation that equals this one only up to a breakpoint."""
        if mark.message is None:
            return replace(self, tools=(*self.tools, MARKING_TOOL))
        message = self.messages[mark.message]
        messages = [*self.messages]
        if mark.call is None:
            marked = message["content"][: mark.end] + _MARK + message["content"][mark.end :]
            messages[mark.message] = {**message, "content": marked}
        else:
            calls = message["tool_calls"][: mark.call + 1]
            is_last = len(calls) == len(message["tool_calls"])
            # A call that follows begins like this one; some templates want ids of nine characters.
            marking = [called(_MARK, "{}", _MARK * 9)] if is_last else []
            messages[mark.message] = {**message, "tool_calls": [*calls, *marking]}
        return replace(self, messages=messages)

    def answered(self, reply: ParsedReply) -> Self:
        """Return the conversation with a reply as its last message."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [called(call.name, call.arguments) for call in reply.calls]
        messages = [*self.messages, message]
        return replace(self, messages=messages, adds_prompt=False, continues=False, breakpoints=())


def called(name: str, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """Return a tool call for a template."""
    identified = {} if call_id is None else {"id": call_id}
    return {**identified, "type": "function", "function": {"name": name, "arguments": arguments_object(arguments)}}


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments: {} for no text; text that is not a JSON object becomes `malformed_input`."""
    if not arguments.strip():
        return {}
    try:
        value = strict_value(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"malformed_input": arguments}
