"""Rewrite conversations for chat templates that would otherwise drop or refuse messages.

Each rewrite converts a conversation's turns to equivalent turns. Later turns do not affect how a turn is rewritten,
unless they are adjacent to it. When a conversation grows, its prompt therefore still begins with the previous prompt.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Self

from .conversation import DEVELOPER, INSTRUCTING, Breakpoint, Conversation
from .shown_text import shown_call, shown_result

_JOINT = "\n\n"
_TEXT = "[Said with the call]\n"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Turn:
    """Message of a conversation, with its cache breakpoints."""

    message: dict[str, Any]
    breakpoints: tuple[tuple[int, Breakpoint], ...] = ()  # (index in `Conversation.breakpoints`, breakpoint)

    @property
    def role(self) -> str:
        """Role of the message."""
        return self.message["role"]

    @property
    def content(self) -> str:
        """Text of the message."""
        return self.message["content"]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls in the message."""
        return self.message.get("tool_calls", [])

    @property
    def instructs(self) -> bool:
        """True if the message's role is system or developer."""
        return self.role in INSTRUCTING

    def has_name_of(self, other: "Turn") -> bool:
        """Return True if both messages have the same name, or neither has a name."""
        return self.message.get("name") == other.message.get("name")

    def with_role(self, role: str) -> Self:
        """Return this turn with another role and only its text; drop its name, reasoning and calls."""
        return replace(self, message={"role": role, "content": self.content})

    def after(self, text: str) -> Self:
        """Return this turn with `text` inserted before its own text."""
        breakpoints = tuple((index, replace(mark, end=mark.end + len(text))) for index, mark in self.breakpoints)
        return replace(self, message={**self.message, "content": text + self.content}, breakpoints=breakpoints)

    def joined(self, other: Self) -> Self:
        """Return this turn with the text, reasoning, calls and breakpoints of the next turn `other` appended."""
        is_between = bool(self.content and other.content)
        moved = other.after(self.content + _JOINT * is_between)
        message = {**other.message, **self.message, "content": moved.content}
        if not self.has_name_of(other):
            message.pop("name", None)
        reasoning = [turn.message["reasoning_content"] for turn in (self, other) if "reasoning_content" in turn.message]
        if reasoning:
            message["reasoning_content"] = _JOINT.join(reasoning)
        return replace(self, message=message, breakpoints=(*self.breakpoints, *moved.breakpoints))


Rewrite = Callable[[Sequence[Turn]], list[Turn]]


def turns_of(conversation: Conversation) -> list[Turn]:
    """Return the messages of a conversation as turns, each with its breakpoints."""
    numbered = [*enumerate(conversation.breakpoints)]
    return [
        Turn(message, tuple((number, mark) for number, mark in numbered if mark.message == index))
        for index, message in enumerate(conversation.messages)
    ]


def with_turns(conversation: Conversation, turns: Sequence[Turn]) -> Conversation:
    """Return the conversation with its messages and breakpoints taken from `turns`."""
    breakpoints = [*conversation.breakpoints]
    for index, turn in enumerate(turns):
        for number, mark in turn.breakpoints:
            breakpoints[number] = replace(mark, message=index)
    return replace(conversation, messages=[turn.message for turn in turns], breakpoints=tuple(breakpoints))


def developer_as_system(turns: Sequence[Turn]) -> list[Turn]:
    """Change the role of messages from `developer` to `system`."""
    return [
        replace(turn, message={**turn.message, "role": "system"}) if turn.role == DEVELOPER else turn for turn in turns
    ]


def joined_instructions(turns: Sequence[Turn]) -> list[Turn]:
    """Merge adjacent instruction messages that have the same role and name."""
    return _joined(turns, lambda one, other: one.instructs and one.role == other.role and one.has_name_of(other))


def joined_users(turns: Sequence[Turn]) -> list[Turn]:
    """Merge adjacent user messages."""
    return _joined(turns, lambda one, other: one.role == other.role == "user")


def joined_replies(turns: Sequence[Turn]) -> list[Turn]:
    """Merge adjacent assistant messages; append nothing to a message that calls tools."""
    return _joined(turns, lambda one, other: one.role == other.role == "assistant" and not one.calls)


def later_instructions_in_users(turns: Sequence[Turn]) -> list[Turn]:
    """Move instructions into adjacent user messages, except the instructions that begin the conversation."""
    first = next((index for index, turn in enumerate(turns) if not turn.instructs), len(turns))
    return [*turns[:first], *instructions_in_users(turns[first:])]


