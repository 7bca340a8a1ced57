"""One error for a request that does not match its schema."""

from collections.abc import Sequence
from typing import Any

from .errors import ApiError, bad_request

_OTHER_FORM = ("string_type", "list_type", "int_type")
_MOST_CHARACTERS = 1000
_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")


def schema_error(errors: Sequence[Any], content_type: str | None) -> ApiError:
    """Return one error for all of pydantic's: the first field's, from the form of it that matches furthest.

    Args:
        content_type: The request's; None if it has none.
    """
    found = max((error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]), key=_reach)
    return _body_error(found, content_type) or _field_error(found)


def _body_error(found: Any, content_type: str | None) -> ApiError | None:
    """Return the error of a body as a whole; None if a field is wrong."""
    kind = found["type"]
    if kind == "json_invalid":
        place, reason = found["loc"][-1], found["ctx"]["error"]
        return bad_request(f"the body is not valid JSON: {reason} at character {place}", code="invalid_json")
    if found["loc"] != ("body",):
        return None
    if kind == "missing":
        return bad_request("the body is empty; send a JSON object", code="missing")
    if kind in _NO_OBJECT and not _is_json(content_type):
        told = "missing" if content_type is None else repr(content_type)
        return bad_request(f"the Content-Type is {told}; send application/json", "Content-Type", "content_type")
    return bad_request("the body is not a JSON object", code=kind) if kind in _NO_OBJECT else None


def _field_error(found: Any) -> ApiError:
    place = [part for part in found["loc"] if part != "body" and not _is_form(part)]
    context = found.get("ctx", {})
    names = [*map(str, place), *([context["field"]] if "field" in context else [])]
    param = ".".join(names) if names else None
    if "sentence" in context:
        message = context["sentence"] if len(place) == 0 else f"{param}: {context['sentence']}"
    elif found["type"] == "extra_forbidden":
        message = f"`{param}` is not a known field; leave it out"
    else:
        message = f"{param or 'the body'}: {found['msg']}"
    return bad_request(message[:_MOST_CHARACTERS], param, found["type"])


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _reach(error: Any) -> tuple[int, int, bool]:
    """Return how far a form matches: its depth, the item where it fails, and whether the error is not just a type."""
    place = error["loc"]
    return len(place), place[-1] if isinstance(place[-1], int) else -1, error["type"] not in _OTHER_FORM


def _is_form(part: str | int) -> bool:
    """Return whether a part of an error's place is pydantic's name for a form, not a field or an item."""
    return isinstance(part, str) and (part == "str" or "[" in part or "-" in part)
