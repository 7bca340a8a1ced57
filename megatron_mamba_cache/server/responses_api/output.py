"""Output items of a response, and the events that describe them."""

import uuid
from typing import Any

from ..formats import Event
from ..parsers.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from .items import ChatMessage

Item = dict[str, Any]


class ResponseOutput:
    """Output items of one response so far; creates the response's numbered events.

    Args:
        summarizes: True to repeat the reasoning as its summary, because many clients show only the summary.
    """

    def __init__(self, *, summarizes: bool) -> None:
        self.items: list[Item] = []
        self._num_events = 0
        self._summarizes = summarizes
        self._open: Item | None = None

    def event(self, kind: str, **fields: Any) -> Event:
        """Return an event with the response's next sequence number."""
        event = Event({"type": kind, "sequence_number": self._num_events, **fields}, kind)
        self._num_events += 1
        return event

    def add(self, part: Part) -> list[Event]:
        """Add a part of the reply; return its events."""
        match part:
            case Reasoning(text):
                return [*self._ensure("reasoning"), self._grow_text(text), *self._grow_summary(text)]
            case Content(text):
                return [*self._ensure("message"), self._grow_text(text)]
            case CallBegin(name):
                return [*self.end(), *self._begin(_call(name))]
            case CallArguments(text):
                return [self._grow_arguments(text)]
            case CallEnd():
                return self.end()

    def cut(self, status: str) -> list[Event]:
        """End the open item as `end` does; mark an open call as incomplete."""
        is_call = self._open is not None and self._open["type"] == "function_call"
        return self.end("incomplete" if is_call else status)

    def end(self, status: str = "completed") -> list[Event]:
        """End the open item if there is one; return its events."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        position = self._position(item)
        if item["type"] == "function_call":
            done = [self.event("response.function_call_arguments.done", **position, arguments=item["arguments"])]
        else:
            (content,) = item["content"]
            name = _NAMES[item["type"]]
            text = {"text": content["text"], **_log_probs(item)}
            done = [
                *self._end_summary(item),
                self.event(f"response.{name}.done", **position, content_index=0, **text),
                self.event("response.content_part.done", **position, content_index=0, part=dict(content)),
            ]
        return [
            *done,
            self.event("response.output_item.done", output_index=position["output_index"], item=_copy(item)),
        ]

    def message(self) -> ChatMessage:
        """Return the output items as one chat message."""
        message: ChatMessage = {"role": "assistant", "content": self._text("message")}
        if reasoning := self._text("reasoning"):
            message["reasoning_content"] = reasoning
        calls = [item for item in self.items if item["type"] == "function_call"]
        if calls:
            message["tool_calls"] = [
                {"id": call["call_id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
                for call in calls
            ]
        return message

    def _text(self, kind: str) -> str:
        """Return the text of all items of a kind, joined in the same way as in `messages_of`."""
        return "\n".join(part["text"] for item in self.items if item["type"] == kind for part in item["content"])

    def _ensure(self, kind: str) -> list[Event]:
        """Begin a text item of this kind unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        return [*self.end(), *self._begin(_message() if kind == "message" else _reasoning())]

    def _begin(self, item: Item) -> list[Event]:
        self.items.append(item)
        self._open = item
        added = self.event("response.output_item.added", output_index=len(self.items) - 1, item=_copy(item))
        if item["type"] == "function_call":
            return [added]
        item["content"].append(_text_part(item["type"]))
        position, part = self._position(item), dict(item["content"][0])
        begun = [added, self.event("response.content_part.added", **position, content_index=0, part=part)]
        return begun + (self._begin_summary(item) if item["type"] == "reasoning" and self._summarizes else [])

    def _begin_summary(self, item: Item) -> list[Event]:
        item["summary"].append({"type": "summary_text", "text": ""})
        part = dict(item["summary"][0])
        return [self.event("response.reasoning_summary_part.added", **self._position(item), summary_index=0, part=part)]

    def _grow_summary(self, text: str) -> list[Event]:
        assert self._open is not None
        if not self._open["summary"]:
            return []
        self._open["summary"][0]["text"] += text
        position = self._position(self._open)
        return [self.event("response.reasoning_summary_text.delta", **position, summary_index=0, delta=text)]

    def _end_summary(self, item: Item) -> list[Event]:
        position = self._position(item) | {"summary_index": 0}
        return [
            event
            for part in item.get("summary", ())
            for event in (
                self.event("response.reasoning_summary_text.done", **position, text=part["text"]),
                self.event("response.reasoning_summary_part.done", **position, part=dict(part)),
            )
        ]

    def _grow_text(self, text: str) -> Event:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        name, fields = _NAMES[self._open["type"]], self._position(self._open) | _log_probs(self._open)
        return self.event(f"response.{name}.delta", **fields, content_index=0, delta=text)

    def _grow_arguments(self, text: str) -> Event:
        assert self._open is not None
        self._open["arguments"] += text
        return self.event("response.function_call_arguments.delta", **self._position(self._open), delta=text)

    def _position(self, item: Item) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.items) - 1}


_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}


def _message() -> Item:
    return {"id": f"msg_{_unique()}", "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning() -> Item:
    return {"id": f"rs_{_unique()}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call(name: str) -> Item:
    ids = {"id": f"fc_{_unique()}", "call_id": f"call_{_unique()}"}
    return {**ids, "type": "function_call", "status": "in_progress", "name": name, "arguments": ""}


def _text_part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _NAMES[kind], "text": ""}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})


def _log_probs(item: Item) -> dict[str, Any]:
    return {"logprobs": []} if item["type"] == "message" else {}


def _copy(item: Item) -> Item:
    lists = {name: [dict(part) for part in item[name]] for name in ("content", "summary") if name in item}
    return item | lists


def _unique() -> str:
    return uuid.uuid4().hex[:24]
