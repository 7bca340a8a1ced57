"""Convert texts, token ids and conversations to prompts: render chat templates and tokenize."""

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

_CONTEXT_CHARACTERS = 512  # number of earlier characters that the tokenizer needs to continue a text
_PROBE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "a reply to a question"})
_TokensAfter = Callable[[Transcript, str], list[int] | None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenized prompt, with the text or conversation from which it was made."""

    token_ids: tuple[int, ...]  # token ids for the engine
    text: str | None  # tokenized text; None if the client sent token ids
    echo: Echo | None = None  # set if the client requested the prompt before the reply
    conversation: Conversation | None = None  # None if the client sent text or token ids
    breakpoints: tuple[PromptBreakpoint, ...] = ()  # breakpoints with a known token position
    add_special_tokens: bool | None = None  # as passed to `PromptReader`
    reasoning: PromptReasoning = PromptReasoning.ALLOWED  # state of reasoning at the prompt's end


class PromptReader:
    """Thread-safe converter from texts and conversations to prompts; reuses the token ids of known prefixes.

    A text with more characters than `max_tokens` times the length of the longest token is refused before tokenizing,
    because it must have too many tokens.
    """

    def __init__(self, tokenizer: Any, transcripts: Transcripts, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._max_characters = max_tokens * tokenizer.longest_token
        self._tokenizer = tokenizer
        self._transcripts = transcripts
        self._knows_continuations = hasattr(tokenizer, "tokenize_after_tokens")
        self._fits = _fits_of(tokenizer)

    def read(self, tenant: Tenant, prompt: str | Sequence[int], add_special_tokens: bool | None = None) -> Prompt:
        """Return the prompt for a text or a list of token ids.

        Args:
            add_special_tokens: True adds the special tokens that the tokenizer puts around a text, False does not.
                None adds them but does not repeat a begin token at the start of the text.

        Raises:
            ApiError: 400 if the prompt has no tokens, too many tokens, or a non-text token such as an image token.
        """
        if not isinstance(prompt, str):
            self._check_length(len(prompt), self._max_tokens, "tokens")
            return Prompt(self._text_only(tuple(prompt)), None)
        return self._prompt(tenant, prompt, self._continuation, add_special_tokens)

    def read_to_echo(
        self, tenant: Tenant, prompt: str | Sequence[int], add_special_tokens: bool | None = None, *, has_tokens: bool
    ) -> Prompt:
        """Return the prompt as `read` does, with its `echo` set; see `echo_of` for `has_tokens`."""
        found = self.read(tenant, prompt, add_special_tokens)
        return replace(found, echo=echo_of(found.token_ids, found.text, self._tokenizer, has_tokens=has_tokens))

    def read_chat(self, tenant: Tenant, conversation: Conversation, *, add_special_tokens: bool = False) -> Prompt:
        """Render a conversation with the chat template, and tokenize it.

        The token ids of earlier turns are reused unchanged; only the rest of the text is tokenized.

        Args:
            add_special_tokens: True adds the tokenizer's special tokens in addition to the template's.

        Raises:
            ApiError: 400 if there is no template, if the template refuses the messages or does not support their tools
                or calls, or if the prompt is too long or has non-text tokens.
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
        ends = {replace(mark, keep_s=0) for mark in marks}  # a set, because `marked_head` may repeat a breakpoint
        counts = {end: self._tokens_before(end, tenant, conversation, prompt) for end in ends}
        breakpoints, head = _placed(marks[:count], counts), _placed(marks[count:], counts)
        if head and max(head) not in breakpoints:
            breakpoints.append(max(head))
        return replace(prompt, conversation=conversation, breakpoints=tuple(breakpoints))

    def begun_reply(self, prompt: Prompt) -> BegunReply:
        """Return the beginning of the reply that a conversation's prompt already contains."""
        assert prompt.conversation is not None and prompt.text is not None
        return begun_reply(prompt.conversation, prompt.text, prompt.token_ids, self._rendered)

    def remember(self, tenant: Tenant, prompt: Prompt, reply: str, reply_ids: Sequence[int]) -> None:
        """Store the token ids of a prompt and its reply for later prompts; ignore empty and non-text replies."""
        add = prompt.add_special_tokens
        # If the tokenizer adds an end token to texts, no text can continue the prompt's tokens.
        ends_text = add is not False and getattr(self._tokenizer, "adds_end_token", False)
        if prompt.text is None or not reply or not self._knows_continuations or ends_text:
            return
        if image_error(self._tokenizer, reply_ids) is not None:
            return
        kind = self._kind_of(add)
        self._transcripts.remember(tenant, prompt.text + reply, (*prompt.token_ids, *reply_ids), kind)

    def rewritten(self, prompt: Prompt, reply: ParsedReply) -> str | None:
        """Return the text of a reply as the template renders it in the next turn's prompt.

        Return None if the next prompt would not begin with this prompt's text, for example because the template drops
        earlier reasoning.
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
        """Return the number of prompt tokens before a breakpoint; None if the template does not render its position."""
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
        """Text that the template renders after a reply; None if it cannot be determined."""
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
        except Exception as error:  # the error type depends on the tokenizer
            raise bad_request(f"the text cannot be tokenized: {error}; send valid Unicode", "prompt") from error
        if not token_ids:
            raise bad_request("the prompt is empty; it must have at least 1 token", "prompt")
        return Prompt(self._text_only(token_ids), text, add_special_tokens=add)

    def _text_only(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return `token_ids`; raise `ApiError` 400 if one is not a text token, such as an image token."""
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
        """Return the argument `adds` for `Transcripts`: None if the tokenizer adds no special tokens, else `add`."""
        return add if getattr(self._tokenizer, "adds_special_tokens", False) else None

    def _next_turn(self, known: Transcript, rest: str) -> list[int] | None:
        return self._tokenizer.tokenize_after_tokens(known.token_ids, rest)

    def _continuation(self, known: Transcript, rest: str) -> list[int] | None:
        return self._tokenizer.tokenize_after_text(known.text[-_CONTEXT_CHARACTERS:], rest)


def template_of(tokenizer: Any, *, has_tools: bool) -> str:
    """Return the source of the chat template for chats with or without tools; "" if the tokenizer has none."""
    found: str = getattr(tokenizer, "chat_template", "")
    return getattr(tokenizer, "tool_template", found) if has_tools else found


def _fits_of(tokenizer: Any) -> Mapping[bool, TemplateFit]:
    """Return a `TemplateFit` for chats with tools (key True) and one for chats without tools (key False)."""
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
    """Convert breakpoints to token positions; drop breakpoints with an unknown position."""
    counted = [(counts[replace(mark, keep_s=0)], mark.keep_s) for mark in marks]
    return [PromptBreakpoint(count, keep_s) for count, keep_s in counted if count is not None]
