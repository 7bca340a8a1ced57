"""Schemas for the tools, tool choices and tool calls of chat completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from .conversation import called
from .errors import bad_request
from .field_types import CacheControl, Flag, JsonObject, Name, Text
from .unsupported import REFUSED, note_ignored, schema_error

MOST_TOOLS = 1024
_MOST_CALLS = 1024

_Own = TypeVar("_Own", bound=BaseModel)
FunctionName = Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.:/\-]{1,128}$")]


def _function_only(kind: str) -> str:
    if kind != "function":
        raise schema_error(REFUSED, f"a tool of type {kind!r:.50} is not supported by this server; send functions")
    return kind


def _kind_of(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)


FunctionKind = Annotated[Text, AfterValidator(_function_only), Field(json_schema_extra={"enum": ["function"]})]


class ForeignTool(BaseModel):
    """Tool that is built into another provider's API, such as `web_search`; this server cannot run it."""

    type: Text
    cache_control: CacheControl | None = None


def own_or_foreign(*own: str) -> Discriminator:
    """Return a pydantic discriminator for own and foreign tools; tools with a type in `own`, or without one, are own.

    The tags contain a hyphen, so that `errors.schema_error` removes them from error messages.
    """

    def tag(tool: Any) -> str:
        kind = _kind_of(tool)
        return "foreign-tool" if isinstance(kind, str) and kind not in own else "own-tool"

    return Discriminator(tag)


OwnOrForeign = Annotated[
    Annotated[_Own, Tag("own-tool")] | Annotated[ForeignTool, Tag("foreign-tool")], own_or_foreign("function")
]
"""Function that the client runs, or a foreign tool."""


def counted_foreign(tools: list[Any]) -> list[Any]:
    """Count the foreign tools and log a warning; return `tools` unchanged."""
    foreign = [tool for tool in tools if isinstance(tool, ForeignTool)]
    note_ignored("tools of this type cannot run here", [f"tools.type {tool.type}" for tool in foreign])
    return tools


def own_tools(tools: Sequence[_Own | ForeignTool] | None) -> list[_Own]:
    """Return the tools without foreign tools; move a foreign tool's cache breakpoint to the last remaining tool."""
    kept = [tool for tool in tools or () if not isinstance(tool, ForeignTool)]
    foreign = [tool for tool in tools or () if isinstance(tool, ForeignTool)]
    mark = next((tool.cache_control for tool in foreign if tool.cache_control is not None), None)
    if kept and mark is not None and getattr(kept[-1], "cache_control", None) is None:
        kept[-1] = kept[-1].model_copy(update={"cache_control": mark})
    return kept


class Function(BaseModel):
    """Function that the model may call; `parameters` is a JSON schema. `cache_control` may be here or in `Tool`."""

    model_config = ConfigDict(regex_engine="rust-regex")

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: Flag | None = None
    cache_control: CacheControl | None = None


def _nested(found: Any) -> Any:
    """Convert a function in the flat format of the responses API to the nested format of chat completions."""
    if not isinstance(found, Mapping) or found.get("type") != "function" or "function" in found or "name" not in found:
        return found
    outer = {name: found[name] for name in ("type", "cache_control") if name in found}
    return outer | {"function": {name: value for name, value in found.items() if name not in outer}}


class Tool(BaseModel):
    """Tool that the model may call; always a function."""

    type: FunctionKind
    function: Function
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool definition for chat templates."""
        hidden: Any = {"cache_control": True, "function": {"cache_control"}}
        return self.model_dump(exclude=hidden, exclude_unset=True, exclude_none=True)

    @property
    def mark(self) -> CacheControl | None:
        """Cache breakpoint after this tool; None if there is none."""
        return self.cache_control or self.function.cache_control


def _distinct(tools: list[Tool | ForeignTool]) -> list[Tool | ForeignTool]:
    names = [tool.function.name for tool in own_tools(tools)]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise schema_error("repeated_name", f"two tools are named {repeated}; give each tool a different name")
    return tools


Tools = Annotated[
    list[Annotated[OwnOrForeign[Tool], BeforeValidator(_nested)]],
    Field(fail_fast=True, max_length=MOST_TOOLS),
    AfterValidator(counted_foreign),
    AfterValidator(_distinct),
]


class NamedFunction(BaseModel):
    """The field `function` in a `tool_choice`."""

    name: Text


class NamedTool(BaseModel):
    """A `tool_choice` that requires a call to one function."""

    type: FunctionKind
    function: NamedFunction


class AllowedTools(BaseModel):
    """A `tool_choice` that allows only some tools; the prompt still contains all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[OwnOrForeign[NamedTool], BeforeValidator(_nested)]],
        Field(fail_fast=True, max_length=MOST_TOOLS),
        AfterValidator(counted_foreign),
    ]


def _plain_choice(found: Any) -> Any:
    """Normalize a tool choice: flatten `allowed_tools`, and nest the fields of a flat function."""
    inner = found.get("allowed_tools") if isinstance(found, Mapping) else None
    return {"type": "allowed_tools", **inner} if isinstance(inner, Mapping) else _nested(found)


def _form_of_choice(found: Any) -> str:
    if not isinstance(found, Mapping | BaseModel):
        return "a-word"
    return "some-tools" if _kind_of(found) == "allowed_tools" else "a-tool"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a-word")]
    | Annotated[NamedTool, Tag("a-tool")]
    | Annotated[AllowedTools, Tag("some-tools")],
    Discriminator(_form_of_choice),
    BeforeValidator(_plain_choice),
]


def flat_choice(choice: str | NamedTool | AllowedTools | None) -> Any:
    """Convert a tool choice to the flat format of the responses API."""
    if isinstance(choice, AllowedTools):
        tools = [flat_choice(tool) for tool in own_tools(choice.tools)]
        return {"type": choice.type, "mode": choice.mode, "tools": tools}
    return {"type": choice.type, "name": choice.function.name} if isinstance(choice, NamedTool) else choice


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """Tools that a reply may or must call."""

    choice: str | NamedTool | None  # "auto", "none", "required", or the tool that must be called
    tools: Sequence[Mapping[str, Any]]  # function definitions in OpenAI's format
    are_some: bool = False  # True if the request has other tools, which the reply may not call


def chosen_tools(choice: str | NamedTool | AllowedTools | None, tools: Sequence[Mapping[str, Any]]) -> ChosenTools:
    """Return the tools that `choice` allows; raise `ApiError` 400 if one is not among the request's tools."""
    if not isinstance(choice, AllowedTools):
        return ChosenTools(choice, tools)
    allowed = {tool.function.name for tool in own_tools(choice.tools)}
    missing = allowed - {tool["function"]["name"] for tool in tools}
    if missing:
        raise bad_request(f"tool_choice names {min(missing)!r:.100}, which is not in tools", "tool_choice")
    kept = [tool for tool in tools if tool["function"]["name"] in allowed]
    if not kept and choice.mode == "auto":
        return ChosenTools("none", ())
    return ChosenTools(choice.mode, kept, are_some=len(kept) < len(tools))


class CalledFunction(BaseModel):
    """Name and arguments of a called function; the arguments are JSON text."""

    name: Name
    arguments: Text = "{}"


class Call(BaseModel):
    """Tool call in an earlier reply."""

    id: Name | None = None
    type: FunctionKind = "function"
    function: CalledFunction
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        """Return the call for chat templates."""
        return called(self.function.name, self.function.arguments, self.id)


Calls = Annotated[list[Call], Field(fail_fast=True, max_length=_MOST_CALLS)]
