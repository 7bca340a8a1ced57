"""Schemas for requests to Anthropic's messages API, and their translation to chat completions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..answer_fields import JsonSchema
from ..field_types import INT32_MAX, CacheControl, Flag, Int, JsonObject, Name, Number, PartlySupported, Stops, Text
from ..schemas import ChatRequest
from ..tool_schemas import own_tools
from ..unsupported import LABELS, Table, Unsupported, note_ignored, schema_error
from .message_parts import (
    Blocks,
    MessagesToolChoice,
    MessagesTools,
    RedactedThinkingBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    parts_of,
)

_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_UNSUPPORTED: Table = {
    "container": Unsupported(),
    "context_management": Unsupported(({}, {"edits": []}, _KEEPS_ALL), "leave it out"),
    "mcp_servers": Unsupported(([],)),
    "billing_policy": Unsupported(),
    "compaction": Unsupported(),
    "fallback_credit_token": Unsupported(),
    "fallbacks": Unsupported(([], "default")),  # no fallbacks are configured, so "default" has no effect
    "speed": Unsupported(("standard",)),
    "thread": Unsupported(),
}
_OF_SYSTEM_MESSAGES: Table = {"clear_at": Unsupported(("never",)), "output_config": Unsupported(({},))}
_FOREIGN: Mapping[str, Sequence[str]] = {
    "user": ("thinking", "redacted_thinking", "tool_use"),
    "system": ("thinking", "redacted_thinking", "tool_use", "tool_result"),
    "assistant": ("tool_result",),
}


class Turn(PartlySupported):
    """Message with the role user, assistant or, for instructions after the first message, system."""

    unsupported = _OF_SYSTEM_MESSAGES

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks

    @model_validator(mode="after")
    def _has_its_own_blocks(self) -> Self:
        foreign = _FOREIGN[self.role]
        for index, block in enumerate(() if isinstance(self.content, str) else self.content):
            if block.type in foreign:
                sentence = f"a message with role {self.role} cannot contain a block of type {block.type!r}"
                raise schema_error("foreign_block", sentence, f"content.{index}.type")
        return self

    @property
    def is_empty(self) -> bool:
        """True if the message has no text except white space, and no other blocks."""
        blocks = () if isinstance(self.content, str) else self.content
        return not self.has_text and all(isinstance(block, TextBlock) for block in blocks)

    @property
    def has_text(self) -> bool:
        """True if the message has text other than white space."""
        if isinstance(self.content, str):
            return bool(self.content.strip())
        return any(isinstance(block, TextBlock) and block.text.strip() for block in self.content)

    @property
    def has_calls(self) -> bool:
        """True if the message calls a tool."""
        return not isinstance(self.content, str) and any(isinstance(block, ToolUseBlock) for block in self.content)


class Thinking(BaseModel):
    """The field `thinking`: sets the template variable `enable_thinking`; `budget_tokens` has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None
    display: Literal["summarized", "omitted"] | None = None  # "omitted" removes the text of reasoning


class OutputFormat(BaseModel):
    """JSON schema that constrains the answer."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: JsonSchema = Field(alias="schema")

    def as_response_format(self) -> dict[str, Any]:
        """Convert the format to a chat completion's `response_format`."""
        return {"type": "json_schema", "json_schema": {"schema": self.json_schema}}


class OutputConfig(BaseModel):
    """The field `output_config`: answer format, and effort (the template variable `reasoning_effort`)."""

    model_config = ConfigDict(extra="forbid")

    effort: Name | None = None
    format: OutputFormat | None = None


class CountTokensRequest(PartlySupported):
    """Request to `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="forbid", regex_engine="rust-regex")
    unsupported = _UNSUPPORTED
    labels = LABELS | {"anthropic_version", "anthropic_beta", "betas", "inference_geo", "diagnostics"}

    model: Name | None = None
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=4096)]
    system: Text | Texts | None = None
    tools: MessagesTools | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None

    @property
    def continues(self) -> bool:
        """True if the last message is a non-empty assistant message, which the reply then continues."""
        return self.messages[-1].role == "assistant" and not self.messages[-1].is_empty

    @model_validator(mode="after")
    def _can_be_continued(self) -> Self:
        last = self.messages[-1]
        if self.continues and (last.has_calls or not last.has_text):
            sentence = "a final assistant message must have text and no tool_use; otherwise, end with a user message"
            raise schema_error("not_continued", sentence, "messages")
        return self

    def as_chat(self) -> ChatRequest:
        """Translate the request to a chat completion."""
        return ChatRequest.model_validate(self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        choice, thinking = self.tool_choice, self.thinking
        output = self.output_config or OutputConfig()
        answer = output.format or self.output_format
        thinks = None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled"
        return {
            "model": self.model,
            "messages": self._marked(list(self._messages())),
            "continue_final_message": self.continues,
            "tools": [tool.as_function() for tool in own_tools(self.tools)] or None,
            "tool_choice": None if choice is None else choice.as_chat(),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "chat_template_kwargs": None if thinks is None else {"enable_thinking": thinks},
            "reasoning_effort": output.effort,
            "response_format": None if answer is None else answer.as_response_format(),
        }

    def _marked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the request's `cache_control` to the last message, in place, unless it ends with a breakpoint."""
        if self.cache_control is not None and messages:
            last = messages[-1]
            if not any(part["cache_control"] for part in last["content"][-1:]):
                last["cache_control"] = last.get("cache_control") or self.cache_control
        return messages

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": parts_of(self.system)}
        is_begun_empty = self.messages[-1].role == "assistant" and not self.continues
        for turn in self.messages[:-1] if is_begun_empty else self.messages:
            blocks = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
            if turn.role == "system":
                yield {"role": "system", "content": parts_of(blocks)}
            else:
                yield from _replied(blocks) if turn.role == "assistant" else _user_messages(blocks)


class MessagesRequest(CountTokensRequest):
    """Request to `/v1/messages`."""

    max_tokens: Annotated[Int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: Stops | None = None
    stream: Flag | None = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=0, le=INT32_MAX)] | None = None
    # The following fields are accepted but have no effect.
    metadata: JsonObject | None = None
    service_tier: Name | None = None
    inference_geo: Name | None = None
    diagnostics: JsonObject | None = None

    @property
    def includes_thinking(self) -> bool:
        """True if the reply should include the text of reasoning."""
        return self.thinking is None or self.thinking.display != "omitted"

    def _chat_fields(self) -> dict[str, Any]:
        return super()._chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def _user_messages(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Split a user's blocks into messages: one per tool result, and one per run of text between results."""
    texts: list[Any] = []
    for block in [*blocks, None]:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": parts_of(texts)}
            texts = []
        if isinstance(block, ToolResultBlock):
            if block.is_error:
                note_ignored("the chat template does not support it", ["is_error of results"])
            result = {"tool_call_id": block.tool_use_id, "content": parts_of(block.content)}
            yield {"role": "tool", **result, "cache_control": block.cache_control}


def _replied(blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield one chat message with the blocks of an earlier reply."""
    calls = [
        {
            "id": block.id,
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
            "cache_control": block.cache_control,
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        note_ignored("it cannot be read here", ["encrypted reasoning"])
    reasoning = "\n\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    yield {
        "role": "assistant",
        "content": parts_of(blocks),
        "reasoning_content": reasoning or None,
        "tool_calls": calls,
    }
