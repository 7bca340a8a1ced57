"""Translate JSON Schema string formats and patterns for llguidance.

JSON Schema patterns are ECMA-262 regular expressions. llguidance uses the syntax of Rust's `regex` crate, which has no
look-around.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import GrammarError

CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""An escape, or a character class in brackets."""
_TOKEN = re.compile(r"\\u\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\c[A-Za-z]|\\.|\[\^?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
_CLASS_ESCAPE = re.compile(r"(-?)\\([sS])(-?)|\\u\{?[0-9a-fA-F]+\}?|\\c[A-Za-z]|\\.", re.DOTALL)
_OTHER_CLASS = re.compile(r"(?<!\\)(?:\[:\^?[a-z]+:\]?|&&(?=\[))")
"""Class syntax in Rust, POSIX and Java that ECMA-262 lacks: `[:alpha:]` and intersections."""
_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[bB]")
_AHEAD = "(?="
_FLAGS = re.compile(r"\(\?[a-z]+\)")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")
"""Opening parenthesis of a group, with its name if it has one."""
_ANYTHING = r"(.|\n)*"
_ANY_CHARACTER = r"[^\n\r\x{2028}\x{2029}]"
_EMAIL = (
    r"^[A-Za-z0-9][A-Za-z0-9_+-]{0,19}(\.[A-Za-z0-9_+-]{1,20}){0,2}@"
    r"([A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?\.){1,4}[A-Za-z]{2,24}$"
)
_ANY_EMAIL = {"format": "email", "pattern": r"^[^@]{1,64}@([^.]{1,63}\.)*[^.]{1,63}$", "maxLength": 254}
_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
_SPACES = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_VISIBLE = (
    r"\x{0}-\x{8}\x{e}-\x{1f}!-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}\x{2030}-\x{205e}"
    r"\x{2060}-\x{2fff}\x{3001}-\x{fefe}\x{ff00}-\x{10ffff}"
)
"""All characters except `_SPACES`."""
_DASH = r"\-"
_ESCAPES = {**{r"\0": r"\x00", r"\A": "^", r"\Z": "$", r"\z": "$"}, **{r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}}
"""ECMA-262 escape → its equivalent in Rust's dialect, where the two differ."""
_POINTER = "(/([^/~]|~[01])*)*"
_FORMATS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"format": name} for name in ("date", "duration", "hostname", "ipv4", "ipv6", "uri", "uuid")},
    "date-time": {"format": "date-time", "pattern": "^[^t]*T[0-9]{2}:[0-9]{2}:[0-5][^z]*$"},
    "time": {"format": "time", "pattern": "^[0-9]{2}:[0-9]{2}:[0-5][^z]*$"},
    **{name: _ANY_EMAIL for name in ("email", "idn-email")},
    **{name: {"format": "uri"} for name in ("uri-reference", "iri", "iri-reference", "uri-template")},
    "idn-hostname": {"format": "hostname"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(0|[1-9][0-9]{{0,8}})(#|{_POINTER})$"},
}
"""JSON Schema format → keywords that enforce it; they allow only texts that all validators accept."""
_EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "email": ("a@b.co", "admin@example.com", "first.last+tag@mail.example.org", "no-reply_1@x-y.example.museum"),
    "duration": ("P1D", "PT1H", "P3Y6M4DT12H30M5S", "P2W"),
    "date-time": ("2024-02-29T23:59:59Z", "1999-12-31T00:00:00.125Z"),
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("23:59:59Z", "00:00:00Z"),
    "hostname": ("example.com", "a-1.b.example", "localhost"),
    "ipv4": ("127.0.0.1", "255.255.255.0"),
    "ipv6": ("::1", "2001:db8::8a2e:370:7334"),
    "uri": ("https://example.com/a?b=c#d", "ftp://host/x"),
    "uuid": ("123e4567-e89b-42d3-a456-426614174000",),
}
_COMMON: Mapping[str, str] = {
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
    "date-time": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z$",
    "time": "^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z$",
    "email": _EMAIL,
    "hostname": "^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?([.][a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?){0,5}$",
    "ipv4": "^((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])[.]){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])$",
    "ipv6": "^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "duration": "^P([0-9]{1,4}[YMWD]|([0-9]{1,4}D)?T[0-9]{1,4}(H([0-9]{1,4}M([0-9]{1,4}S)?)?|M([0-9]{1,4}S)?|S))$",
    "uri": "^https?://[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?([.][a-z]{2,10}){1,3}(/[A-Za-z0-9_-]*)*$",
}
"""Format → regular expression for common texts in this format, used where only a regular expression is possible."""
_NO_EXAMPLES = ("", "a", "A1!", " ", "@", "a b", "-1", "admin", "Passw0rd!longer than most")


