"""Schemas for requests to OpenAI's responses API."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ..answer_fields import NamedSchema
from ..field_types import INT32_MAX, CacheControl, Flag, Int, JsonObject, Metadata, Name, Number, PartlySupported, Text
from ..schemas import ChatRequest
from ..tool_schemas import (
    MOST_TOOLS,
    FunctionKind,
    FunctionName,
    OwnOrForeign,
    ToolChoice,
    counted_foreign,
    flat_choice,
    own_tools,
)
from ..unsupported import LABELS, Table, Unsupported
from .items import ChatMessage, InputItems, ItemReference, kept_item, messages_of
from .output import Item

_NEVER_INCLUDED = (
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""Accepted values of `include`; they have no effect, because this server runs no tools and encrypts nothing."""
_UNSUPPORTED: Table = {
    "background": Unsupported((False,)),
    "background_options": Unsupported(({},)),
    "context_management": Unsupported(([], {})),
    "conversation": Unsupported(instead="leave it out, or send previous_response_id"),
    "image": Unsupported(),
    "moderation": Unsupported(),
    "prompt": Unsupported(instead="leave it out, or send instructions"),
    "prompt_cache_options": Unsupported(({}, {"mode": "implicit"})),
    "access_programs": Unsupported(({},)),
    "top_logprobs": Unsupported((0,), "leave it out, or use /v1/chat/completions"),
    "truncation": Unsupported(("disabled", "auto")),  # with either value, input that is too long is refused
    "include": Unsupported(([],), "leave it out", _NEVER_INCLUDED),
}


class ResponsesTool(BaseModel):
    """Function that the model may call; `parameters` is a JSON schema."""

    type: FunctionKind
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None
    cache_control: CacheControl | None = Field(default=None, exclude=True)

    def as_function(self) -> dict[str, Any]:
        """Convert the tool to the format of chat completions."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function, "cache_control": self.cache_control}


class ReasoningSettings(BaseModel):
    """The field `reasoning`; `effort` sets the template variable `reasoning_effort`.

    For any `summary` except "none", the summary in the response repeats the whole reasoning.
    """

    effort: Name | None = None
    summary: Name | None = None

    @property
    def summarizes(self) -> bool:
        """True if reasoning items should have a summary."""
        return self.summary not in (None, "none")


class TextFormat(NamedSchema):
    """Answer format: like `response_format` in chat completions, but not nested."""

    type: Literal["text", "json_object", "json_schema"]

    def as_response_format(self) -> dict[str, Any]:
        """Convert the format to a chat completion's `response_format`."""
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, **({"json_schema": schema} if self.type == "json_schema" else {})}


class TextSettings(BaseModel):
    """The field `text`: answer format, and the template variable `verbosity`."""

    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: Name | None = None


def _flat(tool: Any) -> Any:
    """Convert a function in the nested format of chat completions to the flat format of this API."""
    inner = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping):
        return tool
    return {name: value for name, value in tool.items() if name != "function"} | dict(inner)


ResponsesTools = Annotated[
    list[Annotated[OwnOrForeign[ResponsesTool], BeforeValidator(_flat)]],
    Field(fail_fast=True, max_length=MOST_TOOLS),
    AfterValidator(counted_foreign),
]


class ResponsesRequest(PartlySupported):
    """Request to `/v1/responses`."""

    model_config = ConfigDict(extra="forbid", regex_engine="rust-regex")
    unsupported = _UNSUPPORTED
    labels = LABELS - {"metadata", "store"}  # these two fields have an effect in this API

    model: Name | None = None
    input: Text | InputItems
    instructions: Text | None = None
    previous_response_id: Name | None = None
    max_output_tokens: Annotated[Int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    tools: ResponsesTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    stream: Flag | None = None
    store: Flag | None = None
    metadata: Metadata | None = None
    # The following fields are accepted but have no effect.
    stream_options: JsonObject | None = None
    max_tool_calls: Int | None = None
    user: Name | None = None
    service_tier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    safety_identifier: Name | None = None

    def messages(self, find: Callable[[str], Item]) -> list[ChatMessage]:
        """Convert the input to chat messages; `find` returns a stored item by id or raises `ApiError` 400."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(
            [kept_item(find(item.id)) if isinstance(item, ItemReference) else item for item in self.input]
        )

    def as_chat(self, messages: Sequence[ChatMessage]) -> ChatRequest:
        """Translate the request to a chat completion; `messages` are those of earlier responses and this input."""
        text = self.text or TextSettings()
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": [*instructions, *messages],
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [tool.as_function() for tool in own_tools(self.tools)] or None,
                "tool_choice": self.tool_choice,
                "response_format": None if text.format is None else text.format.as_response_format(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "verbosity": text.verbosity,
            }
        )

    def settings(self) -> dict[str, Any]:
        """Return the request fields that the response repeats, with default values for unset fields."""
        text = {} if self.text is None else self.text.model_dump(exclude_none=True, by_alias=True)
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "tools": [tool.model_dump() for tool in own_tools(self.tools)],
            "tool_choice": flat_choice(self.tool_choice) or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": (self.reasoning or ReasoningSettings()).model_dump(),
            "text": {"format": {"type": "text"}} | text,
            "store": self.store is not False,
            "metadata": self.metadata or {},
            "truncation": "disabled",
            "background": False,
        }
