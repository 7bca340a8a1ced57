"""Distinguish tags in plain text from mentions of them, by the line that they are in.

A tag that is a token of the model needs none of this: it counts where the token is, and nowhere else.
"""

_FENCE = "```"
_SPACES = " \t"
_SENTENCE_ENDS = frozenset(".!?\u2026\u3002\uff01\uff1f")
_OPENING = frozenset(  # as in `after_reasoning`
    "`'\"\u2018\u201a\u201c\u201e\u2039\u00ab\u3008\u300a\u300c\u300e\u3010\uff08\uff3b\uff5b([{<"
)


class LinePosition:
    """A position in text: what its line has before it, and if it is inside a fenced block of code.

    Args:
        is_held: Whether a grammar holds the text. It knows neither fences nor which quotes belong together.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        self._is_held = is_held
        self.is_in_code = False
        """True within a fenced block."""
        self._start_line()

    def add(self, text: str) -> None:
        """Move on by a text."""
        first, *others = text.split("\n")
        self._add_to_line(first)
        for line in others:
            self.is_in_code ^= self._beginning == _FENCE and not self._is_held
            self._start_line()
            self._add_to_line(line)

    def begins_call(self) -> bool:
        """Return whether a tag here may begin a call: it begins its line, outside of code."""
        return not self.is_in_code and not self._beginning

    def ends_reasoning(self, *, is_tag: bool) -> bool:
        """Return whether a closing marker here ends reasoning, whatever comes after it.

        Outside of code it does if it begins its line, or unless it is quoted or, for a tag, is a word of a sentence.

        Args:
            is_tag: False for a marker that is a sentence of its own.
        """
        if self.is_in_code:
            return False
        if not self._beginning:
            return True
        is_quoted = self._num_backticks % 2 or self._num_quotes % 2
        last = self._end[-1:]
        if last in _OPENING or (is_quoted and not self._is_held):
            return False
        return not (is_tag and last.isspace()) or (last in _SPACES and self._end[0] in _SENTENCE_ENDS)

    def _start_line(self) -> None:
        self._beginning = ""  # the first visible characters, as many as a fence has
        self._end = ""  # the last two characters
        self._num_backticks = self._num_quotes = 0

    def _add_to_line(self, text: str) -> None:
        if not text:
            return
        if len(self._beginning) < len(_FENCE):
            self._beginning = (self._beginning + (text if self._beginning else text.lstrip(_SPACES)))[: len(_FENCE)]
        self._end = (self._end + text)[-2:]
        self._num_backticks += text.count("`")
        self._num_quotes += text.count('"')
