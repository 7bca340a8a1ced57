"""Unsupported request fields of OpenAI's and vLLM's APIs; their values that have no effect are accepted.

To support a field, remove its entry here and add the field to a schema. Fields that cannot change a reply are ignored
and counted. Examples are the name of a user or session, and fields that affect only speed.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, LiteralString

from pydantic_core import PydanticCustomError

logger = logging.getLogger(__name__)

_MOST_NAMES = 1000  # clients choose the names, so their number must be limited

_counts: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


def note_ignored(reason: str, names: Iterable[str]) -> None:
    """Count ignored request fields by reason and name; log each name at counts 1, 10, 100 and so on."""
    with _lock:
        counts = {}
        for name in dict.fromkeys(names):
            key = (reason, name[:100])
            if key not in _counts and len(_counts) >= _MOST_NAMES:
                key = (reason, "others")
            _counts[key] += 1
            counts[key[1]] = _counts[key]
    due = {name: count for name, count in counts.items() if str(count).strip("0") == "1"}
    if due:
        shown = ", ".join(f"{name!r} ({count:,} so far)" for name, count in due.items())
        logger.warning("ignored in requests: %s: %s", shown, reason)


REFUSED = "unsupported_field"
"""Type of the pydantic error for an unsupported field; the error's context names the field."""


def schema_error(kind: LiteralString, sentence: str, field: str | None = None) -> PydanticCustomError:
    """Return a pydantic error; `errors.schema_error` copies `sentence` to the response."""
    named = {} if field is None else {"field": field}
    return PydanticCustomError(kind, "{sentence}", {**named, "sentence": sentence})


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Rule for an unsupported field: the accepted values, which have no effect, and the error for other values."""

    neutral: tuple[Any, ...] = ()  # accepted values, in addition to null
    instead: str = ""  # remedy in the error message; "": derived from `neutral`
    items: tuple[str, ...] = ()  # accepted items of a list; (): lists are not accepted

    def takes(self, value: Any) -> bool:
        """Return True if a value is accepted."""
        if isinstance(value, list) and self.items:
            return all(item in self.items for item in value)
        return value is None or any(_is_same(value, neutral) for neutral in self.neutral)

    def refusal(self, name: str) -> str:
        """Return the error message for a refused value; `name` is the field."""
        instead = self.instead or " or ".join(
            ["leave it out", *(f"send {json.dumps(value)}" for value in self.neutral[:1])]
        )
        return f"`{name}` is not supported by this server; {instead}"

    def schema(self, name: str) -> dict[str, Any]:
        """Return the JSON schema for the field `name`, which allows only the accepted values."""
        accepted: dict[str, Any] = {"enum": [None, *self.neutral]}
        if self.items:
            accepted = {"anyOf": [accepted, {"type": "array", "items": {"enum": [*self.items]}}]}
        return {**accepted, "default": None, "description": self.refusal(name)}


Table = Mapping[str, Unsupported]

_NOTHING = Unsupported()
_OFF = Unsupported((False,))
_ONE = Unsupported((1,))
_NO_ITEMS = Unsupported(([],))
_NO_ENTRIES = Unsupported(({},))

COMMON: Table = {
    "include_stop_str_in_output": _OFF,
    "allowed_token_ids": _NOTHING,
    "bad_words": _NO_ITEMS,
    "logits_processors": _NO_ITEMS,
    "repetition_detection": _NOTHING,
    "thinking_token_budget": _NOTHING,
    "best_of": _ONE,
    "use_beam_search": _OFF,
    "length_penalty": _ONE,
    "early_stopping": _OFF,
    "guided_decoding_backend": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "structural_tag": _NOTHING,
    "spaces_between_special_tokens": Unsupported((True, False)),  # spacing has no effect here
    "truncate_prompt_tokens": _NOTHING,
    "truncation_side": _NOTHING,
    "priority": Unsupported((0,)),
    "return_tokens_as_token_ids": Unsupported((False,), "leave it out, or send return_token_ids"),
    "kv_transfer_params": _NOTHING,
    "vllm_xargs": _NO_ENTRIES,
}

STRUCTURED_OUTPUTS: Table = {
    "structural_tag": _NOTHING,
    "whitespace_pattern": _NOTHING,
    "disable_any_whitespace": _OFF,
    "disable_additional_properties": _OFF,
    "disable_fallback": Unsupported((False, True)),  # this server has only one backend
}

_TEMPLATE = Unsupported(instead="leave it out; the server always uses the chat template in the model's directory")

COMPLETION: Table = {**COMMON, "suffix": Unsupported(("",)), "prompt_embeds": _NOTHING}

TEMPLATING: Table = {
    "chat_template": _TEMPLATE,
    "documents": _NO_ITEMS,
    "mm_processor_kwargs": _NO_ENTRIES,
    "media_io_kwargs": _NO_ENTRIES,
}

STREAM_OPTIONS: Table = {"include_obfuscation": _OFF}

MESSAGE: Table = {"function_call": _NOTHING, "audio": _NOTHING}

CHAT: Table = {
    **COMMON,
    **TEMPLATING,
    "functions": _NO_ITEMS,
    "function_call": Unsupported(("none", "auto")),
    "modalities": Unsupported((["text"],)),
    "audio": _NOTHING,
    "web_search_options": _NOTHING,
    "moderation": _NOTHING,
    "prompt_cache_options": Unsupported(({}, {"mode": "implicit"})),
    "echo": Unsupported((False,), "leave it out, or use /v1/completions"),
}


LABELS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"),
        *("client_metadata", "session_id", "trace", "trace_id", "user_id", "tags"),
        *("prompt_cache_retention", "prediction"),
    }
)
"""Fields that do not change a reply; other names that end with "metadata" are treated in the same way."""


def without_labels(labels: Collection[str], known: Container[str], fields: Any) -> Any:
    """Return `fields` without the ignored fields that the schema does not declare; count all ignored fields.

    `labels` are the names of ignored fields, which cannot change a reply; if empty, no field is ignored. `known` are
    the field names that the schema declares.
    """
    if not labels or not isinstance(fields, Mapping):
        return fields
    found = {name for name in fields if name in labels or (name not in known and str(name).endswith("metadata"))}
    note_ignored("it does not change a reply", sorted(name for name in found if fields[name] is not None))
    return {name: value for name, value in fields.items() if name in known or name not in found}


def without_unsupported(table: Table, fields: Any) -> Any:
    """Return `fields` without the names in `table`; raise a pydantic error if one has a value that is not accepted."""
    if not isinstance(fields, Mapping):
        return fields
    for name, value in fields.items():
        if name in table and not table[name].takes(value):
            raise schema_error(REFUSED, table[name].refusal(name), name)
    return {name: value for name, value in fields.items() if name not in table}


def schema_with(table: Table, labels: Collection[str], schema: dict[str, Any]) -> None:
    """Add the unsupported fields in `table` and the ignored fields in `labels` to a JSON schema, in place."""
    ignored = {"default": None, "description": "Accepted, without effect."}
    schema["properties"] |= {name: ignored for name in sorted(labels) if name not in schema["properties"]}
    schema["properties"] |= {name: row.schema(name) for name, row in table.items()}


def _is_same(value: Any, neutral: Any) -> bool:
    """Return True if two values are equal in JSON, which distinguishes false from 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
