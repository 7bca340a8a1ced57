"""Pydantic types that the request schemas share."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.types import Strict

from .strict_json import error_of
from .unsupported import Table, schema_error, schema_with, without_labels, without_unsupported

INT32_MAX = 2**31 - 1
_MOST_STOPS = 16
_SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200}

Int = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
TokenId = Annotated[Int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Name = Annotated[Text, Field(max_length=256)]
StopString = Annotated[Text, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopString], Field(fail_fast=True, max_length=_MOST_STOPS)]
Metadata = dict[Name, Annotated[Text, Field(max_length=512)]]


def _strict(value: dict[str, Any]) -> dict[str, Any]:
    reason = error_of(value)
    if reason is not None:
        raise schema_error("not_json", f"the object {reason}")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_strict)]
"""JSON object from a client; NaN and Infinity are refused."""


class CacheControl(BaseModel):
    """Anthropic's cache breakpoint: end of a prefix to cache, with an optional lifetime."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def keep_s(self) -> int:
        """Time during which the cached prefix has a higher priority, in seconds; 0 if `ttl` is unset."""
        return 0 if self.ttl is None else _SECONDS[self.ttl]


class PromptCacheBreakpoint(BaseModel):
    """OpenAI's cache breakpoint: end of a prefix to cache, with an optional lifetime."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None

    @property
    def keep_s(self) -> int:
        return 0 if self.ttl is None else _SECONDS[self.ttl]


Mark = CacheControl | PromptCacheBreakpoint


class PartlySupported(BaseModel):
    """Base class of schemas that refuse unsupported fields, except with values that have no effect.

    `labels` are names of fields, such as `user`, that cannot change a reply. Requests with these fields are counted,
    and the fields are removed if the schema does not declare them.
    """

    model_config = ConfigDict(json_schema_extra=lambda schema, kind: schema_with(kind.unsupported, kind.labels, schema))

    unsupported: ClassVar[Table] = {}
    labels: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_unsupported(cls, fields: Any) -> Any:
        return without_unsupported(cls.unsupported, without_labels(cls.labels, cls.model_fields, fields))
