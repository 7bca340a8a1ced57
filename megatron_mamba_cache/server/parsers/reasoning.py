"""Reasoning at the start of a reply, between markers; the prompt may have opened it already."""

from collections.abc import Sequence
from dataclasses import dataclass

from .content import text_until
from .parts import Parsing, Reasoning
from .text_feed import TextFeed


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """How a family of models marks its reasoning.

    Args:
        open, close: Its markers.
        begins_open: Whether every reply begins inside of it, although the prompt does not show it.
    """

    open: str
    close: str
    begins_open: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """Return whether a reply to the prompt begins with reasoning."""
        return self.begins_open or prompt.rstrip().endswith(self.open)

    def parse(self, feed: TextFeed, *, is_open: bool, others: Sequence[str]) -> Parsing:
        """Parse the reply's reasoning, if it has one, and leave the rest in the feed.

        Args:
            is_open: Whether the reply begins inside of it.
            others: Markers that end reasoning too, since models forget to close it before a tool call.
        """
        feed.mark()
        yield from feed.space()
        has_opened = yield from feed.accepts(self.open)
        if not has_opened and not is_open:
            feed.back_to_mark()
            return
        feed.forget_mark()
        yield from feed.space()
        _space, marker = yield from text_until(feed, (self.close, *others), Reasoning)
        if marker in others:
            feed.back(len(marker))
        yield from feed.space()


THINK = ReasoningForm("<think>", "</think>")
"""Qwen 3, Nemotron, and most others; templates open it in the prompt, or models in the reply."""
DEEPSEEK_R1 = ReasoningForm("<think>", "</think>", begins_open=True)
GRANITE = ReasoningForm("Here is my thought process:", "Here is my response:")
"""Granite 3.2 and 3.3."""
