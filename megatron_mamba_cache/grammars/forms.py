"""Build grammars from JSON schemas, regular expressions and choices, and serialize them as text.

The text is a JSON object as llguidance reads it: grammars in its dialect of Lark, or JSON schemas. The first is the
start symbol and refers to the others with `@`. Special tokens have no text and are written by id.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .schema_words import without_notes

Schema = Mapping[str, Any] | bool
SpecialId = Callable[[str], int | None]
"""Returns the id of a special token by its text; None if the text is not one."""

_WHITE_SPACE = r"( |\n {0,16})?"
"""Between JSON tokens: nothing, a space, or a line break and its indentation."""
ANY = r"(.|\n)*"
"""The expression of any text."""
_MARKUP = re.compile(r"<[^<>\s]+>|<\|[^<>]+\|>")
GUIDANCE = "x-guidance"
"""The key by which llguidance takes settings out of a schema."""
LOCATION = "location"
"""Key of a part for its location in the request; removed before llguidance reads the grammar."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Right-hand side of a rule, with the named rules and grammars to which it refers."""

    rule: str  # in llguidance's dialect of Lark
    rules: Mapping[str, str] | None = None  # other rules, by name
    parts: Mapping[str, Mapping[str, Any]] | None = None  # grammars to which rules refer with `@`, by name

    @property
    def text(self) -> str:
        """The grammar serialized as text, as sent with a request."""
        lines = [f"start: {self.rule}", *(f"{name}: {rule}" for name, rule in (self.rules or {}).items())]
        parts = [{"name": name, **part} for name, part in (self.parts or {}).items()]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]}, ensure_ascii=False)


def json_grammar(schema: Schema, name: str = "answer", location: str = "") -> Grammar:
    """Return the grammar of JSON text that satisfies a schema, with bounded white space between tokens.

    `location` names the schema's field of the request, for error messages.
    """
    whole = without_notes(schema) if isinstance(schema, Mapping) else {}
    if schema is False:
        whole = {"not": {}}
    part: dict[str, Any] = {"json_schema": {**whole, GUIDANCE: {"whitespace_pattern": _WHITE_SPACE}}}
    return Grammar(f"@{name}", parts={name: {**part, LOCATION: location} if location else part})


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of texts that fully match a regular expression."""
    return Grammar(matching(pattern))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return the grammar that matches any of the given texts."""
    return Grammar(" | ".join(map(quoted, choices)))


def lark_grammar(source: str) -> Grammar:
    """Return a grammar from source in llguidance's Lark dialect, whose first rule is `start`."""
    return Grammar("@answer", parts={"answer": {"lark_grammar": source}})


def any_of(*grammars: Grammar) -> Grammar:
    """Return the union of grammars, whose rule names must be distinct."""
    return _joined([f"({grammar.rule})" for grammar in grammars], grammars, " | ")


def sequence(*grammars: Grammar) -> Grammar:
    """Return the concatenation of grammars, whose rule names must be distinct."""
    return _joined([f"({grammar.rule})" for grammar in grammars], grammars, " ")


def named(name: str, grammar: Grammar) -> Grammar:
    """Return the grammar as a named rule, which can be referenced several times."""
    return Grammar(name, {name: grammar.rule, **(grammar.rules or {})}, grammar.parts)


def literal(text: str, special_id: SpecialId) -> str:
    """Return a rule that matches a literal text, with special tokens matched by id."""
    found, end = [], 0
    for markup in _MARKUP.finditer(text):
        number = special_id(markup[0])
        if number is not None:
            found += [quoted(text[end : markup.start()])] if markup.start() > end else []
            found.append(f"<[{number}]>")
            end = markup.end()
    found += [quoted(text[end:])] if end < len(text) or not found else []
    return " ".join(found)


def without(*texts: str) -> str:
    """Return a rule that matches any text that does not contain the given texts."""
    return f"~/{ANY}({'|'.join(map(escaped, texts))}){ANY}/"


def escaped(text: str) -> str:
    """Return a regular expression that matches a literal text."""
    return _escaped_slashes(re.escape(text))


def quoted(text: str) -> str:
    """Return a rule that matches a literal text."""
    return json.dumps(text, ensure_ascii=False)


def matching(pattern: str) -> str:
    """Return a rule that matches texts which fully match a regular expression."""
    return f"/{_escaped_slashes(pattern)}/"


def _joined(rules: Sequence[str], grammars: Sequence[Grammar], by: str) -> Grammar:
    merged_rules: dict[str, str] = {}
    parts: dict[str, Mapping[str, Any]] = {}
    for grammar in grammars:
        merged_rules |= grammar.rules or {}
        parts |= grammar.parts or {}
    return Grammar(by.join(rules), merged_rules, parts)


def _escaped_slashes(pattern: str) -> str:
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern).replace("\n", r"\n")
