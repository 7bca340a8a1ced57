"""Adapt conversations to chat templates that would drop or refuse messages."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from .conversation import DEVELOPER, MARKING_TOOL, Conversation, called
from .errors import bad_request
from .rewrites import (
    Rewrite,
    calls_as_text,
    developer_as_system,
    instructions_in_users,
    joined_instructions,
    joined_replies,
    joined_users,
    later_instructions_in_users,
    short_ids,
    single_calls,
    text_before_calls,
    text_in_results,
    turns_of,
    user_text_in_results,
    with_turns,
)
from .unsupported import note_ignored

_EFFORT, _SWITCH, _OFF = "reasoning_effort", "enable_thinking", "none"
_LEVELS = (_OFF, "minimal", "low", "medium", "high", "xhigh", "max")
_PROBE = ({"role": "user", "content": "x"},)


class Efforts:
    """Adapts `reasoning_effort` to the values that a chat template accepts; finds them by rendering test conversations.

    `render` renders a conversation; it raises `ValueError` if the template refuses the conversation.
    """

    def __init__(self, render: Callable[[Conversation], str], source: str) -> None:
        self._render = render
        self._source = source
        self._takes = lru_cache(len(_LEVELS))(self._rendered)

    def fitted(self, conversation: Conversation) -> Conversation:
        """Return the conversation with `reasoning_effort` changed to the nearest value that the template accepts.

        If the template has the variable `enable_thinking`, the effort `none` sets it to false instead, unless the
        conversation already has a value for it.
        """
        values = dict(conversation.values)
        effort = values.get(_EFFORT)
        if effort == _OFF and _SWITCH in self._source:
            del values[_EFFORT]
            return replace(conversation, values={_SWITCH: False, **values})
        if effort not in _LEVELS or _EFFORT not in self._source or self._takes(effort):
            return conversation
        index = _LEVELS.index(effort)
        nearest = next(filter(self._takes, (*_LEVELS[index + 1 :], *reversed(_LEVELS[:index]))), effort)
        return replace(conversation, values={**values, _EFFORT: nearest})

    def _rendered(self, effort: str) -> bool:
        """Return True if the template renders a test conversation with this effort."""
        try:
            self._render(Conversation(_PROBE, values={_EFFORT: effort}))
        except ValueError:
            return False
        return True


_ORDER: tuple[Rewrite, ...] = (
    developer_as_system,
    joined_instructions,
    instructions_in_users,
    later_instructions_in_users,
    short_ids,
    joined_replies,
    text_before_calls,
    single_calls,
    text_in_results,
    user_text_in_results,
    calls_as_text,
    joined_users,
)
"""All rewrites, in the order in which they are applied."""

_SYSTEM, _DEVELOPER, _USER, _REPLY = "system", "developer", "user", "assistant"
_CALL, _SAYING_CALL, _CALLS, _RESULT, _OTHER_RESULT = "call", "saying call", "calls", "result", "other result"
_SAYING = (
    (_USER, _SAYING_CALL, _RESULT, _REPLY, _USER),
    (_USER, _SAYING_CALL, _RESULT),
    (_USER, _SAYING_CALL, _RESULT, _REPLY, _USER, _SAYING_CALL, _RESULT),
)
_PROBES: tuple[tuple[Rewrite, tuple[tuple[str, ...], ...]], ...] = (
    (developer_as_system, ((_DEVELOPER, _USER), (_SYSTEM, _DEVELOPER, _USER))),
    (developer_as_system, ((_USER, _REPLY, _DEVELOPER, _USER),)),
    (instructions_in_users, ((_SYSTEM, _USER),)),
    (
        later_instructions_in_users,
        ((_SYSTEM, _USER, _REPLY, _SYSTEM, _USER), (_USER, _SYSTEM), (_USER, _REPLY, _SYSTEM, _USER)),
    ),
    (joined_users, ((_USER, _USER), (_USER, _REPLY, _USER, _USER))),
    (joined_replies, ((_USER, _REPLY, _REPLY, _USER),)),
    (short_ids, ((_USER, _CALL, _RESULT, _REPLY, _USER),)),
    (calls_as_text, ((_USER, _CALL, _RESULT, _REPLY, _USER),)),
    (single_calls, ((_USER, _CALLS, _RESULT, _OTHER_RESULT, _REPLY, _USER),)),
    (text_before_calls, _SAYING),
    (text_in_results, _SAYING),
    (user_text_in_results, ((_USER, _CALL, _RESULT, _USER), (_USER, _CALL, _RESULT, _USER, _REPLY, _USER))),
)
"""Test conversations for each rewrite. A template that renders them completely does not need the rewrite."""

Render = Callable[[Conversation], str]


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a test rendering: which messages the template left out."""

    is_refused: bool = False  # True if the template raised an error
    unread: tuple[int, ...] = ()  # indexes of messages that were left out
    unread_with_calls: tuple[int, ...] = ()  # indexes of messages rendered with their calls, without their text
    num_names: int = 0  # number of rendered message names, excluding tool results

    @property
    def is_whole(self) -> bool:
        """True if the template rendered all message texts and calls."""
        return not self.is_refused and not self.unread and not self.unread_with_calls


