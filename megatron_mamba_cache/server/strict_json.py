"""Read and write JSON that every client can parse: finite numbers and valid Unicode."""

import json
import math
import re
import sys
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def strict_value(text: str, *, allows_controls: bool = False) -> Any:
    """Parse JSON; replace each lone surrogate with U+FFFD.

    If `allows_controls`, strings may contain unescaped control characters, such as line breaks.

    Raises:
        ValueError: If the text is not JSON, contains a number that is not finite, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, strict=not allows_controls)
        return json.loads(strict_text(value)) if "\\u" in text else value
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def strict_text(value: Any) -> str:
    """Serialize a value as JSON, with U+FFFD for each lone surrogate; raise `ValueError` for NaN or Infinity."""
    return _SURROGATE.sub(_REPLACEMENT, json.dumps(value, ensure_ascii=False, allow_nan=False))


def error_of(value: Any) -> str | None:
    """Return why some JSON parsers would refuse a value, such as "is nested too deeply"; None if all accept it."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "has text that is not valid Unicode"
    except ValueError:
        return "has a number that is not finite"
    except RecursionError:
        return "is nested too deeply"
    return None


def strict_scalar(text: str) -> str:
    """Return a JSON number or literal unchanged; return NaN, Infinity or an overflowing number as a string."""
    try:
        return text if math.isfinite(float(text)) else json.dumps(text)
    except ValueError:
        return text


def nearest_number(text: str) -> str:
    """Return a JSON number or literal; clamp a number beyond the float64 range to the largest finite number."""
    try:
        number = float(text)
    except ValueError:
        return text
    if math.isfinite(number):
        return text
    largest = math.copysign(sys.float_info.max, number)
    return repr(largest) if {*text} & {*".eE"} else str(int(largest))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
