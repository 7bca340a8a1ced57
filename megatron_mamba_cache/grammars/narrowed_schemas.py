"""JSON schemas narrowed to what llguidance holds to: where it would allow more than they say, they allow less.

What cannot be narrowed is refused.
"""

import math
import re
import warnings
from decimal import Decimal
from typing import Any

from ..errors import GrammarError
from .schema_words import schemas_in, values_in

_MOST_EXACT = 2**53
"""Integers beyond it may have no float64, in which llguidance computes."""
_LARGEST_INTEGER = 2**63 - 1024  # a float64; llguidance's own are of 64 bits
_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_NO_CODES = 'nrbtf\\"'
"""The letters of escapes in JSON, but for `u`."""


def narrow(schema: Any) -> None:
    """Narrow a JSON schema in place.

    - Bounds beyond 2**53 move inward to the next float64.
    - Classes of characters in patterns lose U+0001 if they lack a quote or a backslash: llguidance takes a class of all
      control characters for one of everything that is written with a backslash.

    Raises:
        GrammarError: If it has a constant beyond 2**53 that is no float64, or counts properties of free names, which a
            reply may repeat.
    """
    for found in schemas_in(schema):
        for word in ("minimum", "maximum"):
            _narrow_bound(found, word)
        _check_constants(found)
        _check_count(found)
        if isinstance(found.get("pattern"), str):
            found["pattern"] = _narrowed_pattern(found["pattern"])
        if isinstance(found.get("patternProperties"), dict):
            found["patternProperties"] = {
                _narrowed_pattern(pattern): value for pattern, value in found["patternProperties"].items()
            }


def guidance_for(schema: Any) -> dict[str, str]:
    """Return llguidance's settings for a schema.

    Names may not be written by the codes of their characters where an object has others beside those that it names: an
    "a" written so would be taken for another name. Nor may any text of that schema then.
    """
    is_open = any(
        (found.get("properties") or found.get("patternProperties")) and found.get("additionalProperties") is not False
        for found in schemas_in(schema)
    )
    return {"json_allowed_escapes": _NO_CODES} if is_open else {}


def _narrow_bound(schema: dict[str, Any], word: str) -> None:
    """Put the nearest float64 inside into the place of a bound beyond 2**53, whether it is exclusive or not."""
    inward = -math.inf if word == "maximum" else math.inf
    exclusive_word = f"exclusive{word.capitalize()}"
    held = []
    for name in (word, exclusive_word):
        bound = schema.get(name)
        if isinstance(bound, bool) or not isinstance(bound, int) or abs(bound) <= _MOST_EXACT:
            continue
        nearest = _float_of(bound, name)
        while not _is_inside(nearest, bound, inward, is_exclusive=name == exclusive_word):
            nearest = math.nextafter(nearest, inward)
        held.append(int(nearest))
        del schema[name]
    if not held:
        return
    if schema.get("type") != "number":
        held = [max(-_LARGEST_INTEGER, value) if inward > 0 else min(_LARGEST_INTEGER, value) for value in held]
    if word in schema:
        held.append(schema[word])
    schema[word] = min(held) if inward < 0 else max(held)


def _is_inside(value: float, bound: int, inward: float, *, is_exclusive: bool) -> bool:
    """Return whether a float64 is inside a bound, both itself and by its shortest digits, which llguidance writes."""
    for written in (int(value), int(Decimal(repr(value)))):
        gap = bound - written if inward < 0 else written - bound
        if gap < int(is_exclusive):
            return False
    return True


def _check_constants(schema: dict[str, Any]) -> None:
    for word in ("const", "enum"):
        for value in values_in(schema.get(word)):
            if isinstance(value, int) and abs(value) > _MOST_EXACT and _float_of(value, word) != value:
                raise GrammarError(f"{word} holds {value}, beyond 2**53, which cannot be told from its neighbours")


def _check_count(schema: dict[str, Any]) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_free = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, int) and is_free and least > num_required + 1:
        raise GrammarError(
            f"minProperties is {least}, of which {num_required} are required: others have free names, which a reply "
            "may repeat; require more by name, or set additionalProperties to false"
        )


def _float_of(value: int, word: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise GrammarError(f"{word} holds an integer of more than 308 digits") from error


def _narrowed_pattern(pattern: str) -> str:
    return _CLASS.sub(lambda found: _narrowed_class(found[0]), pattern)


def _narrowed_class(text: str) -> str:
    """Return a class of characters that does not hold all control characters unless it holds a quote and a backslash.

    Args:
        text: The class in its brackets; or an escape, which stays.
    """
    if not text.startswith("["):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later Python may read otherwise
            holds = re.compile(text).fullmatch
    except re.error:
        return f"[{text}&&[^\\x01]]"
    is_safe = not holds("\x01") or (holds('"') and holds("\\"))
    return text if is_safe else f"[{text}&&[^\\x01]]"
