"""Random JSON schemas with short values: nested, with enums, patterns, references and bounds."""

from collections.abc import Callable
from random import Random
from typing import Any

_NAMES = ("id", "name", "größe", "a b", 'quo"te', "kind", "x-y", "items", "$val", "日本")
_PATTERNS = ("^[a-c]{1,3}$", "^(?:yes|no)$", "^[0-9]{2}-[A-Z]$", "^x+y?$", r"^\d{1,4}$", "^[^ab]{1,2}$", '^[^"]{1,2}$')
_CONSTANTS = ("a", "", "the\nend", 'say "x"', 3, -7, 0.5, True, False, None, [1, "b"], {"k": [None]})
_FORMATS = ("date", "uuid", "ipv4")
_DEPTH = 3


def random_schema(random: Random) -> dict[str, Any]:
    """Return a schema for JSON values of a random type, with at most a few hundred bytes."""
    made = _SchemaMaker(random)
    schema = made.schema(_DEPTH)
    return {**schema, "$defs": made.definitions} if made.definitions else schema


class _SchemaMaker:
    def __init__(self, random: Random) -> None:
        self._random = random
        self.definitions: dict[str, Any] = {}

    def schema(self, depth: int) -> dict[str, Any]:
        scalars: list[Callable[[], dict[str, Any]]] = [
            self._text, self._integer, self._number, self._enum, self._constant, self._boolean,
        ]  # fmt: skip
        if depth == 0:
            return self._random.choice(scalars)()
        nested = [self._object, self._object, self._array, self._any_of, self._reference]
        if self._random.random() < 0.4:
            return self._random.choice(scalars)()
        return self._random.choice(nested)(depth - 1)

    def _text(self) -> dict[str, Any]:
        kind = self._random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._random.choice(_FORMATS)}
        least = self._random.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randrange(6)}

    def _integer(self) -> dict[str, Any]:
        low = self._random.randrange(-1000, 1000)
        bounds = {"minimum": low, "maximum": low + self._random.choice([0, 1, 9, 250])}
        if self._random.random() < 0.3:
            bounds = {"exclusiveMinimum": low - 1, "exclusiveMaximum": low + 12}
        elif self._random.random() < 0.1:
            low = self._random.randrange(-(2**62), 2**62)
            bounds = {"minimum": low, "exclusiveMaximum": low + 4096}  # there are float64 values between the bounds
        return {"type": "integer", **bounds}

    def _number(self) -> dict[str, Any]:
        low = self._random.randrange(-100, 100) / 4
        return {
            "type": "number",
            "minimum": low,
            "maximum": low + self._random.choice([0.5, 2, 30]),
            "multipleOf": 0.25,
        }

    def _enum(self) -> dict[str, Any]:
        return {"enum": self._random.sample(_CONSTANTS, self._random.randrange(1, 5))}

    def _constant(self) -> dict[str, Any]:
        return {"const": self._random.choice(_CONSTANTS)}

    def _boolean(self) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"]])}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.randrange(4))
        required = [name for name in names if self._random.random() < 0.6]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema(depth) for name in names},
            "additionalProperties": False,
        }
        return {**schema, "required": required} if required else schema

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randrange(3)
        schema: dict[str, Any] = {"type": "array", "items": self.schema(depth)}
        if self._random.random() < 0.25:
            prefix = [self.schema(0) for _ in range(self._random.randrange(1, 3))]
            return {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)}
        return {**schema, "minItems": least, "maxItems": least + self._random.randrange(3)}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth) for _ in range(self._random.randrange(1, 4))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        """Return a reference to a definition that finite values satisfy."""
        if not self.definitions or (len(self.definitions) < 3 and self._random.random() < 0.5):
            made = self.schema(depth)
            self.definitions[f"d{len(self.definitions)}"] = made
        name = self._random.choice(list(self.definitions))
        return {"$ref": f"#/$defs/{name}"}
