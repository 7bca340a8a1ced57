"""Rewrite `oneOf` as `anyOf` of alternatives that exclude each other, narrowing them where needed."""

from collections.abc import Iterator
from typing import Any

from ..errors import GrammarError
from .schema_words import (
    also,
    at_location,
    is_same,
    list_of,
    locations_in,
    mapping_of,
    resolved,
    type_of_value,
    types_of,
)

Schema = dict[str, Any]
_MOST_BRANCHES = 64
_DEPTH = 4
_MOST_COPIES = 8  # maximum number of passes; narrowing a oneOf may copy a oneOf nested in it
_ONE_OF = "oneOf"


def exclude_branches(root: Any) -> None:
    """Replace each `oneOf` in a JSON schema, in place, with an `anyOf` whose alternatives exclude each other.

    If two alternatives overlap, one is narrowed: it then requires a property whose allowed values differ between the
    two, or forbids a property that the other requires.

    Raises:
        GrammarError: If two alternatives overlap and neither way is possible.
    """
    for _ in range(_MOST_COPIES):
        chosen = {
            location: found for location, found in locations_in(root).items() if isinstance(found.get(_ONE_OF), list)
        }
        for location, found in reversed(chosen.items()):
            base = {word: value for word, value in found.items() if word != _ONE_OF}
            with at_location(location):
                also(found, {"anyOf": _exclusive(found[_ONE_OF], base, root)})
            del found[_ONE_OF]


def _exclusive(branches: list[Any], base: Schema, root: Any) -> list[Any]:
    if len(branches) > _MOST_BRANCHES:
        return _tagged(branches, root)
    wholes = [[base, branch] for branch in branches]
    narrowed: list[Any] = []
    for number, branch in enumerate(branches):
        for other, whole in enumerate(wholes):
            if other == number or _are_disjoint([base, branch], whole, root):
                continue
            if _is_within(branches[number], branches[other], root):
                branch = False
                break
            branch = _set_apart(branch, base, whole, root)
            if branch is None:
                raise GrammarError(
                    f"oneOf cannot be enforced: its alternatives {number} and {other} may allow the same value; write "
                    "anyOf, or require in each alternative a property with a different const"
                )
        narrowed.append(branch)
    return narrowed


def _tagged(branches: list[Any], root: Any) -> list[Any]:
    """Return copies of the alternatives that require a property whose value identifies the alternative."""
    parts = [resolved(branch, root) for branch in branches]
    for name in mapping_of(mapping_of(parts[0]).get("properties")):
        tags = [_values_of(mapping_of(mapping_of(part).get("properties")).get(name)) for part in parts]
        values = [repr(value) for tag in tags for value in tag or ()]
        if None not in tags and len(set(values)) == len(values):
            return [_with(branch, root, required=name) for branch in branches]
    raise GrammarError(
        f"oneOf has more than {_MOST_BRANCHES} alternatives; require in each a property with a different const, or "
        "write anyOf"
    )


def _set_apart(branch: Any, base: Schema, other: list[Any], root: Any) -> Any:
    """Return `branch`, narrowed so that no value satisfies both it and `other`; None if that is not possible."""
    parts, others = list(_parts([base, branch], root)), list(_parts(other, root))
    if _types(parts) & _types(others) != {"object"}:
        return None
    for name in dict.fromkeys(name for part in parts for name in mapping_of(part.get("properties"))):
        if _are_disjoint(_property(parts, name), _property(others, name), root):
            return _with(branch, root, required=name)
    required = {name for part in parts for name in list_of(part.get("required"))}
    missing = [name for part in others for name in list_of(part.get("required")) if name not in required]
    declared = mapping_of(mapping_of(resolved(branch, root)).get("properties"))
    missing.sort(key=lambda name: name in declared)
    return _with(branch, root, forbidden=missing[0]) if missing else None


def _with(branch: Any, root: Any, *, required: str | None = None, forbidden: str | None = None) -> Schema:
    """Return a copy of an alternative that additionally requires or forbids a property."""
    own = resolved(branch, root)
    own = {"allOf": [branch]} if not isinstance(own, dict) or "$ref" in own else dict(own)
    if required is not None:
        own["required"] = [*(name for name in list_of(own.get("required")) if name != required), required]
    if forbidden is not None:
        own["properties"] = {**mapping_of(own.get("properties")), forbidden: False}
    return own


