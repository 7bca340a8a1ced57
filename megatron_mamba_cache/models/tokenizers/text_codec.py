"""Text to token ids and back, as the tokenizer files of a directory say; torch is not needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ...installation import install_command


class TextCodec(Protocol):
    """Turns text into token ids and back.

    Attributes:
        largest_id: The largest known id.
        longest_token: Characters of the longest token as the files spell it, at least 1.
        special_ids: Tokens that mark something and are not text.
        added_ids: Tokens that were added to the vocabulary, special or not.
    """

    largest_id: int
    longest_token: int
    special_ids: frozenset[int]
    added_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's ids, with the special tokens that the tokenizer's files put around a text or without."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids; an id that stands for nothing gives no text."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if there is none."""

    def token_of(self, token_id: int) -> str | None:
        """Return the token of an id as the files spell it; None if there is none."""


class JsonCodec:
    """A `tokenizer.json`, read by the small tokenizers package.

    Raises:
        ValueError: Naming the file, if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no narrower one
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # the file may hold batch settings, which are not meant for prompts
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.largest_id = max(vocabulary.values(), default=-1)
        self.longest_token = max(map(len, vocabulary), default=1)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = frozenset(added)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `TextCodec`."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """See `TextCodec`."""
        known = [token for token in tokens if 0 <= token <= self.largest_id]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def id_of(self, token: str) -> int | None:
        """See `TextCodec`."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_of(self, token_id: int) -> str | None:
        """See `TextCodec`."""
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found


class TransformersCodec:
    """Any other tokenizer of a directory, read by transformers.

    Raises:
        ValueError: If transformers is missing or cannot read the files.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer = auto_tokenizer(directory, "its tokenizer files")
        self._ids: dict[str, int] = self._tokenizer.get_vocab()
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self.largest_id = max(self._ids.values(), default=-1)
        self.longest_token = max(map(len, self._ids), default=1)
        self.special_ids = frozenset(self._tokenizer.all_special_ids)
        self.added_ids = frozenset(self._tokenizer.get_added_vocab().values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `TextCodec`."""
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """See `TextCodec`."""
        known = [token for token in tokens if 0 <= token <= self.largest_id]
        settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(known, **settings))

    def id_of(self, token: str) -> int | None:
        """See `TextCodec`."""
        return self._ids.get(token)

    def token_of(self, token_id: int) -> str | None:
        """See `TextCodec`."""
        return self._tokens.get(token_id)


def auto_tokenizer(directory: Path, purpose: str) -> Any:
    """Return transformers' tokenizer of a directory; nothing is downloaded.

    Args:
        purpose: What it is needed for; used in the error.

    Raises:
        ValueError: If transformers is missing or cannot read the files.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"{directory}: transformers is needed for {purpose}: {install_command('hf')}") from error
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # which one depends on the tokenizer's class
        raise ValueError(f"transformers cannot read the tokenizer files of {directory}: {error}") from error
