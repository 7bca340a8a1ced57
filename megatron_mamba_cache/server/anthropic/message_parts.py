"""Schemas for content blocks, tools and tool choices in Anthropic's messages API."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Tag

from ..field_types import CacheControl, Flag, JsonObject, Name, Text
from ..shown_text import foreign_call, foreign_result, is_foreign_call, is_foreign_result, text_instead, tool_of
from ..tool_schemas import MOST_TOOLS, ForeignTool, FunctionName, counted_foreign, own_or_foreign
from ..unsupported import REFUSED, schema_error

_MOST_BLOCKS = 4096
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class TextBlock(BaseModel):
    """Content block with text."""

    type: Literal["text"] = "text"
    text: Text
    cache_control: CacheControl | None = None


class ThinkingBlock(BaseModel):
    """Content block with the reasoning of an earlier reply; its signature is ignored."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(BaseModel):
    """Content block with reasoning encrypted by Anthropic; omitted from the prompt because it cannot be read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """Content block with a tool call from an earlier reply."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: JsonObject
    cache_control: CacheControl | None = None


class ToolResultBlock(BaseModel):
    """Content block with a tool result; `is_error` has no effect, because chat templates do not render it."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list["_ResultPart"], Field(fail_fast=True, max_length=_MOST_BLOCKS)] | None = None
    is_error: Flag | None = None
    cache_control: CacheControl | None = None


def _only(*kinds: str) -> BeforeValidator:
    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind not in kinds:
            sentence = f"a block of type {kind!r:.50} is not supported by this server; send {' or '.join(kinds)}"
            raise schema_error(REFUSED, sentence, "type")
        return block

    return BeforeValidator(check)


def _with_shown_calls(block: Any) -> Any:
    """Convert calls and results of tools built into Anthropic's API to text blocks; return other blocks unchanged."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str) or kind in ("tool_use", "tool_result"):
        return block
    if is_foreign_call(kind):
        text = foreign_call(block)
    elif is_foreign_result(kind):
        text = foreign_result(block, tool_of(block))
    else:
        return block
    return {"type": "text", "text": text, "cache_control": block.get("cache_control")}


TextOnly = Annotated[TextBlock, _only("text")]
_ResultPart = Annotated[TextBlock, _only("text"), BeforeValidator(text_instead)]
Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ],
    _only("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    BeforeValidator(_with_shown_calls),
]
Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=_MOST_BLOCKS)]
Texts = Annotated[list[TextOnly], Field(fail_fast=True, max_length=_MOST_BLOCKS)]
ToolResultBlock.model_rebuild()


class MessagesTool(BaseModel):
    """Tool that the model may call; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    strict: Flag | None = None
    cache_control: CacheControl | None = None

    def as_function(self) -> dict[str, Any]:
        """Convert the tool to the format of chat completions."""
        fields = {"description": self.description, "strict": self.strict}
        described = {key: value for key, value in fields.items() if value is not None}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function, "cache_control": self.cache_control}


MessagesTools = Annotated[
    list[
        Annotated[
            Annotated[MessagesTool, Tag("own-tool")] | Annotated[ForeignTool, Tag("foreign-tool")],
            own_or_foreign("custom"),
        ]
    ],
    Field(fail_fast=True, max_length=MOST_TOOLS),
    AfterValidator(counted_foreign),
]


class MessagesToolChoice(BaseModel):
    """The field `tool_choice`: "any" requires a tool call, "tool" requires a call to the tool `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag | None = None

    def as_chat(self) -> Any:
        """Convert the tool choice to the format of chat completions."""
        if self.type != "tool":
            return _CHOICES[self.type]
        return {"type": "function", "function": {"name": self.name or ""}}


def parts_of(content: str | Sequence[Any] | None) -> list[dict[str, Any]]:
    """Convert the text in `content` to text parts of a chat message; ignore other blocks."""
    blocks = [TextBlock(text=content or "")] if content is None or isinstance(content, str) else content
    return [
        {"type": "text", "text": block.text, "cache_control": block.cache_control}
        for block in blocks
        if isinstance(block, TextBlock)
    ]
