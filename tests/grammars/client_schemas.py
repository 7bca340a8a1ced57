"""Random JSON schemas in the style of clients: MCP tool servers, zod 3 and zod 4, with our own names and texts."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tests.grammars.pydantic_schemas import random_model

Schema = dict[str, Any]
DRAFT_7, DRAFT_2020 = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"
NAMES = (
    "path", "query", "limit", "offset", "owner", "labels", "state", "sort_by", "isDraft", "page-size", "body", "$top",
    "startDate", "filters", "columns", "channel", "thread_ts", "metadata", "größe", "x-trace", "recipients", "timeout",
)  # fmt: skip
WORDS = ("open", "closed", "all", "asc", "desc", "low", "high", "draft", "none", "user", "Übersicht", "a b", 'say "x"')
_SLUG = r"^[a-z0-9]+(?:-[a-z0-9]+)*$"
_ZOD_UUID = (
    r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    r"|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
_ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_ZOD_DATE = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])"
    r"-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
_ZOD_TIME = r"(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?"
_ZOD_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
_ZOD_BASE64 = r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"
_ZOD_EMOJI = r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$"
_DEPTH = 3

Writer = Callable[[Random, int], Schema]


def mcp_schema(random: Random) -> Schema:
    """Return a random `inputSchema` of an MCP tool."""
    if random.random() < 0.05:
        return {"type": "object", "properties": {}}
    schema = _object(random, _DEPTH, _MCP)
    if random.random() < 0.6 or '"items": [' in json.dumps(schema):
        schema["$schema"] = DRAFT_7
    if random.random() < 0.15:
        node = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/definitions/Node"}, "maxItems": 3}
        schema |= {"definitions": {"Node": node}}
        schema["properties"]["tree"] = {"$ref": "#/definitions/Node", "description": "The tree to write"}
    if random.random() < 0.1:
        first, second = random.sample(NAMES, 2)
        schema["properties"] |= {first: {"type": "integer"}, second: {"type": "boolean"}}
        schema["required"] = [name for name in schema.get("required", []) if name not in (first, second)]
        word = random.choice(["anyOf", "oneOf"])
        schema[word] = [{"required": [first]}, {"required": [second]}]
    return schema


def zod_3_schema(random: Random) -> Schema:
    """Return a random object schema as zod-to-json-schema generates it from zod 3."""
    return {**_object(random, _DEPTH, _ZOD_3, is_closed=True), "$schema": DRAFT_7}


def zod_4_schema(random: Random) -> Schema:
    """Return a random schema as `z.toJSONSchema` of zod 4 generates it."""
    schema = {"$schema": DRAFT_2020, **_object(random, _DEPTH, _ZOD_4, is_closed=True)}
    if random.random() < 0.2:
        lazy = {"type": "object", "properties": {"id": {"type": "string"}}, "additionalProperties": False}
        lazy["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/__schema0"}, {"type": "null"}]}
        schema["$defs"] = {"__schema0": {**lazy, "required": ["id", "next"]}}
        schema["properties"]["list"] = {"$ref": "#/$defs/__schema0"}
    elif random.random() < 0.1:
        schema["properties"]["again"] = {"type": "array", "items": {"$ref": "#"}}
    return schema


def _object(random: Random, depth: int, writers: tuple[Writer, ...], *, is_closed: bool = False) -> Schema:
    most = {_DEPTH: 12, 2: 5}.get(depth, 3)
    names = random.sample(NAMES, random.randint(1, most))
    schema: Schema = {"type": "object", "properties": {name: _value(random, depth - 1, writers) for name in names}}
    required = [name for name in names if random.random() < 0.5]
    if required:
        schema["required"] = required
    if is_closed or random.random() < 0.4:
        schema["additionalProperties"] = random.choice([False, False, False, {}]) if is_closed else False
    return schema


def _value(random: Random, depth: int, writers: tuple[Writer, ...]) -> Schema:
    schema = random.choice(writers if depth > 0 else _SCALARS[writers])(random, depth)
    if random.random() < 0.5:
        schema["description"] = f"The {random.choice(NAMES)} to use. One of many; see the {random.choice(WORDS)} page."
    return schema


def _words(random: Random) -> list[str]:
    return random.sample(WORDS, random.randint(1, 6))


def _bounded(random: Random, kind: str) -> Schema:
    low = random.randint(-5, 100)
    bounds: list[Schema] = [
        {"minimum": low, "maximum": low + random.randint(0, 500)},
        {"exclusiveMinimum": 0},
        {"minimum": 1, "maximum": 100, "default": 30},
        {"multipleOf": 5},
    ]
    return {"type": kind, **random.choice(bounds)}


def _text(random: Random, _depth: int) -> Schema:
    kinds: list[Schema] = [
        {"type": "string"},
        {"type": "string", "title": "Name", "default": "x"},
        {"type": "string", "minLength": 1, "maxLength": random.randint(4, 60)},
        {"type": "string", "examples": ["a/b"], "minLength": 1},
        {"type": "string", "pattern": random.choice([_SLUG, r"^#?[0-9a-fA-F]{6}$", r"^[A-Z]{2,5}-\d{1,6}$", r"\S"])},
        {"type": "string", "format": random.choice(["date-time", "uri", "email", "uuid", "date", "int64", "binary"])},
    ]
    return random.choice(kinds)


def _mcp_union(random: Random, depth: int) -> Schema:
    tags = random.sample(WORDS, 2)
    tagged = [{"type": "object", "properties": {"type": {"const": tag}}, "required": ["type"]} for tag in tags]
    kinds: list[Schema] = [
        {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]},
        {"oneOf": tagged},
        {"anyOf": [_value(random, depth - 1, _MCP), {"type": "null"}], "default": None},
        {"type": ["string", "number", "boolean", "null"]},
        {"oneOf": [_object(random, 1, _MCP, is_closed=True), {"type": "integer"}]},
    ]
    return random.choice(kinds)


def _array(random: Random, depth: int, writers: tuple[Writer, ...]) -> Schema:
    least = random.choice([None, None, 0, 1, 2])
    schema: Schema = {"type": "array", "items": _value(random, depth - 1, writers)}
    return schema if least is None else {**schema, "minItems": least, "maxItems": least + random.randint(0, 4)}


_MCP_SCALARS: tuple[Writer, ...] = (
    _text,
    _text,
    lambda random, _: {"type": "string", "enum": _words(random)},
    lambda random, _: _bounded(random, "integer"),
    lambda random, _: _bounded(random, "number"),
    lambda random, _: {"type": "boolean", "default": random.random() < 0.5},
    lambda random, _: {"type": "string", "nullable": True},
    lambda random, _: {"type": "string", "enum": [f"region-{number:03}" for number in range(random.randint(50, 300))]},
)
_MCP: tuple[Writer, ...] = (
    *_MCP_SCALARS,
    lambda random, depth: _object(random, depth, _MCP),
    lambda random, depth: _array(random, depth, _MCP),
    lambda random, depth: {"type": "object", "additionalProperties": _value(random, depth - 1, _MCP)},
    _mcp_union,
    lambda random, _: {"type": "array", "items": {"enum": WORDS[: random.randint(1, 5)]}, "uniqueItems": True},
    lambda random, _: {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "properties": {}},
    lambda random, _: {
        "type": "object",
        "properties": {"x-id": {"type": "integer"}},
        "patternProperties": {random.choice(["^x-", "^x-id$", "^.*$"]): {"minimum": 3}},
        "additionalProperties": False,
    },
    lambda random, _: {"type": "object"},
    lambda random, _: {"description": "Anything"},
    lambda random, _: {"type": "array", "items": [{"type": "number"}] * 2, "minItems": 2, "maxItems": 2},
)
_ZOD_3_SCALARS: tuple[Writer, ...] = (
    lambda random, _: {"type": "string", "enum": _words(random)},
    lambda random, _: {"type": random.choice(["string", "number", "integer", "boolean", "null"])},
    lambda random, _: {"type": "string", "format": random.choice(["email", "uri", "uuid", "date-time", "ipv4"])},
    lambda random, _: {"type": "string", "pattern": random.choice([_ZOD_EMAIL, r"^[cC][^\s-]{8,}$", _ZOD_BASE64])},
    lambda random, _: {"type": ["string", "number"], "enum": ["a", 1, "b", 2]},
    lambda random, _: {"type": random.choice(["integer", "number"]), "exclusiveMinimum": 0, "maximum": 99},
    lambda random, _: {"type": ["string", "null"]},
    lambda random, _: {"type": "string", "const": random.choice(WORDS)},
    lambda random, _: {"type": "string", "minLength": 2, "maxLength": 9, "default": "abc"},
    lambda random, _: {"type": "integer", "format": "int64"},
)
_ZOD_3: tuple[Writer, ...] = (
    *_ZOD_3_SCALARS,
    lambda random, depth: _object(random, depth, _ZOD_3, is_closed=True),
    lambda random, depth: _array(random, depth, _ZOD_3),
    lambda random, depth: {"anyOf": [_value(random, depth - 1, _ZOD_3) for _ in range(random.randint(2, 4))]},
    lambda random, depth: {"anyOf": [{"not": {}}, _value(random, depth - 1, _ZOD_3)]},
    lambda random, depth: {"type": "object", "additionalProperties": _value(random, depth - 1, _ZOD_3)},
    lambda random, depth: {
        "type": "object",
        "additionalProperties": _value(random, depth - 1, _ZOD_3),
        "propertyNames": {"enum": _words(random)},
    },
    lambda random, _: {"type": "array", "uniqueItems": True, "items": random.choice(_ZOD_3_SCALARS[:3])(random, 0)},
    lambda random, depth: {
        "type": "array", "minItems": 2, "maxItems": 2,
        "items": [_value(random, depth - 1, _ZOD_3), _value(random, depth - 1, _ZOD_3)],
    },
    lambda random, depth: {
        "allOf": [
            {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
            {"type": "object", "properties": {"rank": _value(random, depth - 1, _ZOD_3)}, "required": ["rank"]},
        ]
    },
    lambda random, depth: {"anyOf": [_tagged(random, depth, tag, _ZOD_3) for tag in random.sample(WORDS, 3)]},
    lambda random, _: {},
)  # fmt: skip
_ZOD_4_SCALARS: tuple[Writer, ...] = (
    lambda random, _: {"type": "string", "enum": _words(random)},
    lambda random, _: {"type": random.choice(["string", "number", "boolean", "null"])},
    lambda random, _: {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    lambda random, _: {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**53 - 1},
    lambda random, _: {"type": "string", "format": "email", "pattern": _ZOD_EMAIL},
    lambda random, _: {"type": "string", "format": "uuid", "pattern": _ZOD_UUID},
    lambda random, _: {"type": "string", "format": "uri"},
    lambda random, _: {"type": "string", "format": "date", "pattern": f"^{_ZOD_DATE}$"},
    lambda random, _: {"type": "string", "format": "date-time", "pattern": f"^{_ZOD_DATE}T{_ZOD_TIME}(?:Z))$"},
    lambda random, _: {"type": "string", "format": "time", "pattern": f"^{_ZOD_TIME})$"},
    lambda random, _: {"type": "string", "format": "duration", "pattern": _ZOD_DURATION},
    lambda random, _: {
        "type": "string", "format": "base64", "contentEncoding": "base64", "pattern": _ZOD_BASE64, "maxLength": 40
    },
    lambda random, _: {"type": "string", "format": "emoji", "pattern": _ZOD_EMOJI},
    lambda random, _: {"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"},
    lambda random, _: {"type": "string", "allOf": [{"pattern": "^ab.*"}, {"pattern": ".*yz$"}], "maxLength": 9},
    lambda random, _: {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,12}$"},
    lambda random, _: {"type": "string", "pattern": random.choice([r"^(?!root$)[a-z]+$", r"^v\d+\.\d+$", "^a"])},
    lambda random, _: {"const": random.choice([*WORDS, 3, True])},
    lambda random, _: {"default": "x", "type": "string", "minLength": 1, "maxLength": 8},
)  # fmt: skip
_ZOD_4: tuple[Writer, ...] = (
    *_ZOD_4_SCALARS,
    lambda random, depth: _object(random, depth, _ZOD_4, is_closed=True),
    lambda random, depth: _array(random, depth, _ZOD_4),
    lambda random, depth: {"anyOf": [_value(random, depth - 1, _ZOD_4), {"type": "null"}]},
    lambda random, depth: {"oneOf": [_tagged(random, depth, tag, _ZOD_4) for tag in random.sample(WORDS, 3)]},
    lambda random, depth: {"type": "array", "prefixItems": [_value(random, depth - 1, _ZOD_4) for _ in range(2)]},
    lambda random, depth: {
        "type": "object",
        "propertyNames": random.choice([
            {"type": "string"}, {"type": "string", "enum": _words(random)}, {"type": "string", "pattern": "^[a-z]+$"},
            {"type": "string", "format": "uuid", "pattern": _ZOD_UUID}, {"type": "string", "maxLength": 9},
        ]),
        "additionalProperties": _value(random, depth - 1, _ZOD_4),
    },
    lambda random, _: {"anyOf": [{"not": {}}, {"type": "integer"}]},
    lambda random, _: {},
)  # fmt: skip


def _tagged(random: Random, depth: int, tag: str, writers: tuple[Writer, ...]) -> Schema:
    schema = _object(random, depth, writers, is_closed=True)
    schema["properties"] = {"kind": {"type": "string", "const": tag}, **schema["properties"]}
    schema["required"] = ["kind", *schema.get("required", [])]
    return schema


_SCALARS: Mapping[tuple[Writer, ...], tuple[Writer, ...]] = {
    _MCP: _MCP_SCALARS, _ZOD_3: _ZOD_3_SCALARS, _ZOD_4: _ZOD_4_SCALARS,
}  # fmt: skip

MAKERS = {
    "mcp": (mcp_schema, 100),
    "zod 3": (zod_3_schema, 50),
    "zod 4": (zod_4_schema, 50),
    "pydantic": (lambda random: random_model(random).model_json_schema(), 100),
}

REASONS = ("uniqueItems", "has lookahead or lookbehind", "oneOf", "no JSON value", "no value is allowed")
LIBRARY_WORDS = ("x-guidance", "coerce", "llguidance", "Unimplemented", "Unsatisfiable", "lookaround", "\n")