def _are_disjoint(first: list[Any], second: list[Any], root: Any, depth: int = _DEPTH) -> bool:
    """Return True if it is proven that no value satisfies all schemas in both lists."""
    if depth == 0:
        return False
    firsts, seconds = list(_parts(first, root)), list(_parts(second, root))
    if any(part is False for part in first + second) or any(part.get("enum") == [] for part in firsts + seconds):
        return True
    for these, those in ((firsts, seconds), (seconds, firsts)):
        for part in these:
            for word in ("anyOf", "oneOf"):
                branches = list_of(part.get(word))
                if branches and all(_are_disjoint([branch], those, root, depth - 1) for branch in branches):
                    return True
            values = _values_of(part)
            if values is not None and not any(_may_take(those, value) for value in values):
                return True
    types = _types(firsts) & _types(seconds)
    return all(_are_apart(kind, firsts, seconds, root, depth) for kind in types)


def _are_apart(kind: str, firsts: list[Schema], seconds: list[Schema], root: Any, depth: int) -> bool:
    """Return True if it is proven that no value of type `kind` satisfies all schemas in both lists."""
    if kind == "object":
        names = sorted({name for part in firsts + seconds for name in list_of(part.get("required"))})
        return any(_are_disjoint(_property(firsts, name), _property(seconds, name), root, depth - 1) for name in names)
    words = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}.get(kind)
    if kind in ("integer", "number"):
        words = ("minimum", "maximum")
    if words is None:
        return False
    least, most = words
    for these, those in ((firsts, seconds), (seconds, firsts)):
        low = [part[least] for part in these if isinstance(part.get(least), int | float)]
        high = [part[most] for part in those if isinstance(part.get(most), int | float)]
        if low and high and max(low) > min(high):
            return True
    if kind != "array":
        return False
    num_items = max((part.get("minItems", 0) for part in firsts + seconds), default=0)
    pairs = ((_item(firsts, location), _item(seconds, location)) for location in range(min(num_items, 8)))
    return any(_are_disjoint(one, other, root, depth - 1) for one, other in pairs)


def _is_within(branch: Any, other: Any, root: Any) -> bool:
    """Return True if it is proven that every value that satisfies `branch` satisfies `other`."""
    branch, other = resolved(branch, root), resolved(other, root)
    if branch is False or other is True or not isinstance(other, dict) or not isinstance(branch, dict):
        return branch is False or other is True
    values = _values_of(branch)
    if other.keys() <= {"type"}:
        kinds = types_of(branch) if values is None else {type_of_value(value) for value in values}
        return kinds <= types_of(other)
    if other.keys() - {"type", "properties", "required"} - {w for w in other if is_same(other[w], branch.get(w))}:
        return False
    properties = mapping_of(branch.get("properties"))
    return (
        types_of(branch) <= types_of(other)
        and set(list_of(other.get("required"))) <= set(list_of(branch.get("required")))
        and all(is_same(value, properties.get(name)) for name, value in mapping_of(other.get("properties")).items())
    )


def _parts(schemas: list[Any], root: Any) -> Iterator[Schema]:
    """Yield all schemas that a value must satisfy: `schemas`, their references' targets and `allOf` members."""
    waiting = list(schemas)
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        target = resolved({"$ref": found["$ref"]}, root) if isinstance(found, dict) and "$ref" in found else None
        if isinstance(found, dict) and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [target, *list_of(found.get("allOf"))]


def _types(parts: list[Schema]) -> set[str]:
    types = {"null", "boolean", "integer", "number", "string", "array", "object"}
    for part in parts:
        types &= types_of(part)
        values = _values_of(part)
        if values is not None:
            types &= {type_of_value(value) for value in values}
    return types


def _values_of(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _may_take(parts: list[Schema], value: Any) -> bool:
    """Return False if it is proven that one of the schemas forbids `value`, otherwise True."""
    for part in parts:
        values = _values_of(part)
        if type_of_value(value) not in types_of(part):
            return False
        if values is not None and not any(is_same(value, other) for other in values):
            return False
    return True


def _property(parts: list[Schema], name: str) -> list[Any]:
    """Return the schemas that apply to the property `name`."""
    found: list[Any] = []
    for part in parts:
        properties = mapping_of(part.get("properties"))
        if name in properties:
            found.append(properties[name])
        elif not part.get("patternProperties") and "additionalProperties" in part:
            found.append(part["additionalProperties"])
    return found


def _item(parts: list[Schema], location: int) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        prefix = part.get("prefixItems", part.get("items"))
        prefix = prefix if isinstance(prefix, list) else []
        rest = part.get("items", True) if not isinstance(part.get("items"), list) else part.get("additionalItems", True)
        found.append(prefix[location] if location < len(prefix) else rest)
    return found
