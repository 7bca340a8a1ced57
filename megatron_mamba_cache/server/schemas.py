"""Schemas for client requests. They declare the supported fields; `unsupported` lists the unsupported fields."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..policy.logits_settings import PLAIN_LOGITS, LogitsSettings
from .answer_fields import AnswerFields
from .conversation import Conversation
from .field_types import (
    INT32_MAX,
    Flag,
    Int,
    JsonObject,
    Metadata,
    Name,
    Number,
    PartlySupported,
    Stops,
    StopString,
    Text,
    TokenId,
    TokenIds,
)
from .message_schemas import Messages, Templated
from .tool_schemas import ToolChoice
from .unsupported import CHAT, COMMON, COMPLETION, LABELS, STREAM_OPTIONS, TEMPLATING, schema_error

_MOST_STOP_TOKENS = 256
_MOST_CHOICES = 2**16  # `ServerLimits.max_choices` is usually lower

BiasedToken = Annotated[Text, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]


class StreamOptions(PartlySupported):
    """The field `stream_options` in OpenAI's API."""

    model_config = ConfigDict(extra="forbid")
    unsupported = STREAM_OPTIONS

    include_usage: Flag | None = None  # True: a stream ends with a chunk that has the usage and no choices
    continuous_usage_stats: Flag | None = None  # True: each chunk has the usage so far


class GenerationFields(AnswerFields):
    """Fields common to completions and chat completions; unsupported fields are ignored or refused.

    Extensions of OpenAI's API: `top_k` (0 or -1: off, 1: greedy), `min_p`, `repetition_penalty`, `min_tokens`,
    `stop_token_ids`, `ignore_eos`, `add_special_tokens` (add the tokenizer's special tokens to the prompt),
    `skip_special_tokens`, `cache_salt` (only requests with the same salt share prefixes), `return_token_ids`,
    `prompt_logprobs` and `return_routed_experts` (only without streaming) and `request_id` (suffix of the response id).
    """

    model_config = ConfigDict(extra="forbid", regex_engine="rust-regex")
    unsupported = COMMON
    labels = LABELS

    model: Name | None = None
    n: Annotated[Int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stop: StopString | Stops | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[BiasedToken, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[Int, Field(ge=0, le=INT32_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=_MOST_STOP_TOKENS)] | None = None
    ignore_eos: Flag | None = None
    skip_special_tokens: Flag | None = None
    add_special_tokens: Flag | None = None
    return_token_ids: Flag | None = None
    return_routed_experts: Flag | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    cache_salt: Name | None = None
    request_id: Name | None = None
    # The following fields are accepted but have no effect.
    user: Name | None = None
    metadata: Metadata | None = None
    store: Flag | None = None
    service_tier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    safety_identifier: Name | None = None

    @property
    def logits(self) -> LogitsSettings:
        """Settings that change the logits before sampling, such as penalties and `logit_bias`."""
        settings = LogitsSettings(
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            min_tokens=self.min_tokens or 0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            min_p=self.min_p or 0.0,
        )
        return PLAIN_LOGITS if settings == PLAIN_LOGITS else settings

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings in the request; () if there are none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with a chunk that reports the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_every_event(self) -> bool:
        """True if each chunk of a stream reports the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _answers_can_end(self) -> Self:
        for name in ("ignore_eos", "min_tokens"):
            if self.answer is not None and getattr(self, name):
                sentence = f"{name} cannot be combined with {self.answer[0]}, which decides where the answer ends"
                raise schema_error("no_end", sentence, name)
        return self

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise schema_error("no_stream", "stream_options requires stream to be true", "stream_options")
        for name in ("prompt_logprobs", "return_routed_experts"):
            if getattr(self, name) not in (None, False) and self.stream:
                raise schema_error("whole_only", f"{name} requires stream to be false or unset", name)
        return self


class CompletionRequest(GenerationFields):
    """Request to `/v1/completions`; each prompt is text or token ids."""

    unsupported = COMPLETION

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=_MOST_CHOICES)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=_MOST_CHOICES)]
    )
    max_tokens: Annotated[Int, Field(ge=0, le=INT32_MAX)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    echo: Flag | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts in the request; each is a text or a list of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatRequest(GenerationFields, Templated):
    """Request to `/v1/chat/completions`."""

    unsupported = CHAT

    messages: Messages
    max_tokens: Annotated[Int, Field(ge=1, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    reasoning_effort: Name | None = None
    verbosity: Name | None = None
    include_reasoning: Flag | None = None
    prediction: JsonObject | None = None  # accepted but has no effect

    def conversation(self) -> Conversation:
        """Return the conversation to render with the chat template."""
        return self.conversation_of(self.messages, reasoning_effort=self.reasoning_effort, verbosity=self.verbosity)


class TokenizeRequest(PartlySupported, Templated):
    """Request to `/tokenize`: a prompt as for `/v1/completions`, or messages as for `/v1/chat/completions`."""

    model_config = ConfigDict(extra="forbid")
    unsupported = TEMPLATING

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_text", "send either prompt or messages, and not both", {"field": "prompt"})
        return self


class DetokenizeRequest(BaseModel):
    """Request to `/detokenize`."""

    model_config = ConfigDict(extra="forbid")

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class AbortRequest(BaseModel):
    """Request to `/admin/abort`; if `request_ids` is unset, all requests are aborted."""

    model_config = ConfigDict(extra="forbid")

    request_ids: Annotated[list[Name], Field(fail_fast=True)] | None = None


class FlushRequest(BaseModel):
    """Request to `/admin/flush`; if `weights_version` is unset, the current version is kept."""

    model_config = ConfigDict(extra="forbid")

    weights_version: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
