"""Schemas for chat messages and for the other request fields that a chat template reads."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from .conversation import Breakpoint, Conversation
from .errors import bad_request
from .field_types import CacheControl, Flag, JsonObject, Mark, Name, PartlySupported, PromptCacheBreakpoint, Text
from .shown_text import text_instead
from .tool_schemas import Calls, Tools, own_tools
from .unsupported import MESSAGE, REFUSED, schema_error

_MOST_BREAKPOINTS = 4  # if there are more, Anthropic's API fails and OpenAI's uses the last 4
_LINE_END = "\n"  # joins the text parts of a message
_ROLES = ("system", "developer", "user", "assistant", "tool")


def _text_only(kind: str) -> str:
    if kind != "text":
        raise schema_error(REFUSED, f"a part of type {kind!r:.50} is not supported by this server; send text")
    return kind


class TextPart(BaseModel):
    """Text part of a message; a part of any other type is an error."""

    type: Annotated[Text, AfterValidator(_text_only), Field(json_schema_extra={"enum": ["text"]})]
    text: Text
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    @property
    def mark(self) -> Mark | None:
        """Cache breakpoint at the end of this part; None if there is none."""
        return self.cache_control or self.prompt_cache_breakpoint


def _refusal_as_text(part: Any) -> Any:
    is_refusal = isinstance(part, Mapping) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _known(role: str) -> str:
    if role == "function":
        sentence = "messages with role function are not supported by this server; send role tool"
        raise schema_error(REFUSED, sentence)
    if role not in _ROLES:
        raise schema_error("role", f"the role must be one of {', '.join(_ROLES)}, found {role!r:.50}")
    return role


class Message(PartlySupported):
    """Chat message; unknown fields, such as those in OpenAI's replies, are ignored.

    Text parts are joined by line breaks. In tool results, a line such as "[image omitted: ...]" replaces each image or
    file. A refusal is treated as the reply's text. The reasoning of an earlier reply is in `reasoning_content` or
    `reasoning`. `cache_control` sets a cache breakpoint at the end of the message.
    """

    unsupported = MESSAGE

    role: Annotated[Text, AfterValidator(_known), Field(json_schema_extra={"enum": list(_ROLES)})]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=4096)] | None = None
    name: Name | None = None
    tool_calls: Calls | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_text(cls, fields: Any) -> Any:
        """Replace refusals with text, and images and documents in tool results with text."""
        role = fields.get("role") if isinstance(fields, Mapping) else None
        if role not in ("tool", "assistant"):
            return fields
        content = fields.get("content")
        if isinstance(content, list):
            return {**fields, "content": [*map(text_instead if role == "tool" else _refusal_as_text, content)]}
        return {**fields, "content": fields.get("refusal")} if content is None and role == "assistant" else fields

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            sentence = f"the content of this message with role {self.role} is missing or null; send text"
            raise schema_error("no_content", sentence, "content")
        if self.tool_calls and self.role != "assistant":
            sentence = f"a message with role {self.role} cannot call tools; only role assistant can"
            raise schema_error("no_caller", sentence, "tool_calls")
        return self

    def marks(self, index: int) -> Iterator[tuple[Mark, Breakpoint]]:
        """Yield each breakpoint, as sent and as a position in the conversation; `index` is the message's index."""
        end, calls = 0, self.tool_calls or []
        for number, part in enumerate(() if self.content is None or isinstance(self.content, str) else self.content):
            end += len(part.text) + (len(_LINE_END) if number else 0)
            if part.mark is not None:
                yield part.mark, Breakpoint(index, end, part.mark.keep_s)
        for number, call in enumerate(calls):
            if call.cache_control is not None:
                yield call.cache_control, Breakpoint(index, end, call.cache_control.keep_s, number)
        if self.cache_control is not None:
            last = len(calls) - 1 if calls else None
            yield self.cache_control, Breakpoint(index, len(self._text), self.cache_control.keep_s, last)

    @property
    def _text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else _LINE_END.join(part.text for part in content)

    def plain(self) -> dict[str, Any]:
        """Return the message as a dictionary for chat templates, with its text parts joined."""
        others = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning or None,
            "tool_calls": [call.plain() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
        }
        known = {key: value for key, value in others.items() if value is not None}
        return {"role": self.role, "content": self._text} | known


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]


class Templated(BaseModel):
    """Base schema with the request fields that chat templates read."""

    tools: Tools | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _ends_once(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            sentence = "continue_final_message requires add_generation_prompt to be false"
            raise schema_error("two_ends", sentence, "continue_final_message")
        return self

    def conversation_of(self, messages: list[Message], **values: Any) -> Conversation:
        """Return the conversation to render; `values` are other template variables, of which None values are ignored.

        Raises:
            ApiError: 400 if more than four parts have `cache_control`.
        """
        known = {name: value for name, value in values.items() if value is not None}
        return Conversation(
            [message.plain() for message in messages],
            tuple(tool.plain() for tool in own_tools(self.tools)),
            known | (self.chat_template_kwargs or {}),
            adds_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continues=bool(self.continue_final_message),
            breakpoints=self._breakpoints(messages),
        )

    def _breakpoints(self, messages: list[Message]) -> tuple[Breakpoint, ...]:
        marked = [mark for index, message in enumerate(messages) for mark in message.marks(index)]
        of_tools = [tool.mark for tool in own_tools(self.tools) if tool.mark is not None]
        if of_tools:
            marked.insert(0, (of_tools[0], Breakpoint(keep_s=max(mark.keep_s for mark in of_tools))))
        count = sum(isinstance(mark, CacheControl) for mark, _ in marked)
        if count > _MOST_BREAKPOINTS:
            raise bad_request(
                f"the request has {count} parts with cache_control; at most {_MOST_BREAKPOINTS} are allowed",
                "cache_control",
            )
        return tuple(mark for _, mark in marked[-_MOST_BREAKPOINTS:])