def instructions_in_users(turns: Sequence[Turn]) -> list[Turn]:
    """Move all instructions into adjacent user messages; keep tool results directly after their calls."""
    found: list[Turn] = []
    held: list[Turn] = []
    for turn in turns:
        if turn.instructs:
            held.append(turn.with_role("user"))
        elif turn.role == "tool" or not held:
            found.append(turn)
        else:
            instructions = _joined(held, lambda _one, _other: True)[0]
            held.clear()
            if found and found[-1].role == "user":
                found[-1] = found[-1].joined(instructions)
                found.append(turn)
            elif turn.role == "user":
                found.append(instructions.joined(turn))
            else:
                found += [instructions, turn]
    if held and found and found[-1].role == "user":
        held.insert(0, found.pop())
    return [*found, *_joined(held, lambda _one, _other: True)]


def short_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Replace the ids of calls and results with nine-character alphanumeric ids."""
    return [replace(turn, message=_with_short_ids(turn.message)) for turn in turns]


def text_before_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Split each assistant message with text and calls into a text message and a call message."""
    return [part for turn in turns for part in (_text_and_calls(turn) if turn.calls and turn.content else [turn])]


def text_in_results(turns: Sequence[Turn]) -> list[Turn]:
    """Move the text of each message that calls tools into the tool result that follows it."""
    found: list[Turn] = []
    for turn in turns:
        if found and turn.role == "tool" and found[-1].calls and found[-1].content:
            texts, calls = _text_and_calls(found[-1])
            found[-1] = replace(calls, message={**found[-1].message, "content": ""})
            earlier = texts.after(_TEXT)
            turn = replace(earlier, message={**turn.message, "content": earlier.content}).joined(turn)
        found.append(turn)
    return found


def single_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Split a message with several calls into one message per call; move each result after its call."""
    found: list[Turn] = []
    rest = [*turns]
    while rest:
        turn = rest.pop(0)
        if len(turn.calls) < 2:
            found.append(turn)
            continue
        results: list[Turn] = []
        while rest and rest[0].role == "tool":
            results.append(rest.pop(0))
        found += _calls_with_results(turn, results)
    return found


def user_text_in_results(turns: Sequence[Turn]) -> list[Turn]:
    """Merge user text that directly follows a tool result into that result."""
    return _joined(turns, lambda one, other: one.role == "tool" and other.role == "user")


def calls_as_text(turns: Sequence[Turn]) -> list[Turn]:
    """Replace tool calls with assistant text, and tool results with user text."""
    names: dict[Any, str] = {}
    found: list[Turn] = []
    for turn in turns:
        names |= {call.get("id"): call["function"]["name"] for call in turn.calls}
        if turn.role == "tool":
            name = turn.message.get("name") or names.get(turn.message.get("tool_call_id"), "a tool")
            found.append(turn.with_role("user").after(shown_result(name, "")))
        else:
            found.append(_with_written_calls(turn) if turn.calls else turn)
    return joined_replies(joined_users(found))


def _joined(turns: Sequence[Turn], belongs: Callable[[Turn, Turn], bool]) -> list[Turn]:
    found: list[Turn] = []
    for turn in turns:
        if found and belongs(found[-1], turn):
            found[-1] = found[-1].joined(turn)
        else:
            found.append(turn)
    return found


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short(call.get("id") or f"{index} {call['function']['name']}")}
            for index, call in enumerate(message["tool_calls"])
        ]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    return changed


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _text_and_calls(turn: Turn) -> Iterator[Turn]:
    text = {key: value for key, value in turn.message.items() if key != "tool_calls"}
    calls = {key: value for key, value in turn.message.items() if key != "reasoning_content"} | {"content": ""}
    yield Turn(text, tuple((number, mark) for number, mark in turn.breakpoints if mark.call is None))
    yield Turn(
        calls, tuple((number, replace(mark, end=0)) for number, mark in turn.breakpoints if mark.call is not None)
    )


def _calls_with_results(turn: Turn, results: list[Turn]) -> Iterator[Turn]:
    for index, call in enumerate(turn.calls):
        kept = {"role": turn.role, "content": ""} if index else turn.message
        breakpoints = [
            (number, mark if mark.call is None else replace(mark, call=0, end=0 if index else mark.end))
            for number, mark in turn.breakpoints
            if mark.call == index or (mark.call is None and not index)
        ]
        yield Turn({**kept, "tool_calls": [call]}, tuple(breakpoints))
        own = next((result for result in results if result.message.get("tool_call_id") == call.get("id")), None)
        if own is not None:
            results.remove(own)
            yield own
    yield from results


def _with_written_calls(turn: Turn) -> Turn:
    """Return the turn with its calls converted to text and their breakpoints moved into that text."""
    text, ends = turn.content, []
    for call in turn.calls:
        text += _JOINT * bool(text) + shown_call(call["function"]["name"], call["function"]["arguments"])
        ends.append(len(text))
    message = {key: value for key, value in turn.message.items() if key != "tool_calls"} | {"content": text}
    breakpoints = [
        (number, mark if mark.call is None else replace(mark, call=None, end=ends[mark.call]))
        for number, mark in turn.breakpoints
    ]
    return Turn(message, tuple(breakpoints))
