"""A tool that a reply may call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that a reply may call.

    Args:
        parameters: The JSON schema of its arguments, an object; None: any object.
    """

    name: str
    parameters: Mapping[str, Any] | None = field(default_factory=lambda: _NO_PARAMETERS)
