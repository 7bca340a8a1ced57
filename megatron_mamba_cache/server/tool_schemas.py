"""Schemas of tools and of their calls, as chat completions have them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from .conversation import called
from .field_types import CacheControl, Flag, JsonObject, Name, Text
from .unsupported import REFUSED

_MOST_TOOLS = 1024
_MOST_CALLS = 1024

FunctionName = Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.:/\-]{1,128}$")]


def _function_only(kind: str) -> str:
    if kind != "function":
        sentence = f"a tool of type {kind!r:.50} is not supported by this server; send functions"
        raise PydanticCustomError(REFUSED, "{sentence}", {"sentence": sentence})
    return kind


FunctionKind = Annotated[Text, AfterValidator(_function_only), Field(json_schema_extra={"enum": ["function"]})]


class Function(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema, which the chat template prints.

    Clients set `cache_control` here or on the tool.
    """

    model_config = ConfigDict(regex_engine="rust-regex")

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None
    cache_control: CacheControl | None = None


class Tool(BaseModel):
    """A tool: always a function."""

    type: FunctionKind
    function: Function
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool for a chat template."""
        hidden: Any = {"cache_control": True, "function": {"cache_control"}}
        return self.model_dump(exclude=hidden, exclude_unset=True, exclude_none=True)

    @property
    def mark(self) -> CacheControl | None:
        """The breakpoint behind it."""
        return self.cache_control or self.function.cache_control


def _distinct(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        sentence = f"two tools are called {repeated}; give each a name of its own"
        raise PydanticCustomError("repeated_name", "{sentence}", {"sentence": sentence})
    return tools


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=_MOST_TOOLS), AfterValidator(_distinct)]


class NamedFunction(BaseModel):
    """The name of a function."""

    name: Text


class NamedTool(BaseModel):
    """A `tool_choice` that names a function."""

    type: FunctionKind
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(BaseModel):
    """A function and its arguments, JSON as text."""

    name: Name
    arguments: Text = "{}"


class Call(BaseModel):
    """A call of a tool in an earlier reply."""

    id: Name | None = None
    type: FunctionKind = "function"
    function: CalledFunction
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        """Return the call for a chat template."""
        return called(self.function.name, self.function.arguments, self.id)


Calls = Annotated[list[Call], Field(fail_fast=True, max_length=_MOST_CALLS)]
