"""Schemas for the input items of a response, and their translation to chat messages."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from ..field_types import CacheControl, JsonObject, Name, PromptCacheBreakpoint, Text
from ..shown_text import foreign_call, foreign_result, is_foreign_call, is_foreign_result, text_instead, tool_of
from ..unsupported import REFUSED, note_ignored, schema_error

_MOST_ITEMS = 8192
_MOST_PARTS = 4096
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_LISTINGS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")  # shown as text, like foreign calls
_LINE_END = "\n"

ChatMessage = dict[str, Any]
"""Message in the format of chat completions."""


def _with_known_type(names: Sequence[str], what: str) -> BeforeValidator:
    def check(found: Any) -> Any:
        kind = found.get("type") if isinstance(found, Mapping) else None
        if isinstance(kind, str) and kind not in names:
            raise _unsupported(what, kind, names)
        return found

    return BeforeValidator(check)


def _unsupported(what: str, kind: str, names: Sequence[str]) -> PydanticCustomError:
    sentence = f"{what} of type {kind!r:.50} is not supported by this server; send one of {', '.join(names)}"
    return schema_error(REFUSED, sentence, "type")


class TextItemPart(BaseModel):
    """Text part of an item."""

    type: Text = "input_text"
    text: Text
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the part in the format of chat completions."""
        return {"type": "text", **self.model_dump(exclude={"type"}, exclude_none=True)}


def _with_refusal(part: Any) -> Any:
    """Convert a refusal part to a text part."""
    is_refusal = isinstance(part, Mapping) and part.get("type") == "refusal" and "refusal" in part
    return {"type": "output_text", "text": part["refusal"]} if is_refusal else part


_TextPart = Annotated[TextItemPart, _with_known_type(_TEXTS, "a part"), BeforeValidator(_with_refusal)]
_Parts = Annotated[list[_TextPart], Field(fail_fast=True, max_length=_MOST_PARTS)]
_ResultPart = Annotated[TextItemPart, _with_known_type(_TEXTS, "a part"), BeforeValidator(text_instead)]
_ResultParts = Annotated[list[_ResultPart], Field(fail_fast=True, max_length=_MOST_PARTS)]


class MessageItem(BaseModel):
    """Message from the user or the model, or instructions; `type` may be omitted."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | _Parts


class FunctionCallItem(BaseModel):
    """Function call in an earlier reply."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text


class FunctionCallOutputItem(BaseModel):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | _ResultParts


class ReasoningItem(BaseModel):
    """Reasoning in an earlier reply, or its summary; encrypted content is ignored."""

    type: Literal["reasoning"]
    content: _Parts | None = None
    summary: _Parts | None = None

    @property
    def text(self) -> str:
        """Text of the reasoning, or of its summary."""
        return _text(self.content or self.summary or "")


class ItemReference(BaseModel):
    """Reference to an item in a stored response."""

    type: Literal["item_reference"]
    id: Name


class ForeignItem(BaseModel):
    """Call to a foreign tool, or its result; becomes text in the prompt."""

    type: Literal["foreign"]
    item: JsonObject

    @property
    def is_result(self) -> bool:
        """True if the item is a result."""
        return is_foreign_result(self.item["type"])

    @property
    def call_id(self) -> str:
        """Id that the call and its result share; "" if there is none."""
        found = self.item.get("call_id")
        return found if isinstance(found, str) else ""


def _with_type(item: Any) -> Any:
    """Return an item with its missing type added, or wrapped as a foreign item."""
    if not isinstance(item, Mapping):
        return item
    kind = item.get("type")
    if kind is None and "role" in item:
        return {**item, "type": "message"}
    if kind is None and "id" in item:
        return {**item, "type": "item_reference"}
    if not isinstance(kind, str) or kind in _KINDS:
        return item
    if kind in _LISTINGS or is_foreign_call(kind) or is_foreign_result(kind):
        return {"type": "foreign", "item": dict(item)}
    raise _unsupported("an item", kind, _KINDS)


InputItem = Annotated[
    Annotated[
        MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference | ForeignItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_with_type),
]
InputItems = Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=_MOST_ITEMS)]


_INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


def kept_item(item: Mapping[str, Any]) -> Any:
    """Convert an output item of a stored response to an input item."""
    return _INPUT_ITEM.validate_python(item)


def messages_of(items: Sequence[Any]) -> list[ChatMessage]:
    """Convert items to chat messages; merge adjacent items produced by the model into one message."""
    messages = _Messages()
    for item in items:
        messages.add(item)
    return messages.all()


class _Messages:
    """Builder of chat messages from items."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._reply: ChatMessage = {}
        self._foreign_results: list[str] = []  # added after function results, which must directly follow their calls
        self._tools: dict[str, str] = {}

    def all(self) -> list[ChatMessage]:
        self._end_reply()
        self._end_results()
        return self._messages

    def add(self, item: Any) -> None:
        match item:
            case FunctionCallOutputItem():
                self._end_reply()
                content = _content(item.output)
                self._messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case ForeignItem(is_result=True):
                self._end_reply()
                name = self._tools.get(item.call_id) or tool_of(item.item)
                self._foreign_results.append(foreign_result(item.item, name))
            case MessageItem() if item.role != "assistant":
                self._end_reply()
                self._end_results()
                self._messages.append({"role": item.role, "content": _content(item.content)})
            case _:
                self._end_results()
                self._add_to_reply(item)

    def _add_to_reply(self, item: Any) -> None:
        match item:
            case ReasoningItem():
                if "content" in self._reply or "tool_calls" in self._reply:
                    self._end_reply()
                if item.text:
                    self._add_text("reasoning_content", item.text)
                else:
                    note_ignored("it cannot be read here", ["encrypted reasoning"])
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                self._reply.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            case ForeignItem():
                self._tools[item.call_id] = tool_of(item.item)
                self._add_text("content", foreign_call(item.item))
            case MessageItem():
                self._add_text("content", _text(item.content))

    def _add_text(self, name: str, text: str) -> None:
        before = self._reply.get(name)
        self._reply[name] = text if not before else before + _LINE_END + text

    def _end_reply(self) -> None:
        if self._reply:
            self._messages.append({"role": "assistant"} | self._reply)
            self._reply = {}

    def _end_results(self) -> None:
        self._messages += [{"role": "user", "content": text} for text in self._foreign_results]
        self._foreign_results = []


def _content(content: str | Sequence[TextItemPart]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [part.as_chat() for part in content]


def _text(content: str | Sequence[TextItemPart]) -> str:
    return content if isinstance(content, str) else _LINE_END.join(part.text for part in content)
