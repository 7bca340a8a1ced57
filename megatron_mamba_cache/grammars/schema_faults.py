"""Reasons why a JSON schema cannot be held to, in the words of JSON Schema, with the place that they are about."""

import re
from collections.abc import Iterator
from typing import Any

from ..errors import GrammarError
from .forms import GUIDANCE
from .held_words import Fault
from .schema_words import at_location, held_by, mapping_of

_MOST_TRIED = 100
_LONGEST = 300
_OPTION = re.compile(r"[^.;]*(?:coerce_one_of|x-guidance)[^.;]*[.;]?")
_SENTENCES: tuple[tuple[str, str], ...] = (
    (r"Unsatisfiable schema: Regex is empty.*", "no string is of the pattern, the format and the length together"),
    (r"Unsatisfiable schema: required property '(.*)' is unsat.*", r"no value is allowed for \1, which is required"),
    (r"Unsatisfiable schema: (?:anyOf|oneOf) is empty", "no value is allowed: no alternative or enum value is left"),
    (r"Unsatisfiable schema: schema is false", "no value is allowed"),
    (r"Unsatisfiable schema: incompatible types", "no value is allowed: its types exclude each other"),
    (r"Unsatisfiable schema: (.*)", r"no value is allowed: \1"),
    (
        r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint",
        r"patternProperties \1 and \2 may match the same name; make them exclude each other",
    ),
    (
        r"min/maxProperties only supported.*",
        "minProperties and maxProperties cannot be held to here; require properties by name",
    ),
    (
        r"circular references with sibling keys.*",
        "a $ref that leads back to itself has other words next to it; write them where it leads",
    ),
    (r"Resource '(.*?)' is not present.*", r"$ref names \1, which is not in the schema; write it under $defs"),
    (r"Pointer '(.*?)' does not exist.*", r"$ref names #\1, which is not in the schema"),
    (r"Failed to parse array index '(.*?)'.*", r"$ref names \1 in a list, which is not in the schema"),
    (r"Schema intersection stack level exceeded.*", "allOf and $ref combine too many schemas; write fewer"),
    (r"recursion limit exceeded.*", "the schema is nested too deeply: recursion limit exceeded"),
    (r"regex parse error: ?(.*)", r"the pattern cannot be read: \1"),
    (
        r"lookarounds not supported.*? in regex (.*)",
        r"the pattern \1 has `^`, `$` or the end of a word inside of it, which cannot be held to; write it without",
    ),
    (r"Failed to generate regex for (float|integer) range.*", "minimum or maximum is beyond 2**63; use one within it"),
    (r"Expected f64 for '(.*?)', got (.*)", r"\1 has to be a number, not \2"),
    (r"Expected positive integer for '(.*?)', got (.*)", r"\1 has to be an integer of 0 or more, not \2"),
    (r"Expected (\w+) for '(.*?)', got (.*)", r"\2 has to be of type \1, not \3"),
)


def explained(schema: dict[str, Any], fault: Fault) -> None:
    """Raise a `GrammarError` for a schema that llguidance cannot follow, with the path to what it cannot.

    Args:
        schema: As it is handed to llguidance.
    """
    reason = fault(schema)
    if reason is not None:
        path, reason = _deepest(schema, reason, fault)
        with at_location(path):
            raise GrammarError(_sentence(reason))


def _deepest(root: dict[str, Any], reason: str, fault: Fault) -> tuple[str, str]:
    """Return the path of the innermost schema that has the fault, and its reason there."""
    path, current = "", root
    shared = {word: root[word] for word in (GUIDANCE, "$defs", "definitions", "$id") if word in root}
    for _ in range(_MOST_TRIED):
        for step, inner in _suspects(current, root, reason):
            alone = {**shared, **inner} if isinstance(inner, dict) else {**shared, "enum": []}
            found = fault(alone)
            if found is not None and (found == reason or _is_named(reason)):
                path, current, reason = f"{path}.{step}".lstrip("."), mapping_of(inner), found
                break
        else:
            return path, reason
    return path, reason


def _suspects(schema: dict[str, Any], root: dict[str, Any], reason: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in one that its fault may come from."""
    named = re.search(r"required property '(.*)' is unsatisfiable", reason)
    if named is not None:
        properties = mapping_of(schema.get("properties"))
        if named[1] in properties:
            yield f"properties.{named[1]}", properties[named[1]]
        return
    reference = schema.get("$ref")
    match = re.fullmatch(r"#/(\$defs|definitions)/([^/%~]+)", reference) if isinstance(reference, str) else None
    if match is not None:
        yield f"{match[1]}.{match[2]}", mapping_of(root.get(match[1])).get(match[2])
    for step, inner in list(held_by(schema))[:_MOST_TRIED]:
        if not (schema is root and step.startswith(("$defs", "definitions"))):
            yield step, inner


def _is_named(reason: str) -> bool:
    return "required property" in reason or "required item" in reason or "prefixItems" in reason


def _sentence(reason: str) -> str:
    """Return a reason in one line, without names of settings."""
    line = " ".join(reason.partition("while processing")[0].split())
    for pattern, sentence in _SENTENCES:
        found = re.match(pattern, line)
        if found is not None:
            line = found.expand(sentence)
            break
    return _OPTION.sub("", line).strip()[:_LONGEST]
