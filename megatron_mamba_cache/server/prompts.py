"""From what a client sends to the token ids of a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import TOO_LONG, bad_request
from .tenants import Tenant
from .transcripts import Transcripts


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Args:
        token_ids: What the engine reads.
        text: What it was made of; None if the client gave token ids.
    """

    token_ids: tuple[int, ...]
    text: str | None


class PromptReader:
    """Tokenizes prompts, of a text that it knows the exact tokens of only what is new.

    Threads may share it. A prompt that cannot have few enough tokens is refused before it takes time and memory.

    Args:
        max_tokens: Of a prompt. A text has `max_tokens` times the characters of the longest token at most, though a
            tokenizer that drops characters could do with fewer tokens.
    """

    def __init__(self, tokenizer: Any, transcripts: Transcripts, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._max_characters = max_tokens * tokenizer.longest_token
        self._tokenizer = tokenizer
        self._transcripts = transcripts
        self._knows_continuations = hasattr(tokenizer, "tokenize_behind")

    def read(self, tenant: Tenant, prompt: str | Sequence[int]) -> Prompt:
        """Return a prompt of text or token ids.

        Raises:
            ApiError: 400 if the text has no tokens, or the prompt too many.
        """
        if not isinstance(prompt, str):
            self._check_length(len(prompt), self._max_tokens, "tokens")
            return Prompt(tuple(prompt), None)
        self._check_length(len(prompt), self._max_characters, "characters")
        try:
            token_ids = tuple(self._token_ids(tenant, prompt))
        except Exception as error:  # each tokenizer raises errors of its own
            raise bad_request(f"the prompt cannot be tokenized: {error}", "prompt") from error
        if not token_ids:
            raise bad_request("the prompt is empty; at least 1 token is needed", "prompt")
        return Prompt(token_ids, prompt)

    def read_chat(self, tenant: Tenant, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Return the prompt of a conversation, rendered by the model directory's chat template.

        Raises:
            ApiError: 400 if there is no template, or it refuses the messages.
        """
        render = getattr(self._tokenizer, "render_chat", None)
        if render is None:
            raise bad_request("this model has no chat template; use /v1/completions", "messages")
        try:
            text = render(messages)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error
        return self.read(tenant, text)

    def remember(self, tenant: Tenant, prompt: Prompt, reply: str, reply_ids: Sequence[int]) -> None:
        """Keep the exact tokens of a prompt and of a reply as the client has it."""
        if prompt.text is not None and self._knows_continuations:
            self._transcripts.remember(tenant, prompt.text + reply, (*prompt.token_ids, *reply_ids))

    def _check_length(self, length: int, limit: int, unit: str) -> None:
        if length > limit:
            raise bad_request(
                f"the prompt has {length} {unit}, and at most {limit} fit: max_sequence_length is {self._max_tokens}",
                "prompt",
                TOO_LONG,
            )

    def _token_ids(self, tenant: Tenant, text: str) -> Sequence[int]:
        known = self._transcripts.longest(tenant, text) if self._knows_continuations else None
        if known is not None:
            rest = text[len(known.text) :]
            behind = self._tokenizer.tokenize_behind(known.token_ids, rest) if rest else []
            if behind is not None:
                return (*known.token_ids, *behind)
        return self._tokenizer.tokenize(text)  # type: ignore[no-any-return]
