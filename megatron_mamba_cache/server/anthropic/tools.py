"""Schemas of tools and of the choice among them, as the messages API has them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, Tag

from ..field_types import CacheControl, Flag, JsonObject, Text
from ..tool_schemas import MOST_TOOLS, ForeignTool, FunctionName, counted_foreign, own_or_foreign


class MessagesTool(BaseModel):
    """A tool; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject
    strict: Flag | None = None
    cache_control: CacheControl | None = None

    def as_function(self) -> dict[str, Any]:
        """Return the tool as chat completions have it."""
        told = {"description": self.description, "strict": self.strict}
        described = {key: value for key, value in told.items() if value is not None}
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

_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class MessagesToolChoice(BaseModel):
    """Choice of tools: "any" asks for a call, "tool" for a call of the tool with this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag | None = None

    def as_chat(self) -> Any:
        """Return the choice as chat completions have it."""
        if self.type != "tool":
            return _CHOICES[self.type]
        return {"type": "function", "function": {"name": self.name or ""}}
