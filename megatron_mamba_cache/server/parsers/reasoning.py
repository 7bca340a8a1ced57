"""Reasoning at the start of a reply, between markers; the prompt may have opened it already."""

from dataclasses import dataclass
from enum import Enum

from .content import MarkedCalls, Prose, Reading, rest_is_blank
from .parts import Parsing, Reasoning
from .text_feed import TextFeed


class PromptReasoning(Enum):
    """Reasoning at the end of a prompt."""

    OPEN = "open"
    """The reply begins within it."""
    ALLOWED = "allowed"
    """The prompt has none. The reply may begin with it."""
    DONE = "done"
    """The prompt closes it, even if it is empty, or the answer has begun."""


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How a family of models marks its reasoning."""

    open: str
    close: str
    begins_open: bool = False  # True if every reply begins within reasoning unless the prompt has closed it

    def after(self, begun: str, prefill: str = "") -> PromptReasoning:
        """Return the reasoning at the end of a prompt.

        Args:
            begun: The prompt's text after the last complete message. Every tag counts.
            prefill: The client's text that the reply continues, after `begun`. It is read like a reply.
        """
        opened, closed = begun.rfind(self.open), begun.rfind(self.close)
        if not prefill and opened == closed:
            return self.without_tags(prefill)
        is_open = self.begins_open if opened == closed else opened > closed
        feed = TextFeed()
        feed.add(prefill)
        feed.is_reasoning = is_open
        for _part in self.parse(feed, is_open=is_open, calls=None):
            if _part is None:
                feed.end()
        return PromptReasoning.OPEN if feed.is_reasoning else PromptReasoning.DONE

    def without_tags(self, prefill: str) -> PromptReasoning:
        """Return the reasoning at the end of a prompt whose reply has no tag yet."""
        if self.begins_open:
            return PromptReasoning.OPEN
        return PromptReasoning.DONE if prefill else PromptReasoning.ALLOWED

    def parse(self, feed: TextFeed, *, is_open: bool, calls: MarkedCalls | None) -> Parsing:
        """Parse the reply's reasoning, if it has one, and leave the rest in the feed.

        Tool calls end reasoning too, since models forget to close it before; they may close it after the last one.

        Args:
            is_open: True if the reply begins inside of it.
            calls: How tool calls are written; None: there are none.
        """
        feed.mark()
        yield from feed.space()
        if not is_open and not (yield from feed.accepts(self.open)):
            feed.back_to_mark()
            return
        feed.forget_mark()
        feed.is_reasoning = True
        prose = Prose(feed, Reasoning, calls, self.close)
        yield from self._skip_openings(feed)
        while (ending := (yield from prose.read())) == self.close:
            feed.is_reasoning = False
            yield from feed.space()
            if feed.is_held or not (yield from self._reopens(feed)):
                break
            feed.is_reasoning = True
            prose.resume()
            yield from self._skip_openings(feed)
        if not ending:
            return
        feed.is_reasoning = False
        yield from feed.space()
        while ending != self.close and not (yield from feed.accepts(self.close)):
            if not (yield from prose.next_calls()):
                return
        yield from feed.space()

    def _skip_openings(self, feed: TextFeed) -> Parsing:
        """Skip opening markers that a model writes again after the prompt or itself has."""
        yield from feed.space()
        while (yield from feed.accepts(self.open)):
            yield from feed.space()

    def _reopens(self, feed: TextFeed) -> Reading:
        """Consume an opening marker of another block of reasoning; return False if an answer comes instead."""
        feed.mark()
        reopens = yield from feed.accepts(self.open)
        if reopens and not feed.is_token(self.open):
            reopens = yield from rest_is_blank(feed)
        if reopens:
            feed.forget_mark()
        else:
            feed.back_to_mark()
        return reopens


THINK = ReasoningForm("<think>", "</think>")
"""Qwen 3, Nemotron, and most others; templates open it in the prompt, or models in the reply."""
DEEPSEEK_R1 = ReasoningForm("<think>", "</think>", begins_open=True)
GRANITE = ReasoningForm("Here is my thought process:", "Here is my response:")
"""Granite 3.2 and 3.3."""