class TemplateFit:
    """Adapter that rewrites conversations until a chat template renders all of their messages.

    A test rendering with a marker in place of each text shows which messages the template renders. Small test
    conversations determine once which rewrites a template always needs. These rewrites are always applied, so that each
    turn's prompt begins with the previous turn's prompt. Reasoning in earlier turns may be left out. `render` raises
    `ValueError` if the template refuses a conversation.
    """

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        self._source = source
        self.efforts = Efforts(render, source)

    def fitted(self, conversation: Conversation) -> Conversation:
        """Rewrite a conversation so that the template renders all of its messages.

        If the template refuses all rewritten conversations, return one of them; rendering it then raises the error.

        Raises:
            ApiError: 400 if the template leaves out a message after every rewrite.
        """
        for rewrites in self._choices(conversation):
            found = _rewritten(conversation, rewrites)
            reading = self._reading(found)
            if not reading.is_refused and not reading.unread:
                if not reading.is_whole:
                    note_ignored("the chat template does not support it", ["text of replies that also call tools"])
                if reading.num_names < len(_named(conversation)):
                    note_ignored("the chat template does not read it", ["messages.name"])
                return found
        if reading.unread:  # from the last attempt, without rewrites
            message = conversation.messages[reading.unread[0]]
            shown = f"begins with {message['content'][:60]!r}" if message["content"] else "calls tools"
            raise bad_request(
                f"the model's chat template leaves out the message with role {message['role']} that {shown}; "
                "move or remove the message",
                "messages",
            )
        return _rewritten(conversation, self._needed)

    def note_unread_values(self, conversation: Conversation) -> None:
        """Log and count the conversation's variables that the template does not use."""
        note_ignored(
            "the chat template does not read it", [name for name in conversation.values if name not in self._source]
        )

    @cached_property
    def _needed(self) -> frozenset[Rewrite]:
        """Rewrites to apply to every conversation, found with test conversations."""
        needed: set[Rewrite] = {joined_instructions}
        if DEVELOPER not in self._source:
            needed.add(developer_as_system)
        for rewrite, roles in _PROBES:
            probes = [_conversation_of(names) for names in roles]
            if not self._reads_all(probes, needed) and self._reads_all(probes, needed | {rewrite}):
                needed.add(rewrite)
        return frozenset(needed)

    def _reads_all(self, probes: Sequence[Conversation], rewrites: Set[Rewrite]) -> bool:
        return all(self._reading(_rewritten(probe, rewrites)).is_whole for probe in probes)

    def _choices(self, conversation: Conversation) -> Iterator[frozenset[Rewrite]]:
        """Yield sets of rewrites in the order in which to try them; the last set is empty."""
        others = [rewrite for rewrite in _ORDER if rewrite not in self._needed]
        if not conversation.has_calls:
            others = [rewrite for rewrite in others if rewrite is not calls_as_text]
        yield self._needed
        for rewrite in others:
            yield self._needed | {rewrite}
        yield self._needed | {rewrite for rewrite in others if rewrite is not calls_as_text}
        yield self._needed | {*others}
        yield frozenset()

    def _reading(self, conversation: Conversation) -> Reading:
        marked = _marked(conversation)
        try:
            text = self._render(marked)
        except ValueError:
            return Reading(is_refused=True)
        unread: list[int] = []
        unread_with_calls: list[int] = []
        for index, message in enumerate(marked.messages):
            calls = [call["function"] for call in message.get("tool_calls", ())]
            if not all(call["name"] in text and all(key in text for key in call["arguments"]) for call in calls):
                unread.append(index)
            elif message["content"] not in text:
                (unread_with_calls if calls else unread).append(index)
        num_names = sum(message["name"] in text for message in _named(marked))
        return Reading(False, tuple(unread), tuple(unread_with_calls), num_names)


def _rewritten(conversation: Conversation, rewrites: Set[Rewrite]) -> Conversation:
    turns = turns_of(conversation)
    for rewrite in _ORDER:
        if rewrite in rewrites:
            turns = rewrite(turns)
    return with_turns(conversation, turns)


def _marked(conversation: Conversation) -> Conversation:
    """Return the conversation with a marker instead of each text, and with one marker tool instead of its tools."""
    return replace(
        conversation,
        messages=[_with_markers(index, message) for index, message in enumerate(conversation.messages)],
        tools=(MARKING_TOOL,) if conversation.tools else (),
    )


def _with_markers(index: int, message: dict[str, Any]) -> dict[str, Any]:
    marked = {**message, "content": f"words{index:05}here" if message["content"].strip() else ""}
    if "name" in message and message["role"] != "tool":
        marked["name"] = f"who{index:05}here"
    if "reasoning_content" in message:
        marked["reasoning_content"] = f"thought{index:05}here"
    if "tool_calls" in message:
        marked["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": f"name{index:05}and{number:05}here",
                    "arguments": {f"key{index:05}and{number:05}here": "value"} if call["function"]["arguments"] else {},
                },
            }
            for number, call in enumerate(message["tool_calls"])
        ]
    return marked


def _named(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages that have a name, except tool results, in which it is the tool's name."""
    return [message for message in conversation.messages if "name" in message and message["role"] != "tool"]


def _conversation_of(names: Sequence[str]) -> Conversation:
    """Return a test conversation; each of `names` is a role or a key of `_CALLING`."""
    messages = [{"role": name, "content": "x"} | _CALLING.get(name, {}) for name in names]
    return Conversation(messages, tools=(MARKING_TOOL,) if "call" in " ".join(names) else (), adds_prompt=True)


_IDS = ("call_0123456789abcdef", "call_fedcba9876543210")
_CALLED = [called("x", '{"x": "x"}', call_id) for call_id in _IDS]
_CALLING: dict[str, dict[str, Any]] = {
    _CALL: {"role": "assistant", "content": "", "tool_calls": _CALLED[:1]},
    _SAYING_CALL: {"role": "assistant", "tool_calls": _CALLED[:1]},
    _CALLS: {"role": "assistant", "content": "", "tool_calls": _CALLED},
    _RESULT: {"role": "tool", "tool_call_id": _IDS[0]},
    _OTHER_RESULT: {"role": "tool", "tool_call_id": _IDS[1]},
}
