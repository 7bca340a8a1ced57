"""Prompts: render and tokenize the texts and conversations that clients send."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..models.tokenizers.token_reader import image_error
from ..policy.request_settings import PromptBreakpoint
from .begun_reply import BegunReply, begun_reply
from .conversation import MARKING_TOOL, Breakpoint, Conversation
from .echo import Echo, echo_of
from .errors import ApiError, bad_request, too_long
from .parsers.parts import ParsedReply
from .parsers.reasoning import PromptReasoning
from .template_fit import TemplateFit
from .tenants import Tenant
from .text_stream import common_length
from .transcripts import Transcript, Transcripts

_CONTEXT_CHARACTERS = 512  # more than enough to decide where a token ends
_PROBE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "a reply to a question"})
_TokensAfter = Callable[[Transcript, str], list[int] | None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenized prompt and its source."""

    token_ids: tuple[int, ...]  # input to the engine
    text: str | None  # text that was tokenized; None if the client sent token ids
    echo: Echo | None = None  # text to send before the reply; None: nothing
    conversation: Conversation | None = None  # source of the rendered text; None if the client sent text or token ids
    breakpoints: tuple[PromptBreakpoint, ...] = ()  # the conversation's breakpoints that have a known position
    add_special_tokens: bool | None = None  # argument of `PromptReader.read`
    reasoning: PromptReasoning = PromptReasoning.ALLOWED  # state at the end of the prompt


