"""Parse the reasoning between markers at the start of a reply; the prompt may contain the opening marker."""

from dataclasses import dataclass
from enum import Enum

from .content import MarkedCalls, Prose, Reading, rest_is_blank
from .parts import Parsing, Reasoning
from .text_feed import TextFeed


class PromptReasoning(Enum):
    """State of reasoning at the end of a prompt: not begun (`ALLOWED`), open or done."""

    OPEN = "open"
    """The reply begins within reasoning."""
    ALLOWED = "allowed"
    """The prompt has no reasoning after the last message; the reply may begin with reasoning."""
    DONE = "done"
    """The prompt closes the reasoning, possibly empty, or begins the answer."""


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning format of a model family: the markers around the reasoning."""

    open: str
    close: str
    begins_open: bool = False  # True if replies begin within reasoning unless the prompt closes it

    def after(self, begun: str, prefill: str = "") -> PromptReasoning:
        """Return the state of reasoning after a prompt that ends with `begun` and `prefill`.

        Args:
            begun: Text of the prompt after the last complete message. No tag in it is a mention.
            prefill: Beginning of the reply, sent by the client; follows `begun`. It is parsed like a reply.
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
        """Return the state of reasoning at the end of a prompt without reasoning tags after the last message."""
        if self.begins_open:
            return PromptReasoning.OPEN
        return PromptReasoning.DONE if prefill else PromptReasoning.ALLOWED

    def parse(self, feed: TextFeed, *, is_open: bool, calls: MarkedCalls | None) -> Parsing:
        """Parse the reasoning at the start of a reply, if there is any; leave the text after it in the feed.

        Tool calls also end reasoning, because models sometimes omit the closing marker before a call. A closing marker
        after the last call is dropped.

        Args:
            is_open: True if the reply begins within reasoning.
            calls: Syntax of tool calls; None: the reply has no calls.
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
            if feed.is_constrained or not (yield from self._reopens(feed)):
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
        """Skip white space and repeated opening markers."""
        yield from feed.space()
        while (yield from feed.accepts(self.open)):
            yield from feed.space()

    def _reopens(self, feed: TextFeed) -> Reading:
        """Consume the opening marker if another reasoning block follows; return False if the answer follows."""
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
"""Format of Qwen 3, Nemotron and most other models; the opening marker is in the prompt or in the reply."""
DEEPSEEK_R1 = ReasoningForm("<think>", "</think>", begins_open=True)
GRANITE = ReasoningForm("Here is my thought process:", "Here is my response:")
"""Format of Granite 3.2 and 3.3."""
