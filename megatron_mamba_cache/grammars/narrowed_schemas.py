"""Narrow JSON schemas where llguidance does not enforce a limit exactly, so that it never allows an invalid value.

If a schema cannot be narrowed, `GrammarError` is raised.
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
"""Integers up to this magnitude are exact in float64, which llguidance uses."""
_LARGEST_INTEGER = 2**63 - 1024  # exact in float64; llguidance stores bounds as 64-bit integers, even for type number
_WORDS_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_CODED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
"""Characters that JSON can write only as `\\u` escapes."""
_NO_CODES = 'nrbtf\\"'
"""Characters after the backslash in JSON escapes, except `u`."""


def narrow(schema: Any) -> None:
    """Narrow a JSON schema in place.

    - Integer bounds beyond 2**53 are moved inward to the next float64, and all bounds are clamped to 2**63.
    - U+0001 is removed from character classes that lack the quote or the backslash, because llguidance treats a class
      with all control characters as the class of all characters that JSON escapes.

    Raises:
        GrammarError: If a constant beyond 2**53 is not exact in float64, or if a schema limits the number of properties
            without listing their names, because a reply may repeat a name.
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
    """Remove constants that need `\\u` escapes, in place, if `guidance_for` forbids these escapes.

    `has_text` returns True if any text satisfies a string schema.

    Raises:
        GrammarError: If no value that a constant, an enum or a pattern allows can be written without `\\u` escapes.
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
                raise GrammarError(f"every enum value has {reason}{remedy}")
            found |= {"enum": kept} if values else {}
            pattern_words = {word: found[word] for word in _WORDS_OF_STRINGS if word in found}
            if "pattern" in pattern_words and not has_text({"type": "string", **pattern_words}):
                raise GrammarError(f"the pattern allows only texts with {reason}{remedy}")


def guidance_for(schema: Any) -> dict[str, str]:
    """Return the llguidance settings for a schema.

    If an object may have unlisted property names, the settings forbid `\\u` escapes in the whole schema, because
    llguidance would not recognize a listed name that is written with escapes.
    """
    is_open = any(
        (found.get("properties") or found.get("patternProperties")) and found.get("additionalProperties") is not False
        for found in schemas_in(schema)
    )
    return {"json_allowed_escapes": _NO_CODES} if is_open else {}


def _narrow_bound(schema: dict[str, Any], word: str) -> None:
    """Replace a bound beyond 2**53 with the nearest float64 that satisfies it, and clamp all bounds to 2**63."""
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
    """Return True if both the exact value of a float64 and its shortest decimal form satisfy a bound.

    Raises:
        GrammarError: If the float64 is infinite.
    """
    if math.isinf(value):
        raise GrammarError(f"no float64 satisfies the bound {bound:.6e}")
    for written in (int(value), int(Decimal(repr(value)))):
        gap = bound - written if inward < 0 else written - bound
        if gap < int(is_exclusive):
            return False
    return True


def _check_constants(schema: dict[str, Any]) -> None:
    for word in ("const", "enum"):
        for value in values_in(schema.get(word)):
            if isinstance(value, int) and abs(value) > _MOST_EXACT and _float_of(value, word) != value:
                raise GrammarError(f"{word} holds {value}, beyond 2**53, which float64 cannot represent exactly")


def _narrow_count(schema: dict[str, Any]) -> None:
    """Remove `minProperties` if enough properties are required by name; if one is missing, require any optional one."""
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
        raise GrammarError(f"{word} holds an integer of more than 308 digits, too large for float64") from error


def _narrowed_pattern(pattern: str) -> str:
    return CLASS.sub(lambda found: _narrowed_class(found[0]), pattern)


def _narrowed_class(text: str) -> str:
    """Return a character class without U+0001, or unchanged if it contains both the quote and the backslash."""
    if not text.startswith("["):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about syntax that may change its meaning
            holds = re.compile(text).fullmatch
    except re.error:
        return f"[{text}&&[^\\x01]]"
    is_safe = not holds("\x01") or (holds('"') and holds("\\"))
    return text if is_safe else f"[{text}&&[^\\x01]]"
