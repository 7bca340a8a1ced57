"""A tokenizer as llguidance reads it: the bytes of every token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from llguidance import LLTokenizer, TokenizerWrapper

from ..errors import GrammarError


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The attributes that `TokenizerWrapper` reads.

    Args:
        tokens: The bytes of each token, [vocab].
        special_token_ids: Those that stand for no text.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None
    tokenize: Callable[[str], list[int]]

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenize(text.decode(errors="replace") if isinstance(text, bytes) else text)


def read_vocabulary(tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """Return the tokens of a model's vocabulary; those without text are allowed nowhere but where a grammar names them.

    Raises:
        GrammarError: If the tokenizer has no end token, or does not tell the bytes of its tokens.
    """
    end_ids = [end for end in (tokenizer.eod, *getattr(tokenizer, "other_end_ids", ())) if end >= 0]
    bytes_of = getattr(tokenizer, "bytes_of", None)
    if not end_ids or bytes_of is None:
        lack = "an end token" if bytes_of is not None else "a function bytes_of"
        raise GrammarError(f"replies of a given form need a tokenizer with {lack}; this model's has none")
    special = {*getattr(tokenizer, "special_ids", ()), *end_ids}
    tokens = [b"" if token in special else bytes_of(token) or b"" for token in range(vocab_size)]
    special |= {token for token, text in enumerate(tokens) if not text}
    named = [b"<|%d|>" % token if token in special else text for token, text in enumerate(tokens)]
    vocabulary = _Vocabulary(named, sorted(special), end_ids[0], None, tokenizer.tokenize)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=cast(Any, end_ids))
