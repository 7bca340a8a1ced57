"""Find the part of a JSON schema that cannot be enforced, and explain why in terms of JSON Schema."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import GrammarError
from .forms import GUIDANCE
from .held_words import Refusal
from .schema_words import (
    BRANCHES,
    at_location,
    held_by,
    list_of,
    locations_in,
    mapping_of,
    path_of,
    target_of,
    types_of,
)

Schema = dict[str, Any]
HasText = Callable[[Schema], bool]
"""Returns True if an object that satisfies a schema can have a property."""


def close_names(root: Any, has_text: HasText) -> None:
    """Replace each pattern in `patternProperties` that matches only listed properties with these properties, in place.

    If listed properties and patterns cover all names, additional properties are forbidden. `has_text` returns True if
    an object that satisfies a schema can have a property.
    """
    locations = locations_in(root)
    if not any(mapping_of(found.get("patternProperties")) for found in locations.values()):
        return
    names = _names_of_values(locations, root)
    for location, found in locations.items():
        patterns = found.get("patternProperties")
        if not isinstance(patterns, dict) or not patterns:
            continue
        known = names[id(found)]
        with at_location(location):
            for pattern in [pattern for pattern in patterns if not has_text(_only(pattern, known))]:
                _name(found, pattern, known, has_text)
            others = {
                "type": "object",
                "properties": dict.fromkeys(sorted(known), False),
                "patternProperties": dict.fromkeys(patterns, False),
            }
            if patterns and found.get("additionalProperties") is not False and not has_text(others):
                found["additionalProperties"] = False


def _only(pattern: str, names: set[str]) -> Schema:
    """Return a schema for objects whose property names match a pattern and are not in `names`."""
    return {
        "type": "object",
        "properties": dict.fromkeys(sorted(names), False),
        "patternProperties": {pattern: {"const": 0}},
        "additionalProperties": False,
    }


def _name(schema: Schema, pattern: str, names: set[str], has_text: HasText) -> None:
    """Replace a pattern in `patternProperties` with a property for each of `names` that it matches, in place."""
    value = schema["patternProperties"].pop(pattern)
    properties = schema["properties"] = mapping_of(schema.get("properties"))
    for name in sorted(names):
        if has_text(_only(pattern, names - {name})):
            properties[name] = {"allOf": [properties[name], value]} if name in properties else value


def _names_of_values(locations: dict[str, Schema], root: Any) -> dict[int, set[str]]:
    """Return the property names that each schema, or another schema for the same value, lists, by `id(schema)`."""
    leader = {id(found): id(found) for found in locations.values()}

    def find(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for found in locations.values():
        reference = found.get("$ref")
        joined = [target_of(reference, root)] if isinstance(reference, str) else []
        for inner in (*joined, *(branch for word in BRANCHES for branch in list_of(found.get(word)))):
            if isinstance(inner, dict) and id(inner) in leader:
                leader[find(id(inner))] = find(id(found))
    names: dict[int, set[str]] = {}
    for found in locations.values():
        known = names.setdefault(find(id(found)), set())
        known |= mapping_of(found.get("properties")).keys() | {str(name) for name in list_of(found.get("required"))}
    return {number: names[find(number)] for number in leader}


_MEMBER_OF_ALL = re.compile(r"\.?allOf\.\d+$")
_SCALARS = {"null", "boolean", "integer", "number", "string"}


def close_endless(root: Any) -> None:
    """Replace subschemas that only infinite values satisfy with false, in place; the root must not be one.

    Raises:
        GrammarError: If no finite value satisfies the root.
    """
    locations = list(locations_in(root).values())
    finite: set[int] = set()
    while True:
        found = {id(schema) for schema in locations if id(schema) not in finite and _has_value(schema, finite, root)}
        if not found:
            break
        finite |= found
    if id(root) not in finite:
        _refuse(root, finite)
    for schema in locations:
        for step, inner in list(held_by(schema)):
            if isinstance(inner, dict) and id(inner) not in finite:
                _replace(schema, step)


def _refuse(root: dict[str, Any], finite: set[int]) -> None:
    """Raise `GrammarError` for a schema that no finite value satisfies, with the path to the cause."""
    found: Any = root
    path, seen = "", set[int]()
    while isinstance(found, dict) and id(found) not in seen:
        seen.add(id(found))
        lacking = [(step, inner) for step, inner in _needs(found, root) if not _is_finite(inner, finite)]
        if not lacking:
            break
        step, found = lacking[0]
        path = path_of(step) if step.startswith("#") else f"{path}.{step}".lstrip(".")
    if found is False:
        path = _MEMBER_OF_ALL.sub("", path)  # `drop_empty_words` added it to rewrite `not: {}`
    with at_location(path):
        reason = "the schema of a required property allows no value" if found is False else "references never end"
        raise GrammarError(f"no JSON value matches the schema: {reason}")


def _replace(schema: dict[str, Any], step: str) -> None:
    word, _, name = step.partition(".")
    if not name:
        schema[word] = False
    elif isinstance(schema[word], list):
        schema[word][int(name)] = False
    else:
        schema[word][name] = False


def _has_value(schema: dict[str, Any], finite: set[int], root: Any) -> bool:
    """Return True if a finite value may satisfy a schema; `finite` has the ids of the schemas known to have one."""
    if not all(_is_finite(inner, finite) for _, inner in _needs(schema, root)):
        return False
    choices = [list_of(schema.get(word)) for word in ("anyOf", "oneOf")]
    return all(any(_is_finite(branch, finite) for branch in branches) for branches in choices if branches)


def _needs(schema: dict[str, Any], root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and schema of each part that must have a finite value for this schema to have one."""
    reference = schema.get("$ref")
    target = target_of(reference, root) if isinstance(reference, str) else None
    if target is not None:
        yield str(reference), target
    yield from ((f"allOf.{number}", part) for number, part in enumerate(list_of(schema.get("allOf"))))
    types = types_of(schema)
    if schema.keys() & {"enum", "const"} or types & _SCALARS or {"object", "array"} <= types:
        return
    if "object" in types:
        properties = mapping_of(schema.get("properties"))
        others = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
        names = [name for name in list_of(schema.get("required")) if isinstance(name, str)]
        yield from ((f"properties.{name}", properties.get(name, others)) for name in names)
    elif isinstance(schema.get("minItems"), int):
        items = schema.get("items", True)
        first = list_of(items) or list_of(schema.get("prefixItems"))
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        for number, item in enumerate([*first, rest][: schema["minItems"]]):
            yield f"prefixItems.{number}" if number < len(first) else "items", item


