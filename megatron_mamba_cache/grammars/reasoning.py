"""Build grammars for replies with reasoning: free text between two markers, then text that follows another grammar.

A model may start a tool call inside its reasoning, without the closing marker. The tool call then ends the reasoning.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .forms import ANY, Grammar, SpecialId, any_of, escaped, literal, named, sequence, without

SPACE = r"(\s|[\x1c-\x1f])*"
"""Regular expression for the characters that `str.isspace` accepts."""
_GAP = "/[ \\n]{0,4}/"
_OPENING = r"""`'"\u2018\u201a\u201c\u201e\u2039\u00ab\u3008\u300a\u300c\u300e\u3010\uff08\uff3b\uff5b(\[{<"""
_SENTENCE_END = r"[.!?\u2026\u3002\uff01\uff1f][ \t]"


@dataclass(frozen=True, slots=True)
class CallsInReasoning:
    """Describes how tool calls may start inside reasoning, and what may follow them."""

    marker: str  # text that opens a call: at the start of a line or, for a special token, after a word
    rest: Grammar  # grammar after the marker
    after: Grammar | None = None  # grammar after the calls and an optional closing marker; None: the reply ends there


@dataclass(frozen=True, slots=True)
class ReasoningGrammar:
    """Builds grammars for reasoning between an opening and a closing marker."""

    opening: str
    closing: str
    special_id: SpecialId  # returns the id of a marker, or None if it is not a special token

    def before(self, grammar: Grammar, calls: CallsInReasoning | None = None, *, is_open: bool) -> Grammar:
        """Return a grammar for reasoning followed by text that matches `grammar`.

        Args:
            calls: Tool calls that may end the reasoning; None: only the closing marker ends it.
            is_open: True if the prompt has opened the reasoning; False if the reply may open it or skip it.
        """
        reply = named("reply", grammar)
        closed = sequence(self._text_to_closing(calls), Grammar(_GAP), reply)
        thinking = closed if calls is None else any_of(closed, self._through_calls(calls))
        if is_open:
            return thinking
        return any_of(sequence(Grammar(literal(self.opening, self.special_id)), thinking), reply)

    def _text_to_closing(self, calls: CallsInReasoning | None) -> Grammar:
        """Return a grammar for free text without tool calls, up to and including the closing marker."""
        begun = "" if calls is None or self._is_token(calls.marker) else f" & ~/{self._begun(calls.marker)}{ANY}/"
        closing_id = self.special_id(self.closing)
        if closing_id is not None:
            return Grammar(f"THOUGHTS <[{closing_id}]>", {"THOUGHTS": f"/{ANY}/ & {without(self.closing)}{begun}"})
        return _lazy("thoughts", f"/{self._closed}/{begun}")

    def _through_calls(self, calls: CallsInReasoning) -> Grammar:
        """Return a grammar for free text, then tool calls, then optionally the closing marker."""
        open_text = without(self.closing) if self._is_token(self.closing) else f"~/{self._closed}{ANY}/"
        marker_id = self.special_id(calls.marker)
        if marker_id is None:
            begun = _lazy("thoughts_and_marker", f"/{self._begun(calls.marker)}/ & {open_text}")
        else:
            terminal = f"/{_before_tag(is_tag=True)}/ & {open_text}"
            begun = Grammar(f"OPEN_THOUGHTS <[{marker_id}]>", {"OPEN_THOUGHTS": terminal})
        closing = Grammar(f"({_GAP} {literal(self.closing, self.special_id)})?")
        return sequence(begun, calls.rest, closing, *(() if calls.after is None else (calls.after,)))

    def _is_token(self, marker: str) -> bool:
        return self.special_id(marker) is not None

    @property
    def _closed(self) -> str:
        """Expression for text up to and including a closing marker that ends its line or is not quoted."""
        close, before = escaped(self.closing), _before_tag(is_tag=self.closing.startswith("<"))
        return rf"(({before}|{self._start}){close}|{ANY}{close}[ \t\r]*\n)"

    def _begun(self, marker: str) -> str:
        """Return an expression for text up to and including a marker at the start of a line or of the reasoning."""
        return rf"({ANY}\n[ \t]*|{self._start}){escaped(marker)}"

    @property
    def _start(self) -> str:
        """Expression for the white space and repeated opening markers that are ignored at the start of reasoning."""
        again = "" if self._is_token(self.opening) else f"({escaped(self.opening)}{SPACE})*"
        return f"{SPACE}{again}"


def _before_tag(*, is_tag: bool) -> str:
    """Return an expression for text before a marker that the reply parser treats as a marker, not as quoted text.

    Such a marker starts a line or follows a word; a tag may also follow the space after a sentence.
    """
    word = rf"[^{_OPENING}\s\x1c-\x1f]|{_SENTENCE_END}" if is_tag else f"[^{_OPENING}]"
    return rf"(({ANY}\n)?[ \t]*|{ANY}({word}))"


def _lazy(name: str, terminal: str) -> Grammar:
    rules: Mapping[str, str] = {f"{name}[lazy]": name.upper(), name.upper(): terminal}
    return Grammar(name, rules)
