"""Grammars that constrain replies to an answer format or to tool calls, after optional reasoning."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import GrammarError
from ..grammars.compiler import Grammars
from ..grammars.forms import Grammar, SpecialId, any_of
from ..grammars.reasoning import CallsInReasoning, ReasoningGrammar
from .errors import bad_request
from .parsers.call_grammars import calls_grammar, calls_in_reasoning, text_and_calls_grammar
from .parsers.families import ReplySyntax
from .parsers.reasoning import PromptReasoning, ReasoningForm
from .parsers.xml_call_grammars import CallableTool
from .prompts import Prompt
from .tool_schemas import ChosenTools, NamedTool

_TOOLS, _CHOICE = "tools", "tool_choice"


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """Grammar that constrains replies, with the markers of the reasoning that may come first."""

    field: str  # request field that requires the grammar, for error messages
    grammar: Grammar  # grammar for the text after reasoning
    reasoning: ReasoningForm | None  # None: the grammar applies from the first token
    special_id: SpecialId  # returns the token id of a tag; None if the tag is not a token
    calls: CallsInReasoning | None = None  # calls that may end reasoning; None: no calls

    def grammar_after(self, prompt: Prompt) -> str:
        """Return the grammar for replies to a prompt, as text. It includes reasoning that the prompt has not closed."""
        form = self.reasoning
        if form is None or prompt.reasoning is PromptReasoning.DONE:
            return self.grammar.text
        is_open = prompt.reasoning is PromptReasoning.OPEN
        reasoning = ReasoningGrammar(form.open, form.close, self.special_id)
        return reasoning.before(self.grammar, self.calls, is_open=is_open).text

    def check(self, grammars: Grammars, prompts: Iterable[Prompt]) -> None:
        """Compile the grammars for the prompts' replies; raise `ApiError` 400 if compilation fails."""
        for text in dict.fromkeys(map(self.grammar_after, prompts)):
            reason = grammars.error_of(text)
            if reason is not None:
                raise bad_request(f"{self.field}: {reason}", self.field, "unsupported_form")


class FormMaker:
    """Creates the `ReplyForm` for a request; `syntax` is the model's reply syntax."""

    def __init__(self, syntax: ReplySyntax, tokenizer: Any) -> None:
        self._syntax = syntax
        self._tag_ids = syntax.tag_ids(tokenizer)

    def answer(self, field: str, grammar: Grammar) -> ReplyForm:
        """Return the `ReplyForm` for a completion constrained by `grammar`; completions have no reasoning."""
        return ReplyForm(field, grammar, None, self._tag_ids.get)

    def chat(
        self, answer: tuple[str, Grammar] | None, chosen: ChosenTools, may_call_several: bool | None
    ) -> ReplyForm | None:
        """Return the `ReplyForm` for a chat reply; None if any text is allowed.

        Args:
            answer: Constraint on the answer, as (request field, grammar); None allows any answer.
            chosen: Tools that the reply may or must call.
            may_call_several: False allows only one call.

        Raises:
            ApiError: 400 if a call is required but the tool does not exist or the model's call format is unknown.
        """
        choice, tools = chosen.choice, chosen.tools
        is_forced = choice == "required" or isinstance(choice, NamedTool)
        if not is_forced and answer is None and choice != "none":
            return self._strict_calls(chosen)
        if not is_forced and (answer is None or not tools or choice == "none" or self._syntax.tool_calls is None):
            return None if answer is None else self._after_reasoning(*answer)
        callable_tools = [_callable(tool["function"]) for tool in tools]
        if isinstance(choice, NamedTool):
            callable_tools = [tool for tool in callable_tools if tool.name == choice.function.name]
            if not callable_tools:
                raise bad_request(f"{_CHOICE} names {choice.function.name!r:.100}, which is not in {_TOOLS}", _CHOICE)
        if not callable_tools:
            raise bad_request(f"{_CHOICE} requires a call, but the request has no {_TOOLS}", _CHOICE)
        if self._syntax.tool_calls is None:
            reason = "a call cannot be required because this model's call format is unknown; start serve with"
            raise bad_request(f"{reason} --tool-call-parser, or send tool_choice auto", _CHOICE)
        only_one = may_call_several is False or isinstance(choice, NamedTool)
        family = self._syntax.tool_calls
        with _refusing_tools():
            calls = calls_grammar(family, callable_tools, self._tag_ids.get, only_one=only_one)
            begun = calls_in_reasoning(family, callable_tools, self._tag_ids.get, only_one=only_one)
        if is_forced:
            return self._after_reasoning(_TOOLS, calls, begun)
        assert answer is not None
        field, grammar = answer
        return self._after_reasoning(field, any_of(calls, grammar), begun)

    def _strict_calls(self, chosen: ChosenTools) -> ReplyForm | None:
        """Return a form for optional tool calls if a tool is strict or only some may be called; otherwise None."""
        functions = [tool["function"] for tool in chosen.tools]
        is_constrained = chosen.are_some or any(function.get("strict") for function in functions)
        family = self._syntax.tool_calls
        if family is None or not is_constrained:
            return None
        callable_tools = [
            _callable(function) if function.get("strict") else CallableTool(function["name"], None)
            for function in functions
        ]
        with _refusing_tools():
            grammar = text_and_calls_grammar(family, callable_tools, self._tag_ids.get)
            begun = calls_in_reasoning(family, callable_tools, self._tag_ids.get, only_one=False, after=grammar)
        return None if grammar is None else self._after_reasoning(_TOOLS, grammar, begun)

    def _after_reasoning(self, field: str, grammar: Grammar, calls: CallsInReasoning | None = None) -> ReplyForm:
        return ReplyForm(field, grammar, self._syntax.reasoning, self._tag_ids.get, calls)


@contextmanager
def _refusing_tools() -> Iterator[None]:
    """Context manager that converts a `GrammarError` for a tool's schema to `ApiError` 400."""
    try:
        yield
    except GrammarError as error:
        raise bad_request(f"{_TOOLS}: {error}", _TOOLS, "unsupported_form") from error


def _callable(function: Mapping[str, Any]) -> CallableTool:
    parameters = function.get("parameters")
    return CallableTool(function["name"], parameters) if parameters else CallableTool(function["name"])
