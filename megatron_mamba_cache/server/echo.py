"""The completion option `echo`: send the prompt before the reply, with log-probs if requested."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..models.tokenizers.token_reader import TokenReader
from .backend import Progress
from .reply import Piece, TokenInfo, scored_token
from .text_stream import IncrementalText


@dataclass(frozen=True, slots=True)
class Echo:
    """Text of a prompt to send before the reply, with its tokens if log-probs are requested."""

    text: str  # the client's text, or the decoded token ids
    reader: TokenReader
    tokens: Sequence[int] = ()  # empty unless log-probs are requested
    offsets: Sequence[int] = ()  # number of characters before each token

    def piece(self, progress: Progress) -> Piece:
        """Return the echo as the reply's first piece; the reply's first `progress` has the prompt's log-probs."""
        return Piece(self.text, self._scored(progress), is_prompt=True)

    def _scored(self, progress: Progress) -> tuple[TokenInfo, ...]:
        if not self.tokens:
            return ()
        log_probs = (None, *progress.prompt_log_probs)  # the first token has no log-prob
        best: Sequence[Mapping[int, float]] = ({}, *(progress.prompt_alternatives or [{}] * (len(self.tokens) - 1)))
        scored = zip(self.tokens, log_probs, best, self.offsets, strict=True)
        return tuple(scored_token(self.reader, *token) for token in scored)


def echo_of(token_ids: Sequence[int], text: str | None, tokenizer: Any, *, has_tokens: bool) -> Echo:
    """Return the echo of a prompt. This takes about as long as tokenizing the prompt.

    If `text` is None, the echo has the decoded token ids. If `has_tokens`, it includes the tokens and their offsets.
    """
    reader = TokenReader(tokenizer)
    if not has_tokens:
        return Echo(reader.text(token_ids) if text is None else text, reader)
    find: Callable[..., list[int] | None] = getattr(tokenizer, "offsets", lambda _text, _tokens: None)
    known = None if text is None else find(text, token_ids)
    if known is not None:
        return Echo(str(text), reader, token_ids, known)
    if text is None:
        text = reader.text(token_ids)
    elif (spelled := TokenReader(tokenizer, shown=None)).text(token_ids) == text:
        reader = spelled  # the client's text spells out special tokens, so show them
    stream, offsets = IncrementalText(reader), []
    for token in token_ids:
        offsets.append(min(stream.offset, len(text)))
        stream.push(token)
    return Echo(text, reader, token_ids, offsets)
