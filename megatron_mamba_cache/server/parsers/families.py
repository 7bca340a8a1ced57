"""Select the tool-call and reasoning parsers for a model, by name or from its chat template.

Each format has a name, a text that identifies it in chat templates, and a parser that reads a `TextFeed`. The module
`call_grammars` has a grammar for each tool-call format.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import json_calls, reasoning
from .content import MarkedCalls, Reading
from .parts import Parsing, ReplyParser, plain_text
from .reasoning import ReasoningForm
from .text_feed import TextFeed
from .xml_calls import XmlCalls

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class _ConstrainedCalls:
    """Call syntax restricted to the first marker, for replies that a grammar constrains."""

    calls: MarkedCalls

    @property
    def open(self) -> Sequence[str]:
        return self.calls.open[:1]

    def call(self, feed: TextFeed, marker: str) -> Reading:
        return self.calls.call(feed, marker)


class CallForm(MarkedCalls, Protocol):
    """Interface of a parser for replies with a model family's tool calls."""

    def parse(self, feed: TextFeed) -> Parsing:
        """Parse content and calls up to the end of the reply."""


Parameters = Mapping[str, Mapping[str, Any]]
"""JSON schema for each tool's parameters, by tool name."""

TOOL_CALL_PARSERS: Mapping[str, Callable[[Parameters], CallForm]] = {
    "hermes": lambda _parameters: json_calls.HERMES,
    "qwen3_coder": XmlCalls,
    "nemotron_nano_v2": lambda _parameters: json_calls.NEMOTRON_NANO_V2,
    "granite": lambda _parameters: json_calls.GRANITE,
    "json": lambda _parameters: json_calls.PLAIN_JSON,
}
REASONING_PARSERS: Mapping[str, ReasoningForm] = {
    "think": reasoning.THINK,
    "deepseek_r1": reasoning.DEEPSEEK_R1,
    "granite": reasoning.GRANITE,
}
_TOOL_CALL_SIGNS = {
    "<function=": "qwen3_coder",
    "<TOOLCALL>": "nemotron_nano_v2",
    "<|tool_call|>": "granite",
    "<tool_call>": "hermes",
    '"parameters"': "json",
}
_REASONING_SIGNS = {"</think>": "think", reasoning.GRANITE.open: "granite"}
_TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>",
    "<function=", "</function>", "<parameter=", "</parameter>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplySyntax:
    """Tool-call and reasoning formats of a model's replies."""

    tool_calls: str | None = None  # a name in `TOOL_CALL_PARSERS`; None: the model cannot call tools
    reasoning: ReasoningForm | None = None  # None: replies are parsed without reasoning

    def tag_ids(self, tokenizer: Any) -> Mapping[str, int]:
        """Return the token ids of reply tags, by tag; omit tags that are not added tokens of the tokenizer."""
        added = getattr(tokenizer, "added_ids", getattr(tokenizer, "special_ids", ()))
        tags = _TAGS if added and (self.tool_calls or self.reasoning) else ()
        return {tag: number for tag in tags if (number := tokenizer.id_of(tag)) in added}

    def parser(
        self,
        parameters: Parameters | None,
        is_open: bool = False,
        token_tags: Collection[str] = (),
        *,
        is_constrained: bool = False,
    ) -> ReplyParser:
        """Create a parser for one reply.

        Args:
            parameters: Schemas of the tools' parameters, by tool name; None if the reply may not call tools.
            is_open: True if the prompt ends within reasoning.
            token_tags: Tags that are single tokens.
            is_constrained: True if a grammar constrains the reply. Within reasoning, only the first marker then begins
                calls.
        """
        name = self.tool_calls if parameters is not None else None
        calls = None if name is None or parameters is None else TOOL_CALL_PARSERS[name](parameters)
        form = self.reasoning

        def parse(feed: TextFeed) -> Parsing:
            if form is not None:
                yield from form.parse(
                    feed, is_open=is_open, calls=_ConstrainedCalls(calls) if calls and is_constrained else calls
                )
            yield from plain_text(feed) if calls is None else calls.parse(feed)

        return ReplyParser(parse, token_tags, is_constrained=is_constrained)


def reply_syntax(template: str, tool_calls: str = AUTO, reasoning: str = AUTO) -> ReplySyntax:
    """Return the reply syntax for a model.

    Args:
        template: Source of the model's chat template; "" if it has none.
        tool_calls: A name in `TOOL_CALL_PARSERS`, "auto" to detect the format from the template, or "none".
        reasoning: A name in `REASONING_PARSERS`, "auto" or "none".
    """
    if tool_calls == AUTO:
        tool_calls = _by_sign(_TOOL_CALL_SIGNS, template) if "tools" in template else NONE
    if reasoning == AUTO:
        reasoning = _by_sign(_REASONING_SIGNS, template)
    return ReplySyntax(None if tool_calls == NONE else tool_calls, REASONING_PARSERS.get(reasoning))


def _by_sign(signs: Mapping[str, str], template: str) -> str:
    return next((name for sign, name in signs.items() if sign in template), NONE)
