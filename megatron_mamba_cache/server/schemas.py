"""Requests as clients send them; what no server could run is refused by the types."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.types import Strict

_INT32_MAX = 2**31 - 1
_MOST_STOPS = 16
_MOST_CHOICES = 128

Int = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
TokenId = Annotated[Int, Field(ge=0, le=_INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Name = Annotated[Text, Field(max_length=256)]
StopString = Annotated[Text, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopString], Field(fail_fast=True, max_length=_MOST_STOPS)]
Zero = Annotated[Number, Field(ge=0, le=0)]


class StreamOptions(BaseModel):
    """How a stream ends.

    Args:
        include_usage: Whether a last chunk without choices has the usage.
    """

    include_usage: Flag = False


class GenerationFields(BaseModel):
    """What both endpoints take. Fields of OpenAI's that change nothing here are passed over; others are refused.

    Beyond OpenAI's: `top_k` (0 or -1 is off, 1 greedy), `ignore_eos`, `cache_salt` (prefixes are shared only between
    requests of the same salt) and `return_token_ids`.
    """

    model_config = ConfigDict(extra="forbid", regex_engine="rust-regex")

    model: Name | None = None
    n: Annotated[Int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stop: StopString | Stops | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[Int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=_INT32_MAX)] | None = None
    ignore_eos: Flag | None = None
    return_token_ids: Flag | None = None
    cache_salt: Name | None = None
    # Taken, and without effect.
    user: Name | None = None
    metadata: dict[Name, Name] | None = None
    store: Flag | None = None
    service_tier: Name | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    # Taken where they ask for nothing.
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[Name, Number], Field(max_length=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationFields):
    """A request of `/v1/completions`; token ids are a prompt too."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=_MOST_CHOICES)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=_MOST_CHOICES)]
    )
    max_tokens: Annotated[Int, Field(ge=0, le=_INT32_MAX)] | None = None
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    echo: Flag | None = None
    best_of: Literal[1] | None = None
    suffix: Annotated[Text, Field(max_length=0)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: Text


def _without_nul(role: str) -> str:
    if not role.isprintable() or not role:
        raise ValueError("a role is a word such as user, assistant or system")
    return role


class Message(BaseModel):
    """One message; fields that it does not have here, as replies of OpenAI's have, are passed over.

    Calls of tools would be lost to the template, so that a message that has some is refused.
    """

    role: Annotated[Text, Field(min_length=1, max_length=64), AfterValidator(_without_nul)]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=4096)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[Text], Field(max_length=0)] | None = None
    function_call: None = None

    def plain(self) -> dict[str, str]:
        """Return what a chat template reads, its parts joined."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class ResponseFormat(BaseModel):
    """Plain text, the only format."""

    type: Literal["text"]


class ChatRequest(GenerationFields):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_tokens: Annotated[Int, Field(ge=1, le=_INT32_MAX)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1, le=_INT32_MAX)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Text], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: Flag | None = None


class FlushRequest(BaseModel):
    """A request of `/admin/flush`; without a version the present one stays."""

    model_config = ConfigDict(extra="forbid")

    weights_version: Annotated[Text, Field(min_length=1, max_length=256)] | None = None
