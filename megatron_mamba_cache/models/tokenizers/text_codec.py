"""Encode and decode text with the tokenizer files of a directory; does not need torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...installation import install_command

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Span(NamedTuple):
    """A token and its character range in a text; empty for a special token added around the text."""

    token: int
    start: int
    end: int


class TextCodec(Protocol):
    """Protocol of codecs that convert text to token ids and back.

    Attributes:
        largest_id: The largest known id.
        longest_token: Number of characters in the longest token, as spelled in the files; at least 1.
        special_ids: Ids of special tokens, such as turn markers, which are not text.
        added_ids: Ids of tokens that were added to the vocabulary, special or not.
    """

    largest_id: int
    longest_token: int
    special_ids: frozenset[int]
    added_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with or without the special tokens that the tokenizer adds around it."""

    def spans(self, text: str, *, add_special_tokens: bool) -> list[Span]:
        """Return the tokens that `encode` gives, with their character ranges; [] if these are unknown."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode token ids to text; an unknown id adds no text."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if it is unknown."""

    def token_of(self, token_id: int) -> str | None:
        """Return the token with this id, as spelled in the files; None for an unknown id."""


class JsonCodec:
    """Codec for a `tokenizer.json`, read by the tokenizers package.

    Args:
        settings: Contents of `tokenizer_config.json`. As in transformers, the tokens that it declares become added
            tokens, even if `tokenizer.json` lacks them or has them as plain text.
        vocab_size: Vocabulary size of the model. A declared token without an id gets the next id, if the model has one.

    Raises:
        ValueError: If the file is damaged; the message names it.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], vocab_size: int) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{path} is not a valid tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # the file may set truncation, meant for training batches
        self._tokenizer.no_padding()
        _add_declared(self._tokenizer, settings, vocab_size)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.largest_id = max(vocabulary.values(), default=-1)
        self.longest_token = max(map(len, vocabulary), default=1)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = frozenset(added)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def spans(self, text: str, *, add_special_tokens: bool) -> list[Span]:
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [Span(token, *span) for token, span in zip(found.ids, found.offsets, strict=True)]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token for token in tokens if 0 <= token <= self.largest_id]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_of(self, token_id: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found


def _add_declared(tokenizer: Any, settings: Mapping[str, Any], vocab_size: int) -> None:
    """Add the tokens declared in `tokenizer_config.json`, in the same order as transformers."""
    for token in _added_tokens(_listed(settings.get("added_tokens_decoder"))):
        _add(tokenizer, token, vocab_size)
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    lists = [_listed(settings.get(name)) for name in _LISTED]
    for token in _added_tokens([*map(settings.get, _NAMED), *chain.from_iterable(lists)]):
        special = added.get(token.content, token)  # keeps its flags
        special.special = True
        _add(tokenizer, special, vocab_size)


def _add(tokenizer: Any, token: Any, vocab_size: int) -> None:
    if tokenizer.token_to_id(token.content) is not None or tokenizer.get_vocab_size() < vocab_size:
        tokenizer.add_tokens([token])


def _listed(declared: Any) -> list[Any]:
    """Return the elements of a list or the values of an object, which are sorted by name if names are token ids."""
    if isinstance(declared, Mapping):
        has_ids = all(map(str.isdecimal, declared))
        return [declared[name] for name in (sorted(declared, key=int) if has_ids else declared)]
    return declared if isinstance(declared, list) else []


def _added_tokens(declared: Iterable[Any]) -> Iterator[Any]:
    """Yield an `AddedToken` for each declaration, which is a text or an object with text and flags."""
    from tokenizers import AddedToken

    for found in declared:
        fields = found if isinstance(found, Mapping) else {"content": found}
        if isinstance(fields.get("content"), str):
            flags = {name: fields[name] for name in _FLAGS if isinstance(fields.get(name), bool)}
            yield AddedToken(fields["content"], **flags)


class TransformersCodec:
    """Codec for other tokenizer files, read by transformers; raises as `auto_tokenizer`."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = auto_tokenizer(directory, "its tokenizer files")
        self._ids: dict[str, int] = self._tokenizer.get_vocab()
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self.largest_id = max(self._ids.values(), default=-1)
        self.longest_token = max(map(len, self._ids), default=1)
        self.special_ids = frozenset(self._tokenizer.all_special_ids)
        self.added_ids = frozenset(self._tokenizer.get_added_vocab().values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def spans(self, text: str, *, add_special_tokens: bool) -> list[Span]:
        return []

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token for token in tokens if 0 <= token <= self.largest_id]
        settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(known, **settings))

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def token_of(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)


def auto_tokenizer(directory: Path, purpose: str) -> Any:
    """Load the tokenizer of a directory with transformers, without downloads.

    Args:
        purpose: Use of the tokenizer, for the error message.

    Raises:
        ValueError: If transformers is missing or cannot read the files.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"{directory}: transformers is needed for {purpose}: {install_command('hf')}") from error
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the type of error depends on the tokenizer's class
        raise ValueError(f"transformers cannot read the tokenizer files of {directory}: {error}") from error
