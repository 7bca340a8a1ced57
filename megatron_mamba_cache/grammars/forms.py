"""Grammars as text, which travels with a request: JSON schemas, expressions, choices, and what may come before them.

The text is a JSON object as llguidance reads it: grammars in its dialect of Lark, or JSON schemas. The first is
the start and names others with `@`. Special tokens have no text of their own and are written by id.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .schema_words import without_notes

Schema = Mapping[str, Any] | bool
SpecialId = Callable[[str], int | None]
"""Returns the id of a special token by its text; None if the text is not one."""

_WHITE_SPACE = r"( |\n {0,16})?"
"""Between JSON tokens: nothing, a space, or a line break and its indentation."""
_GAP = "/[ \\n]{0,4}/"
_ANY = r"(.|\n)*"
_OPENING = r"""`'"\u2018\u201a\u201c\u201e\u2039\u00ab\u3008\u300a\u300c\u300e\u3010\uff08\uff3b\uff5b(\[{<"""
_SENTENCE_END = r"[.!?\u2026\u3002\uff01\uff1f][ \t]"
_MARKUP = re.compile(r"<[^<>\s]+>|<\|[^<>]+\|>")
GUIDANCE = "x-guidance"
"""The key by which llguidance takes settings out of a schema."""
PLACE = "place"
"""The key of a part under which its place in the request is kept; it is not llguidance's."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A rule's right-hand side and the named parts that it refers to.

    Args:
        rule: In llguidance's dialect of Lark.
        rules: Further rules, by name.
        parts: Grammars that rules name with `@`, by name.
    """

    rule: str
    rules: Mapping[str, str] | None = None
    parts: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The grammar as it travels."""
        lines = [f"start: {self.rule}", *(f"{name}: {rule}" for name, rule in (self.rules or {}).items())]
        parts = [{"name": name, **part} for name, part in (self.parts or {}).items()]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]}, ensure_ascii=False)


def json_grammar(schema: Schema, name: str = "answer", place: str = "") -> Grammar:
    """Return the grammar of the JSON texts that a schema allows, with bounded white space between their tokens.

    Args:
        place: Where the schema is in the request, for errors.
    """
    whole = without_notes(schema) if isinstance(schema, Mapping) else {}
    if schema is False:
        whole = {"not": {}}
    part: dict[str, Any] = {"json_schema": {**whole, GUIDANCE: {"whitespace_pattern": _WHITE_SPACE}}}
    return Grammar(f"@{name}", parts={name: {**part, PLACE: place} if place else part})


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of the texts that an expression matches whole."""
    return Grammar(matching(pattern))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return the grammar of some texts."""
    return Grammar(" | ".join(map(quoted, choices)))


def lark_grammar(source: str) -> Grammar:
    """Return a grammar in llguidance's dialect of Lark, which begins with the rule `start`."""
    return Grammar("@answer", parts={"answer": {"lark_grammar": source}})


def any_of(*grammars: Grammar) -> Grammar:
    """Return the grammar of what any of the grammars allows; their names are distinct."""
    return _joined([f"({grammar.rule})" for grammar in grammars], grammars, " | ")


def sequence(*grammars: Grammar) -> Grammar:
    """Return the grammar of texts one after another; names are distinct."""
    return _joined([f"({grammar.rule})" for grammar in grammars], grammars, " ")


def after_reasoning(grammar: Grammar, opening: str, closing: str, special_id: SpecialId, *, is_open: bool) -> Grammar:
    """Return a grammar whose text comes after free text between markers.

    Args:
        is_open: Whether the reply begins inside of the free text; else it may begin with it.
    """
    closing_id = special_id(closing)
    if closing_id is None:
        thinking, rules = "thoughts", {"thoughts[lazy]": f"/{_closed(closing)}/"}
    else:
        thinking, rules = f"THOUGHTS <[{closing_id}]>", {"THOUGHTS": f"/{_ANY}/ & {without(closing)}"}
    before = f"{thinking} {_GAP}" if is_open else f"({literal(opening, special_id)} {thinking} {_GAP})?"
    return replace(grammar, rule=f"{before} ({grammar.rule})", rules={**rules, **(grammar.rules or {})})


def literal(text: str, special_id: SpecialId) -> str:
    """Return a rule that matches a text in which special tokens stand for themselves."""
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
    """Return a rule that matches any text without some texts in it."""
    return f"~/{_ANY}({'|'.join(map(escaped, texts))}){_ANY}/"


def escaped(text: str) -> str:
    """Return the expression of a text."""
    return _escaped_slashes(re.escape(text))


def quoted(text: str) -> str:
    """Return a rule that matches a text."""
    return json.dumps(text, ensure_ascii=False)


def matching(pattern: str) -> str:
    """Return a rule that matches what an expression matches whole."""
    return f"/{_escaped_slashes(pattern)}/"


def _closed(closing: str) -> str:
    """Return the expression of text up to a closing marker that is not just mentioned, as a reply's parser reads it.

    The marker begins or ends its line, or comes after a word or, if it is a tag, after the space after a sentence.
    """
    close, is_tag = escaped(closing), closing.startswith("<")
    word = rf"[^{_OPENING}\s\x1c-\x1f]|{_SENTENCE_END}" if is_tag else f"[^{_OPENING}]"
    return rf"((({_ANY}\n)?[ \t]*|{_ANY}({word})){close}|{_ANY}{close}[ \t\r]*\n)"


def _joined(rules: Sequence[str], grammars: Sequence[Grammar], by: str) -> Grammar:
    merged_rules: dict[str, str] = {}
    parts: dict[str, Mapping[str, Any]] = {}
    for grammar in grammars:
        merged_rules |= grammar.rules or {}
        parts |= grammar.parts or {}
    return Grammar(by.join(rules), merged_rules, parts)


def _escaped_slashes(pattern: str) -> str:
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern).replace("\n", r"\n")