def words_of_format(name: str) -> Mapping[str, Any]:
    """Return the keywords that enforce a format; empty if JSON Schema does not define the format.

    Raises:
        GrammarError: If the format is "regex", which no regular expression describes.
    """
    if name == "regex":
        raise GrammarError('the format "regex" cannot be enforced; leave it out')
    return _FORMATS.get(name, {})


def pattern_of_properties(pattern: str) -> str:
    """Translate a pattern from `patternProperties`; raise `GrammarError` if it uses look-around."""
    if _looks_around(pattern):
        raise GrammarError(
            f"the pattern {pattern!r:.100} in patternProperties uses lookahead or lookbehind; write it without them"
        )
    return translated(pattern, ".")


def words_of_pattern(pattern: str, format_name: str | None) -> list[Mapping[str, Any]]:
    """Return keyword sets that replace a pattern; texts that satisfy all of them match the pattern.

    A look-ahead at the start becomes a separate pattern. A pattern with look-around elsewhere is replaced by a format
    whose example texts it matches: `format_name` if there are examples for it, otherwise the only such format.

    Raises:
        GrammarError: If there is no such format, or more than one.
    """
    ahead, rest = _split_ahead(pattern)
    parts = [*ahead, rest]
    if not any(map(_looks_around, parts)):
        return [{"pattern": translated(part)} for part in parts]
    known = [format_name] if format_name is not None and format_name in _EXAMPLES else list(_EXAMPLES)
    taken = [name for name in known if _takes(pattern, _EXAMPLES[name])]
    is_other = len(taken) != 1 or (len(known) > 1 and _takes(pattern, _NO_EXAMPLES, any_of_them=True))
    if is_other:
        raise GrammarError(
            f"the pattern {pattern!r:.100} has lookahead or lookbehind (`(?!`, `(?<=`, `\\b`), which cannot be "
            "enforced; write it without them, or use a format such as email instead"
        )
    (name,) = taken
    return [{"pattern": _EMAIL} if name == "email" else _FORMATS[name]]


def pattern_of_names(schema: Any) -> str:
    """Return a pattern for the property names that a schema allows; raise `GrammarError` if it cannot be derived."""
    words = schema.keys() - {"type"} if isinstance(schema, Mapping) else set()
    if words == {"pattern"} and isinstance(schema["pattern"], str):
        return str(schema["pattern"])
    if words and words <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}$"
    name = str(schema.get("format")) if words and words <= {"format", "pattern"} else ""
    is_wider = "pattern" not in words or _takes(schema["pattern"], _EXAMPLES.get(name, ()))
    if name in _COMMON and is_wider:
        return _COMMON[name]
    raise GrammarError(
        "propertyNames can only be enforced with an enum, a pattern, a length or a format; add one of them"
    )


def whole_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Return regular expressions for a schema's `pattern` and `format`; a text must match each of them as a whole.

    Raises:
        GrammarError: If the pattern or the format cannot be translated.
    """
    name, pattern = schema.get("format"), schema.get("pattern")
    words = words_of_pattern(pattern, name) if isinstance(pattern, str) else []
    format_words = words_of_format(name) if isinstance(name, str) else {}
    if format_words and (not words or _takes(str(pattern), _EXAMPLES.get(str(name), ("",)))):
        words = [*words, format_words]
    return [_whole(_COMMON[found["format"]] if "format" in found else found["pattern"]) for found in words]


def _whole(pattern: str) -> str:
    """Return an expression that matches a whole text if a pattern, anchored or not, matches anywhere in the text."""
    flags = _FLAGS.match(pattern)
    inner = pattern if flags is None else pattern[flags.end() :]
    found = f"{'' if flags is None else flags[0]}{_in_text(inner, is_start=False, is_end=False)}"
    return _TOKEN.sub(lambda token: _ascii(token[0]), f"({found})")


def _in_text(pattern: str, *, is_start: bool, is_end: bool) -> str:
    """Return an expression that matches a whole text if it contains a pattern.

    The pattern must be at the start of the text if `is_start`, and at its end if `is_end`.
    """
    branches = []
    for branch in _branches(pattern):
        is_anchored = re.search(r"(?<!\\)(\\\\)*\$$", branch) is not None
        inner = branch.removeprefix("^")
        inner = inner[:-1] if is_anchored else inner
        at_start, at_end = is_start or branch.startswith("^"), is_end or is_anchored
        group = _GROUP.match(inner)
        if group is not None and _end_of_group(inner) == len(inner):
            branches.append(_in_text(inner[group.end() : -1], is_start=at_start, is_end=at_end))
            continue
        if any(sign in CLASS.sub("", inner) for sign in "^$"):
            raise GrammarError(f"the pattern {pattern!r:.100} has `^` or `$` inside; use them only at its start or end")
        branches.append(f"{'' if at_start else _ANYTHING}({inner}){'' if at_end else _ANYTHING}")
    return f"({'|'.join(branches)})"


def _ascii(token: str) -> str:
    """Return a pattern token with `\\d` and `\\w` limited to ASCII, as in ECMA-262."""
    if token.startswith("["):
        return re.sub(r"\\.", lambda found: _ASCII.get(found[0], found[0]), token)
    return f"[{_ASCII[token]}]" if token in _ASCII else token


def translated(pattern: str, any_character: str = _ANY_CHARACTER) -> str:
    """Translate an ECMA-262 pattern to Rust's dialect, with `any_character` for each dot."""
    dot = "." if "(?s" in pattern else any_character
    return _TOKEN.sub(lambda found: dot if found[0] == "." else _translated_token(found[0]), pattern)


