"""Tokenizer of a Hugging Face model directory; does not need torch or network access.

`tokenizer.json` is always read by the tokenizers package, even if transformers is installed, so that a text has the
same tokens on every machine. transformers is needed only for other tokenizer files and for chat templates.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..checkpoints.checkpoint_config import read_json_object
from .chat_templates import ChatTemplates, end_ids_of
from .text_codec import JsonCodec, Span, TextCodec, TransformersCodec, auto_tokenizer
from .token_reader import image_tokens_of, token_bytes

_JSON = "tokenizer.json"
_OTHERS = ("tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
_CONTEXT = 4
_LETTERS = "aeinx01"


class _Neighbour(NamedTuple):
    """Context token for decoding others, with its text at the start of a text and its text after another token."""

    token: int
    before: str
    after: str


class HuggingFaceTokenizer:
    """Tokenizer of a model directory, with the interface that Megatron's controller uses.

    Args:
        directory: Directory of the chat templates, `config.json` and `generation_config.json`, which are read too.
        vocab_size: Vocabulary size of the model, which may be larger than that of the tokenizer.
        settings: Contents of `tokenizer_config.json`, with missing values taken from `special_tokens_map.json`.

    Attributes:
        bos: Id of the token that begins a text; None if there is none.
        eod: Id of the token that ends a text, the first in `end_ids_of`; -1 if there is none.
        longest_token: Number of characters in the longest token, as spelled in the tokenizer files.
        special_ids: Ids of special tokens, such as turn markers, which are not text.
        added_ids: Ids of tokens that were added to the vocabulary, special or not; they are never split.
        adds_special_tokens: True if the tokenizer adds special tokens before or after a text.
        adds_end_token: True if the tokenizer adds a special token after a text.
        image_tokens: Token ids for images, video or sound → their names.
        other_end_ids: Further ids that end a text, such as the end of a chat turn; an engine stops at any of them.
    """

    def __init__(self, codec: TextCodec, directory: Path, vocab_size: int, settings: Mapping[str, Any]) -> None:
        self._codec = codec
        self._directory = directory
        self._templates = ChatTemplates(directory, settings)
        self.settings = MappingProxyType(settings)
        self.vocab_size = vocab_size
        self.longest_token, self.special_ids, self.added_ids = codec.longest_token, codec.special_ids, codec.added_ids
        alone, inside = codec.encode("x"), codec.encode("x", add_special_tokens=False)
        self.adds_special_tokens, self.adds_end_token = alone != inside, alone[-1:] != inside[-1:]
        self.bos = self._id_named("bos_token")
        self.eod, *others = end_ids_of(directory, self._id_named("eos_token"), vocab_size) or (-1,)
        self.other_end_ids = tuple(others)
        self.image_tokens = image_tokens_of(directory, {str(codec.token_of(one)): one for one in codec.added_ids})

    def tokenize(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: True adds the special tokens that the tokenizer puts around a text; False adds none, as
                for a rendered chat; None adds them, but not a second `bos` if the text starts with one.
        """
        tokens = self._codec.encode(text, add_special_tokens=add_special_tokens is not False)
        is_double = add_special_tokens is None and self.bos is not None and tokens[:2] == [self.bos, self.bos]
        return tokens[1:] if is_double else tokens

    def tokenize_after_tokens(self, tokens: Sequence[int], text: str) -> list[int] | None:
        """Return the tokens of a text that continues after these tokens; None if no token can start there."""
        context = list(tokens[-_CONTEXT:])
        before = self._codec.decode(context, False)
        together = self._codec.decode(self._codec.encode(before + text, add_special_tokens=False), False)
        texts = (before + text, together, together.removeprefix(" "))  # some tokenizers add spaces after special tokens
        for after in (self._codec.encode(text, add_special_tokens=False), self.tokenize_after_text(before, text)):
            if after is not None and self._codec.decode([*context, *after], False) in texts:
                return after
        return None

    def tokenize_after_text(self, before: str, text: str) -> list[int] | None:
        """Return the tokens of `text` when tokenized together with `before`; None if a token spans both."""
        first = self._codec.encode(before, add_special_tokens=False)
        both = self._codec.encode(before + text, add_special_tokens=False)
        return both[len(first) :] if both[: len(first)] == first else None

    def offsets(self, text: str, tokens: Sequence[int]) -> list[int] | None:
        """Return the character offset of each token in a text; None if `tokenize` gives other tokens."""
        added, plain = (self._codec.spans(text, add_special_tokens=add) for add in (True, False))
        for spans in (added, added[1:], plain):  # `added[1:]` for a text with its own `bos`
            if [span.token for span in spans] == list(tokens):
                return _offsets_of(spans)
        return None

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens to text; an unknown id adds no text."""
        return self._codec.decode(tokens, skip_special_tokens)

    def detokenizer(self, shown: Collection[str] | None) -> Callable[[list[int]], str]:
        """Return a function that decodes tokens and hides special tokens unless listed in `shown`; None shows all."""
        hidden: Collection[int] = ()
        if shown is not None:
            hidden = self.special_ids - {self._codec.id_of(text) for text in shown}

        def detokenize(tokens: list[int]) -> str:
            return self._codec.decode([token for token in tokens if token not in hidden], False)

        return detokenize

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes that a token adds inside a text; None if they cannot be determined.

        The bytes may be part of a character. The bytes of a special token are its name.
        """
        name = self._codec.token_of(token)
        if token in self.special_ids and name is not None:
            return name.encode()
        return token_bytes(name, self._text_inside(token))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, given as spelled in the tokenizer files; None if there is no such token."""
        return self._codec.id_of(token)

    def token_of(self, token: int) -> str | None:
        """Return a token as spelled in the tokenizer files; None for an unknown id."""
        return self._codec.token_of(token)

    @property
    def chat_template(self) -> str:
        """Template text for chats without tools; "" if the directory has none."""
        return self._templates.source(has_tools=False)

    @property
    def tool_template(self) -> str:
        """Template text for chats with tools, often the same as `chat_template`."""
        return self._templates.source(has_tools=True)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] = MappingProxyType({}),
        *,
        adds_prompt: bool = True,
        continues: bool = False,
    ) -> str:
        """Render the prompt for a conversation.

        Args:
            messages: Messages with "role" and "content", oldest first.
            tools: Tool definitions in the format of OpenAI's API.
            values: Further variables for the template.
            adds_prompt: True to end the text with the start of the assistant's reply.
            continues: True to leave the last message open, so that the reply continues it.

        Raises:
            ValueError: If the directory has no chat template, transformers is missing, or the template raises an error.
        """
        source = self._templates.source(has_tools=bool(tools))
        if not source:
            raise ValueError(self._templates.missing())
        tokenizer = self._chat_tokenizer
        # Names that transformers' function takes or sets cannot be template variables.
        own_names = {*inspect.signature(type(tokenizer).apply_chat_template).parameters, "messages"}
        reserved = sorted(values.keys() & own_names)
        if reserved:
            raise ValueError(f"{', '.join(reserved)} cannot be a variable of a chat template; leave it out")
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    chat_template=source,
                    tokenize=False,
                    add_generation_prompt=adds_prompt,
                    continue_final_message=continues,
                    **values,
                )
            )
        except RecursionError as error:
            raise ValueError("the messages are nested too deeply for the model's chat template") from error
        except Exception as error:  # a template may raise any kind of error
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error

    @cached_property
    def _chat_tokenizer(self) -> Any:
        return auto_tokenizer(self._directory, "its chat template")

    def _text_inside(self, token: int) -> str:
        """Return the text that a token adds between two others, because decoders strip spaces at the ends."""
        if self._neighbour is not None:
            neighbour, before, after = self._neighbour
            text = self._codec.decode([neighbour, token, neighbour], False)
            if len(text) >= len(before + after) and text.startswith(before) and text.endswith(after):
                return text[len(before) : len(text) - len(after)]
        return self._codec.decode([token], False)

    @cached_property
    def _neighbour(self) -> _Neighbour | None:
        for letter in _LETTERS:
            tokens = self._codec.encode(letter, add_special_tokens=False)
            if tokens and (before := self._codec.decode(tokens[-1:], False)).strip() == letter:
                both = self._codec.decode([tokens[-1]] * 2, False)
                if both.startswith(before):
                    return _Neighbour(tokens[-1], before, both[len(before) :])
        return None

    def _id_named(self, name: str) -> int | None:
        token = self.settings.get(name)
        if isinstance(token, dict):  # an added token with flags
            token = token.get("content")
        return self._codec.id_of(token) if isinstance(token, str) else None


def _offsets_of(spans: Sequence[Span]) -> list[int]:
    """Return token starts. A token starts where the last one ended, unless both are part of one character."""
    offsets, end = [], 0
    for span in spans:
        offsets.append(end if span.start == span.end else min(span.start, end))
        end = max(end, span.end)
    return offsets


def has_tokenizer(directory: Path) -> bool:
    """Return True if a directory contains tokenizer files."""
    return any((directory / name).exists() for name in (_JSON, *_OTHERS))


def load_tokenizer(directory: str | Path, vocab_size: int) -> HuggingFaceTokenizer | None:
    """Read the tokenizer from a model directory; None if it has none and requests must use token ids.

    Raises:
        ValueError: If a file is damaged, has ids beyond the model's vocabulary, or needs transformers, which is not
            installed.
    """
    directory = Path(directory)
    if not has_tokenizer(directory):
        return None
    path, config = directory / _JSON, directory / "config.json"
    settings = _settings(directory)
    codec: TextCodec = JsonCodec(path, settings, vocab_size) if path.exists() else TransformersCodec(directory)
    if codec.largest_id >= vocab_size:
        tokenizer_at, model_at = (named if named.exists() else directory for named in (path, config))
        raise ValueError(
            f"{tokenizer_at} has token ids up to {codec.largest_id}, but the vocabulary size in {model_at} "
            f"is {vocab_size}; use the tokenizer that belongs to the model"
        )
    return HuggingFaceTokenizer(codec, directory, vocab_size, settings)


def _settings(directory: Path) -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`, with missing values from `special_tokens_map.json`."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).exists():
            found = read_json_object(directory / name)
            merged |= {key: value for key, value in found.items() if value is not None}
    return merged
