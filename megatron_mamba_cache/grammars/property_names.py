"""Names of properties by patterns: where no name is left for a pattern, a reply that goes on to it cannot go on."""

from collections.abc import Callable
from typing import Any

from .schema_words import BRANCHES, at_location, list_of, locations_in, mapping_of, target_of

Schema = dict[str, Any]
HasText = Callable[[Schema], bool]
"""Returns whether any text is of a schema of an object."""


def close_names(root: Any, has_text: HasText) -> None:
    """Write patterns that match only names of properties as those properties, in place.

    Other properties are not allowed where patterns match all names.

    Args:
        has_text: Returns whether the reply `{` may go on with a name.
    """
    places = locations_in(root)
    if not any(mapping_of(found.get("patternProperties")) for found in places.values()):
        return
    names = _names_of_values(places, root)
    for place, found in places.items():
        patterns = found.get("patternProperties")
        if not isinstance(patterns, dict) or not patterns:
            continue
        known = names[id(found)]
        with at_location(place):
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
    """Return a schema of objects with names that match a pattern and are none of some."""
    return {
        "type": "object",
        "properties": dict.fromkeys(sorted(names), False),
        "patternProperties": {pattern: {"const": 0}},
        "additionalProperties": False,
    }


def _name(schema: Schema, pattern: str, names: set[str], has_text: HasText) -> None:
    """Replace a pattern by the names that it matches."""
    value = schema["patternProperties"].pop(pattern)
    properties = schema["properties"] = mapping_of(schema.get("properties"))
    for name in sorted(names):
        if has_text(_only(pattern, names - {name})):
            properties[name] = {"allOf": [properties[name], value]} if name in properties else value


def _names_of_values(places: dict[str, Schema], root: Any) -> dict[int, set[str]]:
    """Return the names of properties that are known of the values of each schema, of all that hold for them."""
    leader = {id(found): id(found) for found in places.values()}

    def find(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for found in places.values():
        reference = found.get("$ref")
        joined = [target_of(reference, root)] if isinstance(reference, str) else []
        for inner in (*joined, *(branch for word in BRANCHES for branch in list_of(found.get(word)))):
            if isinstance(inner, dict) and id(inner) in leader:
                leader[find(id(inner))] = find(id(found))
    names: dict[int, set[str]] = {}
    for found in places.values():
        known = names.setdefault(find(id(found)), set())
        known |= mapping_of(found.get("properties")).keys() | {str(name) for name in list_of(found.get("required"))}
    return {number: names[find(number)] for number in leader}
