"""Reasoning efforts, mapped to the levels that a chat template accepts."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from .conversation import Conversation

_EFFORT, _SWITCH, _OFF = "reasoning_effort", "enable_thinking", "none"
_LEVELS = (_OFF, "minimal", "low", "medium", "high", "xhigh", "max")
_PROBE = ({"role": "user", "content": "x"},)


class Efforts:
    """The values of `reasoning_effort` of one chat template, found by rendering a small conversation.

    Args:
        render: Returns the text of a conversation; raises `ValueError` if the template refuses it.
        source: The template.
    """

    def __init__(self, render: Callable[[Conversation], str], source: str) -> None:
        self._render = render
        self._source = source
        self._takes = lru_cache(len(_LEVELS))(self._rendered)

    def fitted(self, conversation: Conversation) -> Conversation:
        """Return a conversation with an effort that the template takes: the next higher one, else the next lower one.

        `none` turns thinking off where the template has a switch for it, unless the conversation sets that.
        """
        values = dict(conversation.values)
        effort = values.get(_EFFORT)
        if effort == _OFF and _SWITCH in self._source:
            del values[_EFFORT]
            return replace(conversation, values={_SWITCH: False, **values})
        if effort not in _LEVELS or _EFFORT not in self._source or self._takes(effort):
            return conversation
        place = _LEVELS.index(effort)
        nearest = next(filter(self._takes, (*_LEVELS[place + 1 :], *reversed(_LEVELS[:place]))), effort)
        return replace(conversation, values={**values, _EFFORT: nearest})

    def _rendered(self, effort: str) -> bool:
        """Return True if the template takes an effort."""
        try:
            self._render(Conversation(_PROBE, values={_EFFORT: effort}))
        except ValueError:
            return False
        return True