class PromptReader:
    """Tokenizer of prompts that reuses the exact tokens of known prefixes. Thread-safe.

    A text with more characters than `max_tokens` times the length of the longest token is refused before tokenizing,
    because it certainly has too many tokens.
    """

    def __init__(self, tokenizer: Any, transcripts: Transcripts, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._max_characters = max_tokens * tokenizer.longest_token
        self._tokenizer = tokenizer
        self._transcripts = transcripts
        self._knows_continuations = hasattr(tokenizer, "tokenize_after_tokens")
        self._fits = _fits_of(tokenizer)

    def read(self, tenant: Tenant, prompt: str | Sequence[int], add_special_tokens: bool | None = None) -> Prompt:
        """Return the prompt for a text or token ids.

        Args:
            add_special_tokens: For tokenizers that add special tokens around a text. True adds them; False does not;
                None adds them, except for a begin token that the text already contains.

        Raises:
            ApiError: 400 if the prompt has no tokens, too many tokens, or a token that is not text.
        """
        if not isinstance(prompt, str):
            self._check_length(len(prompt), self._max_tokens, "tokens")
            return Prompt(self._text_only(tuple(prompt)), None)
        return self._prompt(tenant, prompt, self._continuation, add_special_tokens)

    def read_to_echo(
        self, tenant: Tenant, prompt: str | Sequence[int], add_special_tokens: bool | None = None, *, has_tokens: bool
    ) -> Prompt:
        """Return the prompt as `read` does, together with the echo that `echo_of` returns for it."""
        found = self.read(tenant, prompt, add_special_tokens)
        return replace(found, echo=echo_of(found.token_ids, found.text, self._tokenizer, has_tokens=has_tokens))

    def read_chat(self, tenant: Tenant, conversation: Conversation, *, add_special_tokens: bool = False) -> Prompt:
        """Return the prompt that the chat template renders from a conversation.

        Known tokens are reused wherever they end, because the template writes text after each message.

        Args:
            add_special_tokens: True adds the tokenizer's special tokens to the special tokens that the template writes.

        Raises:
            ApiError: 400 if there is no template; if the template does not render tools or calls, or refuses the
                messages; or if the prompt is too long or has tokens that are not text.
        """
        template = template_of(self._tokenizer, has_tools=bool(conversation.tools))
        if not template:
            raise bad_request("this model has no chat template; use /v1/completions", "messages")
        if conversation.tools and "tools" not in template:
            raise bad_request("this model's chat template does not support tools; leave them out", "tools")
        if conversation.has_calls and "tool_calls" not in template and "tools" not in template:
            raise bad_request("this model's chat template does not support tool calls; leave them out", "messages")
        fit = self._fits[bool(conversation.tools)]
        conversation = fit.efforts.fitted(conversation)
        fit.note_unread_values(conversation)
        count = len(conversation.breakpoints)
        marks = (*conversation.breakpoints, *conversation.marked_head)
        conversation = fit.fitted(replace(conversation, breakpoints=marks))
        prompt = self._prompt(tenant, self._rendered(conversation), self._next_turn, add_special_tokens)
        marks = conversation.breakpoints
        ends = {replace(mark, keep_s=0) for mark in marks}  # removes duplicates: a mark in the head may be set already
        counts = {end: self._tokens_before(end, tenant, conversation, prompt) for end in ends}
        breakpoints, head = _placed(marks[:count], counts), _placed(marks[count:], counts)
        if head and max(head) not in breakpoints:
            breakpoints.append(max(head))
        return replace(prompt, conversation=conversation, breakpoints=tuple(breakpoints))

    def begun_reply(self, prompt: Prompt) -> BegunReply:
        """Return the beginning of the reply that is at the end of a conversation's prompt."""
        assert prompt.conversation is not None and prompt.text is not None
        return begun_reply(prompt.conversation, prompt.text, prompt.token_ids, self._rendered)

    def remember(self, tenant: Tenant, prompt: Prompt, reply: str, reply_ids: Sequence[int]) -> None:
        """Store the exact tokens of a prompt and its reply, unless the reply is empty or has non-text tokens."""
        add = prompt.add_special_tokens
        ends_text = add is not False and getattr(self._tokenizer, "adds_end_token", False)  # then no text follows
        if prompt.text is None or not reply or not self._knows_continuations or ends_text:
            return
        if image_error(self._tokenizer, reply_ids) is not None:
            return
        kind = self._kind_of(add)
        self._transcripts.remember(tenant, prompt.text + reply, (*prompt.token_ids, *reply_ids), kind)

    def rewritten(self, prompt: Prompt, reply: ParsedReply) -> str | None:
        """Return the text that the template writes for a reply in the next turn's prompt.

        None if the next prompt does not begin with this prompt's text, for example because reasoning is dropped.
        """
        if prompt.conversation is None or prompt.text is None or self._turn_end is None:
            return None
        try:
            fit = self._fits[bool(prompt.conversation.tools)]
            text = self._rendered(fit.fitted(prompt.conversation.answered(reply)))
        except ApiError:
            return None
        if not text.startswith(prompt.text) or not text.endswith(self._turn_end):
            return None
        return text[len(prompt.text) : len(text) - len(self._turn_end)]

    def _tokens_before(
        self, mark: Breakpoint, tenant: Tenant, conversation: Conversation, prompt: Prompt
    ) -> int | None:
        """Return the number of prompt tokens that certainly end before a breakpoint; None if unknown."""
        assert prompt.text is not None
        try:
            marked = self._rendered(conversation.marked(mark))
        except ApiError:
            return None
        if marked == prompt.text:
            return None
        end = common_length(prompt.text, marked)
        add = prompt.add_special_tokens
        before = self._token_ids(tenant, prompt.text[:end], self._next_turn, add) if end else ()
        return common_length(prompt.token_ids, tuple(before))

    @cached_property
    def _turn_end(self) -> str | None:
        """Text that the template writes after a reply; None if unknown."""
        try:
            text = self._rendered(Conversation(_PROBE, adds_prompt=False))
        except ApiError:
            return None
        return text.rpartition(_PROBE[-1]["content"])[2] if _PROBE[-1]["content"] in text else None

    def _rendered(self, conversation: Conversation) -> str:
        try:
            return conversation.text(self._tokenizer)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    def _check_length(self, length: int, limit: int, unit: str) -> None:
        if length > limit:
            raise too_long(f"the prompt has {length} {unit}, and at most {limit} fit in the context", self._max_tokens)

    def _prompt(self, tenant: Tenant, text: str, tokens_after: _TokensAfter, add: bool | None) -> Prompt:
        self._check_length(len(text), self._max_characters, "characters")
        try:
            token_ids = tuple(self._token_ids(tenant, text, tokens_after, add))
        except Exception as error:  # tokenizers raise different errors
            raise bad_request(f"the text cannot be tokenized: {error}; send valid Unicode", "prompt") from error
        if not token_ids:
            raise bad_request("the prompt is empty; at least 1 token is needed", "prompt")
        return Prompt(self._text_only(token_ids), text, add_special_tokens=add)

    def _text_only(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the token ids; raise `ApiError` 400 if a token is not text."""
        reason = image_error(self._tokenizer, token_ids)
        if reason is not None:
            raise bad_request(reason, "prompt", "not_text")
        return token_ids

    def _token_ids(self, tenant: Tenant, text: str, tokens_after: _TokensAfter, add: bool | None) -> Sequence[int]:
        kind = self._kind_of(add)
        known = self._transcripts.longest(tenant, text, kind) if self._knows_continuations else None
        if known is not None:
            rest = text[len(known.text) :]
            new = tokens_after(known, rest) if rest else []
            if new is not None:
                return (*known.token_ids, *new)
        if add is None:
            return self._tokenizer.tokenize(text)
        return self._tokenizer.tokenize(text, add_special_tokens=add)

    def _kind_of(self, add: bool | None) -> bool | None:
        """Return the argument `adds` for transcripts: `add`, or None if the tokenizer adds no special tokens."""
        return add if getattr(self._tokenizer, "adds_special_tokens", False) else None

    def _next_turn(self, known: Transcript, rest: str) -> list[int] | None:
        return self._tokenizer.tokenize_after_tokens(known.token_ids, rest)

    def _continuation(self, known: Transcript, rest: str) -> list[int] | None:
        return self._tokenizer.tokenize_after_text(known.text[-_CONTEXT_CHARACTERS:], rest)


def template_of(tokenizer: Any, *, has_tools: bool) -> str:
    """Return the source of the chat template for chats with or without tools; "" if there is no template."""
    found: str = getattr(tokenizer, "chat_template", "")
    return getattr(tokenizer, "tool_template", found) if has_tools else found


def _fits_of(tokenizer: Any) -> Mapping[bool, TemplateFit]:
    """Return the template fits for chats with tools (True) and without tools (False)."""
    plain, with_tools = (template_of(tokenizer, has_tools=has_tools) for has_tools in (False, True))
    if plain == with_tools:
        return dict.fromkeys((False, True), TemplateFit(lambda conversation: conversation.text(tokenizer), plain))

    def text_with_tools(conversation: Conversation) -> str:
        return replace(conversation, tools=conversation.tools or (MARKING_TOOL,)).text(tokenizer)

    return {
        False: TemplateFit(lambda conversation: replace(conversation, tools=()).text(tokenizer), plain),
        True: TemplateFit(text_with_tools, with_tools),
    }


def _placed(marks: Sequence[Breakpoint], counts: Mapping[Breakpoint, int | None]) -> list[PromptBreakpoint]:
    """Return the breakpoints with a known position, as token counts."""
    counted = [(counts[replace(mark, keep_s=0)], mark.keep_s) for mark in marks]
    return [PromptBreakpoint(count, keep_s) for count, keep_s in counted if count is not None]
