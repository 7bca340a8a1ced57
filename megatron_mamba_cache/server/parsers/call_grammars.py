"""Grammars that constrain tool calls to the formats that the parsers in `families` read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...grammars.forms import (
    Grammar,
    SpecialId,
    any_of,
    escaped,
    json_grammar,
    literal,
    named,
    quoted,
    sequence,
    without,
)
from ...grammars.reasoning import CallsInReasoning
from .xml_call_grammars import CallableTool, xml_call

_MOST_CALLS = 16
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """Grammar factory for a call format in which a marker such as `<tool_call>` precedes the calls."""

    marker: str  # text before each call or before a list of calls
    # Returns the grammar for the text after a marker. The integer is the maximum length of a list of calls.
    rest: Callable[[Sequence[CallableTool], SpecialId, int], Grammar]
    separator: str | None = None  # grammar rule between calls; None: one marker precedes a list of calls
    others: tuple[str, ...] = ()  # other texts that the parser treats as the start of a call

    def calls(self, tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
        """Return the grammar for at least 1 and at most `most` calls."""
        return sequence(Grammar(literal(self.marker, special_id)), self.rest_of_calls(tools, special_id, most))

    def rest_of_calls(self, tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
        """Return the grammar for 1 to `most` calls, without the first marker."""
        rest = named("call", self.rest(tools, special_id, most))
        if self.separator is None or most == 1:
            return rest
        others = f"({self.separator} {literal(self.marker, special_id)} {rest.rule}){{0,{most - 1}}}"
        return replace(rest, rule=f"{rest.rule} {others}")

    def text_and_calls(self, tools: Sequence[CallableTool], special_id: SpecialId) -> Grammar:
        """Return the grammar for free text with any number of calls, which may only call `tools`."""
        number = special_id(self.marker)
        rules = {"TEXT": f"/(.|\\n)*/ & {without(self.marker, *self.others)}"}
        begun = f"TEXT <[{number}]>"
        if number is None:
            marker = escaped(self.marker)
            marked = f"/((.|\\n)*\\n)?[ \\t]*{marker}/ & ~/(.|\\n)*{marker}(.|\\n)+/"
            others = f" & {without(*self.others)}" if self.others else ""
            rules |= {"text_and_marker[lazy]": "TEXT_AND_MARKER", "TEXT_AND_MARKER": marked + others}
            begun = "text_and_marker"
        rest = named("call", self.rest(tools, special_id, _MOST_CALLS))
        return Grammar(f"({begun} {rest.rule})* TEXT", rules | dict(rest.rules or {}), rest.parts)


def _hermes_rest(tools: Sequence[CallableTool], special_id: SpecialId, _most: int) -> Grammar:
    closing = Grammar(literal("\n</tool_call>", special_id))
    return sequence(Grammar(quoted("\n")), _json_call(tools, "arguments"), closing)


def _nemotron_rest(tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
    closing = Grammar(literal("]</TOOLCALL>", special_id))
    return sequence(Grammar(quoted("[")), _repeated(_json_call(tools, "arguments"), quoted(", "), most), closing)


def _granite_rest(tools: Sequence[CallableTool], _special_id: SpecialId, most: int) -> Grammar:
    calls = _repeated(_json_call(tools, "arguments"), quoted(", "), most)
    return sequence(Grammar(quoted("[")), calls, Grammar(quoted("]")))


def _xml_rest(tools: Sequence[CallableTool], special_id: SpecialId, _most: int) -> Grammar:
    return any_of(*(xml_call(tool, number, special_id) for number, tool in enumerate(tools)))


MARKED_CALLS: Mapping[str, MarkedCalls] = {
    "hermes": MarkedCalls("<tool_call>", _hermes_rest, quoted("\n")),
    "qwen3_coder": MarkedCalls("<tool_call>", _xml_rest, quoted("\n"), ("<function=",)),
    "nemotron_nano_v2": MarkedCalls("<TOOLCALL>", _nemotron_rest),
    "granite": MarkedCalls("<|tool_call|>", _granite_rest, others=("<tool_call>",)),
}
"""Call formats by their names in `TOOL_CALL_PARSERS`; `json` is missing because it has no marker."""


def calls_grammar(family: str, tools: Sequence[CallableTool], special_id: SpecialId, *, only_one: bool) -> Grammar:
    """Return the grammar for a reply that consists of one or more calls; exactly one if `only_one`."""
    form = MARKED_CALLS.get(family)
    if form is None:
        return _json_call(tools, "parameters")
    return form.calls(tools, special_id, 1 if only_one else _MOST_CALLS)


def text_and_calls_grammar(family: str, tools: Sequence[CallableTool], special_id: SpecialId) -> Grammar | None:
    """Return the grammar for text with optional calls; None if the family's call format has no marker."""
    form = MARKED_CALLS.get(family)
    return None if form is None else form.text_and_calls(tools, special_id)


def calls_in_reasoning(
    family: str, tools: Sequence[CallableTool], special_id: SpecialId, *, only_one: bool, after: Grammar | None = None
) -> CallsInReasoning | None:
    """Return the grammar for calls that begin within reasoning and end it; None if the call format has no marker.

    `after` is the grammar for the text after the calls; if it is None, the reply ends with the calls.
    """
    form = MARKED_CALLS.get(family)
    if form is None:
        return None
    most = 1 if only_one else _MOST_CALLS
    return CallsInReasoning(form.marker, form.rest_of_calls(tools, special_id, most), after)


def _json_call(tools: Sequence[CallableTool], key: str) -> Grammar:
    return any_of(
        *(
            sequence(
                Grammar(quoted(f'{{"name": {quoted(tool.name)}, "{key}": ')),
                json_grammar(
                    _ANY_OBJECT if tool.parameters is None else tool.parameters,
                    f"arguments{number}",
                    f"the parameters of {tool.name}",
                ),
                Grammar(quoted("}")),
            )
            for number, tool in enumerate(tools)
        )
    )


def _repeated(grammar: Grammar, separator: str, most: int) -> Grammar:
    if most == 1:
        return grammar
    rule = f"({grammar.rule}) ({separator} ({grammar.rule})){{0,{most - 1}}}"
    return Grammar(rule, grammar.rules, grammar.parts)