def _is_finite(schema: Any, finite: set[int]) -> bool:
    return id(schema) in finite if isinstance(schema, dict) else schema is not False


_MOST_TRIED = 100
_LONGEST = 300
_NAMING = ("required property", "required item", "prefixItems")  # phrases in errors that name a subschema
_OPTION = re.compile(r"[^.;]*(?:coerce_one_of|x-guidance)[^.;]*[.;]?")
_SENTENCES: tuple[tuple[str, str], ...] = (
    (r"Unsatisfiable schema: Regex is empty.*", "no string matches the pattern, the format and the length together"),
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
        "minProperties and maxProperties cannot be enforced here; require properties by name",
    ),
    (
        r"circular references with sibling keys.*",
        "a recursive $ref must not have other keywords next to it; move them to the schema that it refers to",
    ),
    (r"Resource '(.*?)' is not present.*", r"$ref names \1, which is not in the schema; write it under $defs"),
    (r"Pointer '(.*?)' does not exist.*", r"$ref names #\1, which is not in the schema"),
    (r"Failed to parse array index '(.*?)'.*", r"$ref names \1 in a list, which is not in the schema"),
    (r"Schema intersection stack level exceeded.*", "allOf and $ref combine too many schemas; use fewer"),
    (r"recursion limit exceeded.*", "the schema is nested too deeply: recursion limit exceeded"),
    (r"regex parse error: ?(.*)", r"the pattern is not a valid regular expression: \1"),
    (
        r"lookarounds not supported.*? in regex (.*)",
        r"the pattern \1 has `^`, `$` or a word boundary inside, which cannot be enforced; write it without them",
    ),
    (r"Failed to generate regex for (float|integer) range.*", "minimum or maximum is beyond 2**63; use a smaller one"),
    (r"Expected f64 for '(.*?)', got (.*)", r"\1 must be a number, not \2"),
    (r"Expected positive integer for '(.*?)', got (.*)", r"\1 must be an integer of 0 or more, not \2"),
    (r"Expected (\w+) for '(.*?)', got (.*)", r"\2 must be of type \1, not \3"),
)


def explained(schema: dict[str, Any], refusal: Refusal) -> None:
    """Raise `GrammarError` with the path to the subschema that llguidance cannot compile; do nothing if it can."""
    reason = refusal(schema)
    if reason is not None:
        path, reason = _deepest(schema, reason, refusal)
        with at_location(path):
            raise GrammarError(_sentence(reason))


def _deepest(root: dict[str, Any], reason: str, refusal: Refusal) -> tuple[str, str]:
    """Return the path to the innermost subschema that llguidance cannot compile, and the reason."""
    path, current = "", root
    shared = {word: root[word] for word in (GUIDANCE, "$defs", "definitions", "$id") if word in root}
    for _ in range(_MOST_TRIED):
        for step, inner in _suspects(current, root, reason):
            alone = {**shared, **inner} if isinstance(inner, dict) else {**shared, "enum": []}
            found = refusal(alone)
            if found is not None and (found == reason or any(name in reason for name in _NAMING)):
                path, current, reason = f"{path}.{step}".lstrip("."), mapping_of(inner), found
                break
        else:
            return path, reason
    return path, reason


def _suspects(schema: dict[str, Any], root: dict[str, Any], reason: str) -> Iterator[tuple[str, Any]]:
    """Yield the path step and value of each subschema that may have caused the error."""
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


def _sentence(reason: str) -> str:
    """Return an llguidance error as one sentence, without names of llguidance settings."""
    line = " ".join(reason.partition("while processing")[0].split())
    for pattern, sentence in _SENTENCES:
        found = re.match(pattern, line)
        if found is not None:
            line = found.expand(sentence)
            break
    return _OPTION.sub("", line).strip()[:_LONGEST]
