"""What is wrong with a request that does not fit its schema, in one error."""

from collections.abc import Sequence
from typing import Any

from .errors import ApiError

_OTHER_FORM = ("string_type", "list_type", "int_type")
_MOST_CHARACTERS = 1000


def schema_error(errors: Sequence[Any]) -> ApiError:
    """Return what pydantic's errors come to: of the first field's forms, the error of the one that fits furthest."""
    found = max((error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]), key=_reach)
    param = ".".join(str(part) for part in found["loc"] if part != "body" and not _is_form(part)) or None
    return ApiError(400, f"{param or 'the body'}: {found['msg']}"[:_MOST_CHARACTERS], found["type"], param)


def _reach(error: Any) -> tuple[int, int, bool]:
    """Return how far a form fits: how deep it goes, at which item it ends, and whether more than its type is wrong."""
    place = error["loc"]
    return len(place), place[-1] if isinstance(place[-1], int) else -1, error["type"] not in _OTHER_FORM


def _is_form(part: str | int) -> bool:
    """Whether a part of an error's place is pydantic's name of a form, not a field or an item."""
    return isinstance(part, str) and (part == "str" or "[" in part or "-" in part)
