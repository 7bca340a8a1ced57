"""Schemas of messages, and of what else a chat template reads."""

from itertools import accumulate
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from .conversation import Breakpoint, Conversation
from .errors import bad_request
from .field_types import CacheControl, Flag, JsonObject, Name, PartlySupported, Text
from .tool_schemas import Calls, Tools
from .unsupported import MESSAGE, REFUSED

_MOST_BREAKPOINTS = 4  # as many as Anthropic's API takes
_ROLES = ("system", "developer", "user", "assistant", "tool")


def _text_only(kind: str) -> str:
    if kind != "text":
        sentence = f"a part of type {kind!r:.50} is not supported by this server; send text"
        raise PydanticCustomError(REFUSED, "{sentence}", {"sentence": sentence})
    return kind


class TextPart(BaseModel):
    """A part of a message; parts of other types are refused by their type, whatever their other fields."""

    type: Annotated[Text, AfterValidator(_text_only), Field(json_schema_extra={"enum": ["text"]})]
    text: Text
    cache_control: CacheControl | None = None


def _known(role: str) -> str:
    if role == "function":
        sentence = "a message of role function is not supported by this server; send one of role tool"
        raise PydanticCustomError(REFUSED, "{sentence}", {"sentence": sentence})
    if role not in _ROLES:
        raise PydanticCustomError("role", "the role is one of {roles}", {"roles": ", ".join(_ROLES)})
    return role


class Message(PartlySupported):
    """One message; unknown fields, such as those in OpenAI's replies, are ignored.

    The reasoning of an earlier reply is `reasoning_content` or `reasoning`.
    """

    unsupported = MESSAGE

    role: Annotated[Text, AfterValidator(_known), Field(json_schema_extra={"enum": list(_ROLES)})]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=4096)] | None = None
    name: Name | None = None
    tool_calls: Calls | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            sentence = "the content of a message of role {role} is missing or null; send text"
            raise PydanticCustomError("no_content", sentence, {"field": "content", "role": self.role})
        if self.tool_calls and self.role != "assistant":
            sentence = "a message of role {role} cannot call tools; only one of role assistant can"
            raise PydanticCustomError("no_caller", sentence, {"field": "tool_calls", "role": self.role})
        return self

    @property
    def breakpoints(self) -> list[tuple[int, CacheControl]]:
        """The breakpoints in it, and the characters of the content before each."""
        parts = () if self.content is None or isinstance(self.content, str) else self.content
        ends = accumulate(len(part.text) for part in parts)
        controls = ((end, part.cache_control) for part, end in zip(parts, ends, strict=True))
        return [(end, control) for end, control in controls if control is not None]

    def plain(self) -> dict[str, Any]:
        """Return the message for a chat template, its parts joined."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        others = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning or None,
            "tool_calls": [call.plain() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
        }
        return {"role": self.role, "content": text} | {key: value for key, value in others.items() if value is not None}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]


class Templated(BaseModel):
    """Fields of both routes that render a chat template; `chat_template_kwargs` are further variables of it."""

    tools: Tools | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _ends_once(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            sentence = "continue_final_message needs add_generation_prompt to be false"
            raise PydanticCustomError(
                "two_ends", "{sentence}", {"field": "continue_final_message", "sentence": sentence}
            )
        return self

    def conversation_of(self, messages: list[Message], **values: Any) -> Conversation:
        """Return messages with what else the template reads.

        Args:
            values: Further variables of the template; None leaves one out.

        Raises:
            ApiError: 400 if there are too many breakpoints.
        """
        known = {name: value for name, value in values.items() if value is not None}
        breakpoints = [
            Breakpoint(index, end, control.keep_s)
            for index, message in enumerate(messages)
            for end, control in message.breakpoints
        ]
        of_tools = [tool.cache_control.keep_s for tool in self.tools or () if tool.cache_control is not None]
        if of_tools:
            breakpoints.insert(0, Breakpoint(keep_s=max(of_tools)))
        if len(breakpoints) > _MOST_BREAKPOINTS:
            raise bad_request(
                f"the request has {len(breakpoints)} parts with cache_control; at most {_MOST_BREAKPOINTS} are allowed",
                "cache_control",
            )
        return Conversation(
            [message.plain() for message in messages],
            tuple(tool.plain() for tool in self.tools or ()),
            known | (self.chat_template_kwargs or {}),
            adds_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continues=bool(self.continue_final_message),
            breakpoints=tuple(breakpoints),
        )