def _translated_token(token: str) -> str:
    if token.startswith("["):
        return _translated_class(token)
    if token.startswith("\\u"):
        return _character(int(token[2:].strip("{}"), 16))
    if token.startswith("\\c") and len(token) == 3:
        return _character(ord(token[2].upper()) - ord("@"))
    return _ESCAPES.get(token, token)


def _translated_class(text: str) -> str:
    """Translate a character class; `[`, `&&` and `~~` inside it are literal characters, as in ECMA-262.

    Raises:
        GrammarError: If the class uses syntax from another dialect, which has a different meaning in ECMA-262.
    """
    if text in ("[]", "[^]"):
        return r"[\s\S]" if text == "[^]" else r"[^\s\S]"
    other = _OTHER_CLASS.search(text)
    if other is not None:
        raise GrammarError(
            f"the pattern has {other[0]!r}, which JSON Schema reads as single characters; list the characters instead"
        )
    start = 2 if text.startswith("[^") else 1
    inner = re.sub(r"(\\.)|\[|(?<=[~&])[~&]", lambda found: found[0] if found[1] else f"\\{found[0]}", text[start:-1])
    inner = _CLASS_ESCAPE.sub(_in_class, inner)
    return f"{text[:start]}{inner}]"


def _in_class(escape: re.Match[str]) -> str:
    if escape[2] is not None:  # \\s or \\S; a `-` adjacent to it is literal
        characters = _SPACES if escape[2] == "s" else _VISIBLE
        return f"{escape[1] and _DASH}{characters}{escape[3] and _DASH}"
    return r"\x08" if escape[0] == r"\b" else _translated_token(escape[0])


def _character(code: int) -> str:
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise GrammarError(
            f"a pattern contains half of a surrogate pair, U+{code:04X}; write one code point, such as \\u{{1F600}}"
        )
    return f"\\x{{{code:x}}}"


def _split_ahead(pattern: str) -> tuple[list[str], str]:
    """Split a pattern into the patterns in the look-aheads at its start, and the rest."""
    ahead: list[str] = []
    rest = pattern.removeprefix("^")
    while pattern.startswith("^") and rest.startswith(_AHEAD):
        end = _end_of_group(rest)
        ahead.append(f"^(?:{rest[len(_AHEAD) : end - 1]})")
        rest = rest[end:]
    if not ahead or len(_branches(rest)) > 1:
        return [], pattern
    return ahead, f"^{rest}"


def _end_of_group(text: str) -> int:
    """Return the index after the closing parenthesis of the group with which `text` starts."""
    depth = 0
    for found in re.finditer(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|[()]", text, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0 and found[0] == ")":
            return found.end()
    return len(text)


def _branches(text: str) -> list[str]:
    """Split an expression at its top-level `|`."""
    depth, start, found = 0, 0, []
    for sign in re.finditer(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|[()|]", text, re.DOTALL):
        depth += {"(": 1, ")": -1}.get(sign[0], 0)
        if depth == 0 and sign[0] == "|":
            found.append(text[start : sign.start()])
            start = sign.end()
    return [*found, text[start:]]


def _looks_around(pattern: str) -> bool:
    bare = CLASS.sub(lambda found: found[0] if found[0] in (r"\b", r"\B") else "", pattern)
    return _LOOK_AROUND.search(bare) is not None


def is_found(pattern: str, text: str) -> bool:
    """Return True if a pattern matches anywhere in a text, or if Python cannot compile the pattern."""
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except re.error:
        return True


def _takes(pattern: str, texts: tuple[str, ...], any_of_them: bool = False) -> bool:
    """Return True if a pattern matches all of the texts, or at least one if `any_of_them`."""
    try:
        taken = [re.search(pattern, text) is not None for text in texts]
    except re.error:
        return False
    return any(taken) if any_of_them else all(taken)
