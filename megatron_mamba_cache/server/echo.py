"""The echo of a prompt before its reply, with its tokens' log-probs if requested."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .backend import Progress
from .reply import Piece, TokenInfo, TokenTexts
from .text_stream import IncrementalText


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is echoed.

    Args:
        text: As the client sent it, or the text of its token ids.
        tokens: With their texts and offsets; empty unless log-probs are requested.
    """

    text: str
    tokens: tuple[TokenInfo, ...] = ()

    def piece(self, progress: Progress) -> Piece:
        """Return the piece before a reply; `progress` is the reply's first and has the prompt's log-probs."""
        return Piece(self.text, self._scored(progress), is_prompt=True)

    def _scored(self, progress: Progress) -> tuple[TokenInfo, ...]:
        first, others = self.tokens[:1], self.tokens[1:]
        best: Sequence[Mapping[str, float]] = progress.prompt_alternatives or [{}] * len(others)
        return first + tuple(
            replace(token, log_prob=log_prob, alternatives=alternatives)
            for token, log_prob, alternatives in zip(others, progress.prompt_log_probs, best, strict=True)
        )


def echo_of(token_ids: Sequence[int], text: str | None, tokenizer: TokenTexts, *, has_tokens: bool) -> Echo:
    """Return the echo of a prompt; like tokenizing, this takes time.

    Args:
        text: The prompt's text; None uses the text of the token ids.
        has_tokens: Whether the echo has the prompt's tokens.
    """
    if not has_tokens:
        return Echo(tokenizer.detokenize(list(token_ids)) if text is None else text)
    stream, parts, tokens, offset = IncrementalText(tokenizer.detokenize), [], [], 0
    for token in token_ids:
        tokens.append(TokenInfo(token, tokenizer.detokenize([token]), offset=offset))
        parts.append(stream.push(token))
        offset += len(parts[-1])
    parts.append(stream.finish())
    return Echo("".join(parts) if text is None else text, tuple(tokens))
