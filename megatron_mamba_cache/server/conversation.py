"""Chat conversations, which chat templates render to prompts."""

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
    """Cache breakpoint: position up to which other conversations may share the prompt."""

    message: int | None = None  # index of the message with the breakpoint; None: after the tools
    end: int = 0  # offset in the message's text, in characters
    keep_s: int = 0  # seconds during which the cached prefix has a higher priority
    call: int | None = None  # index of the tool call before the breakpoint; None: inside the text


@dataclass(frozen=True, slots=True)
class Conversation:
    """Input to a chat template: messages, tools and other variables."""

    messages: Sequence[dict[str, Any]]  # in OpenAI's format, oldest first; tool-call arguments are objects
    tools: Sequence[Mapping[str, Any]] = ()  # function definitions in OpenAI's format
    values: Mapping[str, Any] = field(default_factory=dict)  # other template variables
    adds_prompt: bool = True  # True if the prompt ends with the header of the assistant's reply
    continues: bool = False  # True if the reply continues the last message
    breakpoints: tuple[Breakpoint, ...] = ()  # sorted by position

    @property
    def has_calls(self) -> bool:
        """True if a message calls a tool or contains a tool's result."""
        return any("tool_calls" in message or message["role"] == "tool" for message in self.messages)

    @property
    def marked_head(self) -> tuple[Breakpoint, ...]:
        """Breakpoints after the tools and after the instructions, if the client set at least one of them; otherwise ().

        Some templates render the tools first, others the instructions. A client's breakpoint after either of them is
        therefore treated as a breakpoint after both.
        """
        roles = [message["role"] for message in self.messages]
        count = next((at for at, role in enumerate(roles) if role not in INSTRUCTING), len(roles))
        if not (count and self.tools):
            return ()
        ends = (Breakpoint(), Breakpoint(count - 1, len(self.messages[count - 1]["content"])))
        keep_s = [mark.keep_s for mark in self.breakpoints if replace(mark, keep_s=0) in ends]
        return tuple(replace(end, keep_s=max(keep_s)) for end in ends) if keep_s else ()

    def text(self, tokenizer: Any) -> str:
        """Render the conversation with the tokenizer's chat template; raise `ValueError` if rendering fails."""
        return str(
            tokenizer.render_chat(
                self.messages, self.tools, self.values, adds_prompt=self.adds_prompt, continues=self.continues
            )
        )

    def marked(self, mark: Breakpoint) -> Self:
        """Return the conversation with a marker inserted at a breakpoint; the messages before it are unchanged."""
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
            # The marker is a call, so that the text before it is unchanged. Some templates require nine-character ids.
            marking = [called(_MARK, "{}", _MARK * 9)] if is_last else []
            messages[mark.message] = {**message, "tool_calls": [*calls, *marking]}
        return replace(self, messages=messages)

    def answered(self, reply: ParsedReply) -> Self:
        """Return the conversation with the reply appended as its last message."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [called(call.name, call.arguments) for call in reply.calls]
        messages = [*self.messages, message]
        return replace(self, messages=messages, adds_prompt=False, continues=False, breakpoints=())


def called(name: str, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """Return a tool call in the format that chat templates read; omit the id if `call_id` is None."""
    identified = {} if call_id is None else {"id": call_id}
    return {**identified, "type": "function", "function": {"name": name, "arguments": arguments_object(arguments)}}


def arguments_object(arguments: str) -> dict[str, Any]:
    """Parse a tool call's arguments; return {} if they are blank, {"malformed_input": text} if not a JSON object."""
    if not arguments.strip():
        return {}
    try:
        value = strict_value(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"malformed_input": arguments}
