"""Schema of a request of the responses API."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..answer_fields import NamedSchema
from ..field_types import (
    INT32_MAX,
    CacheControl,
    Flag,
    Int,
    JsonObject,
    Metadata,
    Name,
    Number,
    PartlySupported,
    Text,
)
from ..schemas import ChatRequest
from ..tool_schemas import FunctionKind, FunctionName
from ..unsupported import Table, Unsupported
from .items import ChatMessage, InputItems, messages_of

_UNSUPPORTED: Table = {
    "background": Unsupported((False,)),
    "background_options": Unsupported(({},)),
    "context_management": Unsupported(([], {})),
    "conversation": Unsupported(instead="leave it out, or send previous_response_id"),
    "image": Unsupported(),
    "moderation": Unsupported(),
    "prompt": Unsupported(instead="leave it out, or send instructions"),
    "prompt_cache_options": Unsupported(({}, {"mode": "implicit"})),
    "prompt_cache_retention": Unsupported(("in_memory", "in-memory")),
    "access_programs": Unsupported(({},)),
    "top_logprobs": Unsupported((0,), "leave it out; /v1/chat/completions has it"),
    "truncation": Unsupported(("disabled",)),
    "include": Unsupported(([], ["reasoning.encrypted_content"])),
}
_TEXT_UNSUPPORTED: Table = {"verbosity": Unsupported(("medium",))}


class ResponsesTool(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: FunctionKind
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None
    cache_control: CacheControl | None = Field(default=None, exclude=True)

    def as_function(self) -> dict[str, Any]:
        """Return the tool as chat completions have it."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function, "cache_control": self.cache_control}


class ReasoningSettings(BaseModel):
    """How hard the model thinks; templates read `reasoning_effort`. Summaries are not made: reasoning comes whole."""

    effort: Name | None = None


class TextFormat(NamedSchema):
    """OpenAI's `response_format`, in the responses API's order."""

    type: Literal["text", "json_object", "json_schema"]

    def as_response_format(self) -> dict[str, Any]:
        """Return the format as chat completions have it."""
        schema = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": self.type, **({"json_schema": schema} if self.type == "json_schema" else {})}


class TextSettings(PartlySupported):
    """The form of the text."""

    model_config = ConfigDict(extra="forbid")
    unsupported = _TEXT_UNSUPPORTED

    format: TextFormat | None = None


class ChosenFunction(BaseModel):
    """A `tool_choice` that names a function."""

    type: FunctionKind
    name: Text

    def as_named_tool(self) -> dict[str, Any]:
        """Return the choice as chat completions have it."""
        return {"type": "function", "function": {"name": self.name}}


class ResponsesRequest(PartlySupported):
    """A request of `/v1/responses`."""

    model_config = ConfigDict(extra="forbid", regex_engine="rust-regex")
    unsupported = _UNSUPPORTED

    model: Name | None = None
    input: Text | InputItems
    instructions: Text | None = None
    previous_response_id: Name | None = None
    max_output_tokens: Annotated[Int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    stream: Flag | None = None
    store: Flag | None = None
    metadata: Metadata | None = None
    # Accepted, without effect.
    stream_options: JsonObject | None = None
    max_tool_calls: Int | None = None
    user: Name | None = None
    service_tier: Name | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None

    @property
    def messages(self) -> list[ChatMessage]:
        """The input as messages."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [*messages_of(self.input)]

    def as_chat(self, messages: Sequence[ChatMessage]) -> ChatRequest:
        """Return the same request of chat completions.

        Args:
            messages: Of all earlier responses, and of this input.
        """
        choice, text_format = self.tool_choice, None if self.text is None else self.text.format
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatRequest.model_validate(
            {
                "model": self.model,
                "messages": [*instructions, *messages],
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [tool.as_function() for tool in self.tools or ()] or None,
                "tool_choice": choice.as_named_tool() if isinstance(choice, ChosenFunction) else choice,
                "response_format": None if text_format is None else text_format.as_response_format(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            }
        )

    def settings(self) -> dict[str, Any]:
        """Return the fields that a response repeats."""
        choice, text_format = self.tool_choice, None
        if self.text is not None and self.text.format is not None:
            text_format = self.text.format.model_dump(exclude_none=True, by_alias=True)
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, ChosenFunction) else choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "text": {"format": text_format or {"type": "text"}},
            "store": self.store is not False,
            "metadata": self.metadata or {},
            "truncation": "disabled",
            "background": False,
        }
