"""Schemas of the input items of a response, and the chat messages that they are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ..field_types import CacheControl, Name, PromptCacheBreakpoint, Text
from ..unsupported import REFUSED

_MOST_ITEMS = 8192
_MOST_PARTS = 4096
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")

ChatMessage = dict[str, Any]
"""A message as chat completions have it."""


def _with_known_type(names: Sequence[str], what: str) -> BeforeValidator:
    def check(found: Any) -> Any:
        kind = found.get("type") if isinstance(found, Mapping) else None
        if isinstance(kind, str) and kind not in names:
            sentence = f"{what} of type {kind!r:.50} is not supported by this server; send one of {', '.join(names)}"
            raise PydanticCustomError(REFUSED, "{sentence}", {"field": "type", "sentence": sentence})
        return found

    return BeforeValidator(check)


class TextItemPart(BaseModel):
    """Text in an item."""

    type: Text = "input_text"
    text: Text
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the part as chat completions have it."""
        return {"type": "text", **self.model_dump(exclude={"type"}, exclude_none=True)}


_TextPart = Annotated[TextItemPart, _with_known_type(_TEXTS, "a part")]
_Parts = Annotated[list[_TextPart], Field(fail_fast=True, max_length=_MOST_PARTS)]


class MessageItem(BaseModel):
    """A message of any side; the type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | _Parts


class FunctionCallItem(BaseModel):
    """A call in an earlier reply."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text


class FunctionCallOutputItem(BaseModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | _Parts


class ReasoningItem(BaseModel):
    """Reasoning of an earlier reply."""

    type: Literal["reasoning"]
    content: _Parts | None = None


def _with_type(item: Any) -> Any:
    return {"type": "message", **item} if isinstance(item, Mapping) and "role" in item else item


InputItem = Annotated[
    Annotated[
        MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem,
        Field(discriminator="type"),
    ],
    _with_known_type(_KINDS, "an item"),
    BeforeValidator(_with_type),
]
InputItems = Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=_MOST_ITEMS)]


def messages_of(items: Sequence[Any]) -> Iterator[ChatMessage]:
    """Yield the messages that items are: neighbouring items of the model are one message."""
    reply: ChatMessage = {}
    for item in items:
        is_of_model = isinstance(item, FunctionCallItem | ReasoningItem) or getattr(item, "role", "") == "assistant"
        begins_anew = isinstance(item, ReasoningItem) and bool(reply)
        if reply and (begins_anew or not is_of_model):
            yield {"role": "assistant"} | reply
            reply = {}
        match item:
            case FunctionCallOutputItem():
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                reply.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            case ReasoningItem():
                reply["reasoning_content"] = _text(item.content or "")
            case MessageItem(role="assistant"):
                reply["content"] = reply.get("content", "") + _text(item.content)
            case MessageItem():
                yield {"role": item.role, "content": _content(item.content)}
    if reply:
        yield {"role": "assistant"} | reply


def _content(content: str | Sequence[TextItemPart]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.as_chat() for part in content]


def _text(content: str | Sequence[TextItemPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
