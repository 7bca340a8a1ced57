"""Narrow JSON schemas so that llguidance, which ignores some limits, never allows an invalid value.

Schemas that cannot be narrowed are refused.
"""

import math
import re
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from ..errors import GrammarError
from .patterns import CLASS
from .schema_words import also, at_location, list_of, locations_in, mapping_of, schemas_in, values_in

_MOST_EXACT = 2**53
"""Integers beyond it may have no float64, in which llguidance computes."""
_LARGEST_INTEGER = 2**63 - 1024  # exact as float64; llguidance uses 64-bit integers, in bounds of numbers too
_WORDS_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_CODED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
"""Characters that JSON writes by their codes."""
_NO_CODES = 'nrbtf\\"'
"""The letters of escapes in JSON, but for `u`."""


def narrow(schema: Any) -> None:
    """Narrow a JSON schema in place.

    - Bounds that are integers beyond 2**53 move inward to the next float64, and all bounds to within 2**63.
    - Character classes without a quote or a backslash lose U+0001, because llguidance reads a class of all control
      characters as everything that JSON escapes.

    Raises:
        GrammarError: If a constant beyond 2**53 is not a float64, or the number of freely named properties is limited,
            since a reply may repeat names.
    """
    for location, found in locations_in(schema).items():
        with at_location(location):
            for word in ("minimum", "maximum"):
                _narrow_bound(found, word)
            _check_constants(found)
            _narrow_count(found)
        if isinstance(found.get("pattern"), str):
            found["pattern"] = _narrowed_pattern(found["pattern"])
        if isinstance(found.get("patternProperties"), dict):
            found["patternProperties"] = {
                _narrowed_pattern(pattern): value for pattern, value in found["patternProperties"].items()
            }


def check_escapes(schema: Any, has_text: Callable[[dict[str, Any]], bool]) -> None:
    """Remove values that need escapes where `guidance_for` forbids escapes.

    Raise `GrammarError` if a string has no other value. `has_text` tests whether a string schema has any value.
    """
    if not guidance_for(schema):
        return
    reason = "control characters, which cannot be enforced if objects may have other properties; set "
    remedy = "additionalProperties to false"
    for location, found in locations_in(schema).items():
        with at_location(location):
            if any(map(_needs_codes, values_in(found.get("const")))):
                raise GrammarError(f"const has {reason}{remedy}")
            values = list_of(found.get("enum"))
            kept = [value for value in values if not any(map(_needs_codes, values_in(value)))]
            if values and not kept:
                raise GrammarError(f"enum has only {reason}{remedy}")
            found |= {"enum": kept} if values else {}
            pattern_words = {word: found[word] for word in _WORDS_OF_STRINGS if word in found}
            if "pattern" in pattern_words and not has_text({"type": "string", **pattern_words}):
                raise GrammarError(f"the pattern allows only {reason}{remedy}")


def guidance_for(schema: Any) -> dict[str, str]:
    """Return the llguidance settings for a schema.

    If an object may have unlisted property names, `\\u` escapes are forbidden in the whole schema, because llguidance
    would take an escaped name for a different name.
    """
    is_open = any(
        (found.get("properties") or found.get("patternProperties")) and found.get("additionalProperties") is not False
        for found in schemas_in(schema)
    )
    return {"json_allowed_escapes": _NO_CODES} if is_open else {}


def _narrow_bound(schema: dict[str, Any], word: str) -> None:
    """Replace a bound beyond 2**53 by the nearest float64 that satisfies it, and clamp all bounds to 2**63."""
    inward = -math.inf if word == "maximum" else math.inf
    outermost = _LARGEST_INTEGER if word == "maximum" else -_LARGEST_INTEGER
    exclusive_word = f"exclusive{word.capitalize()}"
    held = []
    for name in (word, exclusive_word):
        bound = schema.get(name)
        if isinstance(bound, float) and (outermost < bound if inward < 0 else bound < outermost):
            bound = outermost
        if isinstance(bound, bool) or not isinstance(bound, int) or abs(bound) <= _MOST_EXACT:
            continue
        nearest = _float_of(bound, name)
        while not _is_inside(nearest, bound, inward, is_exclusive=name == exclusive_word):
            nearest = math.nextafter(nearest, inward)
        held.append(int(nearest))
        del schema[name]
    if not held:
        return
    held = [max(outermost, value) if inward > 0 else min(outermost, value) for value in held]
    if word in schema:
        held.append(schema[word])
    schema[word] = min(held) if inward < 0 else max(held)


def _is_inside(value: float, bound: int, inward: float, *, is_exclusive: bool) -> bool:
    """Return True if a float64 satisfies a bound, both by value and by its shortest decimal form.

    Raises:
        GrammarError: If it is infinite.
    """
    if math.isinf(value):
        raise GrammarError(f"no float64 is within the bound {bound:.6e}")
    for written in (int(value), int(Decimal(repr(value)))):
        gap = bound - written if inward < 0 else written - bound
        if gap < int(is_exclusive):
            return False
    return True


def _check_constants(schema: dict[str, Any]) -> None:
    for word in ("const", "enum"):
        for value in values_in(schema.get(word)):
            if isinstance(value, int) and abs(value) > _MOST_EXACT and _float_of(value, word) != value:
                raise GrammarError(f"{word} holds {value}, beyond 2**53, which float64 cannot distinguish")


def _narrow_count(schema: dict[str, Any]) -> None:
    """Remove `minProperties` if the required properties reach it; require one more property if one is missing."""
    least, required = schema.get("minProperties"), list_of(schema.get("required"))
    num_required = len(set(map(str, required)))
    is_free = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    optional = [name for name in mapping_of(schema.get("properties")) if name not in required]
    if isinstance(least, int) and least <= num_required:
        del schema["minProperties"]
    elif isinstance(least, int) and not is_free and optional and least == num_required + 1:
        del schema["minProperties"]
        also(schema, {"anyOf": [{"required": [name]} for name in optional]})
    if isinstance(least, int) and is_free and least > num_required + 1:
        raise GrammarError(
            f"minProperties is {least}, but only {num_required} properties are required by name, and a reply may "
            "repeat the names of others; require more by name, or set additionalProperties to false"
        )


def _needs_codes(value: Any) -> bool:
    return isinstance(value, str) and _CODED.search(value) is not None


def _float_of(value: int, word: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise GrammarError(f"{word} holds an integer of more than 308 digits") from error


def _narrowed_pattern(pattern: str) -> str:
    return CLASS.sub(lambda found: _narrowed_class(found[0]), pattern)


def _narrowed_class(text: str) -> str:
    """Return a character class without U+0001 unless it contains a quote and a backslash."""
    if not text.startswith("["):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # syntax that later Python versions may change
            holds = re.compile(text).fullmatch
    except re.error:
        return f"[{text}&&[^\\x01]]"
    is_safe = not holds("\x01") or (holds('"') and holds("\\"))
    return text if is_safe else f"[{text}&&[^\\x01]]"
