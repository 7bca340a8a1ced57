"""Text that replaces content which chat templates cannot render: foreign tool calls, their results, and images.

A foreign tool, such as web search, is built into another provider's API; this server cannot run it.
"""

import json
from collections.abc import Mapping
from typing import Any

_OMITTED = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "audio": "audio",
    "input_audio": "audio",
}
_MARKS = ("cache_control", "prompt_cache_breakpoint")
_NOT_SHOWN = ("type", "id", "call_id", "tool_use_id", "name", "status", "cache_control", "caller")
_CALLS = ("_call", "_tool_use")
_RESULTS = ("_output", "_tool_result")


def shown_call(name: str, arguments: Any) -> str:
    """Return the text that represents a tool call in a prompt."""
    return f"[Called {name} with {_written(arguments)}]"


def shown_result(name: str, text: str) -> str:
    """Return the text that represents a tool result in a prompt."""
    return f"[Result of {name}]\n{text}"


def omitted(kind: str) -> str:
    """Return the line that replaces an image, file or other non-text part; `kind` names it."""
    return f"[{kind} omitted: this model reads text only]"


def text_instead(part: Any) -> Any:
    """Convert an image, audio, file or document part to a text part; return any other part unchanged."""
    kind = _OMITTED.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if kind is None:
        return part
    source = part.get("source")
    is_text = isinstance(source, Mapping) and source.get("type") == "text" and isinstance(source.get("data"), str)
    text = source["data"] if is_text else omitted(kind)
    return {"type": "text", "text": text} | {name: part[name] for name in _MARKS if name in part}


def is_foreign_call(kind: str) -> bool:
    """Return True if items of this type are calls to foreign tools."""
    return kind.endswith(_CALLS)


def is_foreign_result(kind: str) -> bool:
    """Return True if items of this type are results of foreign tools."""
    return kind.endswith(_RESULTS)


def foreign_call(item: Mapping[str, Any]) -> str:
    """Return the text that represents a foreign tool call."""
    fields = {name: value for name, value in item.items() if name not in _NOT_SHOWN and value is not None}
    if item["type"] == "image_generation_call":  # its result is a base64 image
        fields["result"] = omitted("image")
    return shown_call(tool_of(item), fields["input"] if [*fields] == ["input"] else fields)


def foreign_result(item: Mapping[str, Any], name: str) -> str:
    """Return the text that represents the result of a call to the foreign tool `name`."""
    fields = {key: value for key, value in item.items() if key not in _NOT_SHOWN and value is not None}
    return shown_result(name, _written(next(iter(fields.values())) if len(fields) == 1 else fields))


def tool_of(item: Mapping[str, Any]) -> str:
    """Return an item's tool name; if it has none, derive it from the type: `web_search_call` gives `web_search`."""
    kind = str(item["type"])
    for ending in ("_output", *_CALLS, "_tool_result"):
        kind = kind.removesuffix(ending)
    return str(item.get("name") or kind)


def _written(value: Any) -> str:
    """Convert a value to text: join text parts as lines, and encode other values as JSON without images."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in map(text_instead, parts)]
    if texts and all(isinstance(text, str) for text in texts):
        return "\n".join(map(str, texts))
    try:
        found = json.loads(json.dumps(value), object_hook=_without_data)
        return json.dumps(found, ensure_ascii=False)
    except RecursionError:
        return omitted("deeply nested data")


def _without_data(found: dict[str, Any]) -> Any:
    """Replace `data:` URLs in a JSON object with placeholders; replace an image or file object with one placeholder."""
    kind = _OMITTED.get(str(found.get("type")))
    if kind is not None:
        return omitted(kind)
    is_data = {name: isinstance(value, str) and value.startswith("data:") for name, value in found.items()}
    return {name: omitted("data") if is_data[name] else value for name, value in found.items()}
