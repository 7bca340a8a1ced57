"""Build grammars from JSON schemas, regular expressions and choices, and serialize them as text.

The text is a JSON object in llguidance's format: a list of grammars, each in llguidance's dialect of Lark or as a JSON
schema. The first grammar has the start rule and refers to the other grammars as `@name`. Special tokens have no text,
so they are written as token ids.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .schema_words import without_notes

Schema = Mapping[str, Any] | bool
SpecialId = Callable[[str], int | None]
"""Returns the id of the special token with this text; None if there is no such token."""

_WHITE_SPACE = r"( |\n {0,16})?"
"""White space allowed between JSON tokens: none, one space, or a line break and an indentation."""
ANY = r"(.|\n)*"
"""Regular expression for any text."""
_MARKUP = re.compile(r"<[^<>\s]+>|<\|[^<>]+\|>")
GUIDANCE = "x-guidance"
"""Key in a schema under which llguidance reads its settings."""
LOCATION = "location"
"""Key under which a part of a grammar names the request field of its schema; removed before compilation."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of a reply: the definition of its start rule, and the rules and grammars to which this refers."""

    rule: str  # in llguidance's dialect of Lark
    rules: Mapping[str, str] | None = None  # other rules, by name
    parts: Mapping[str, Mapping[str, Any]] | None = None  # grammars to which rules refer with `@`, by name

    @property
    def text(self) -> str:
        """The grammar serialized as JSON text, as it is sent with a request."""
        lines = [f"start: {self.rule}", *(f"{name}: {rule}" for name, rule in (self.rules or {}).items())]
        parts = [{"name": name, **part} for name, part in (self.parts or {}).items()]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]}, ensure_ascii=False)


def json_grammar(schema: Schema, name: str = "answer", location: str = "") -> Grammar:
    """Return a grammar for JSON text that satisfies a schema, with bounded white space between tokens.

    `location` is the request field that holds the schema; error messages name it.
    """
    whole = without_notes(schema) if isinstance(schema, Mapping) else {}
    if schema is False:
        whole = {"not": {}}
    part: dict[str, Any] = {"json_schema": {**whole, GUIDANCE: {"whitespace_pattern": _WHITE_SPACE}}}
    return Grammar(f"@{name}", parts={name: {**part, LOCATION: location} if location else part})


def regex_grammar(pattern: str) -> Grammar:
    """Return a grammar for texts that fully match a regular expression."""
    return Grammar(matching(pattern))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return a grammar for exactly the given texts."""
    return Grammar(" | ".join(map(quoted, choices)))


def lark_grammar(source: str) -> Grammar:
    """Return a grammar from source text in llguidance's Lark dialect; its first rule must be `start`."""
    return Grammar("@answer", parts={"answer": {"lark_grammar": source}})


def any_of(*grammars: Grammar) -> Grammar:
    """Return the union of the grammars. Their rule names must be distinct."""
    return _joined([f"({grammar.rule})" for grammar in grammars], grammars, " | ")


def sequence(*grammars: Grammar) -> Grammar:
    """Return the concatenation of the grammars. Their rule names must be distinct."""
    return _joined([f"({grammar.rule})" for grammar in grammars], grammars, " ")


def named(name: str, grammar: Grammar) -> Grammar:
    """Return a grammar that defines `grammar` once as a named rule and refers to it."""
    return Grammar(name, {name: grammar.rule, **(grammar.rules or {})}, grammar.parts)


def literal(text: str, special_id: SpecialId) -> str:
    """Return a rule that matches a literal text; special tokens in the text are matched by token id."""
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
    """Return a rule that matches any text that contains none of the given texts."""
    return f"~/{ANY}({'|'.join(map(escaped, texts))}){ANY}/"


def escaped(text: str) -> str:
    """Return a regular expression that matches a literal text."""
    return _escaped_slashes(re.escape(text))


def quoted(text: str) -> str:
    """Return a rule that matches a literal text."""
    return json.dumps(text, ensure_ascii=False)


def matching(pattern: str) -> str:
    """Return a rule that matches a text if the whole text matches a regular expression."""
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
