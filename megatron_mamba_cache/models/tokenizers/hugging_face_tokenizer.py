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
    """A token put around another token to decode it in context, with its own text at the start and later in a text."""

    token: int
    before: str
    after: str


class HuggingFaceTokenizer:
    """Tokenizer of a model directory, with the interface that Megatron's controller uses.

    Args:
        directory: Model directory, from which chat templates, `config.json` and `generation_config.json` are read.
        vocab_size: Vocabulary size of the model, which may be larger than the tokenizer's.
        settings: Contents of `tokenizer_config.json`, with missing values taken from `special_tokens_map.json`.

    Attributes:
        bos: Id of the token that begins a text; None if there is none.
        eod: Id of the token that ends a text, the first that `end_ids_of` returns; -1 if there is none.
        longest_token: Number of characters in the longest token, as spelled in the tokenizer files.
        special_ids: Ids of special tokens, such as markers of chat turns, which are not text.
        added_ids: Ids of tokens that were added to the vocabulary, special or not; their texts are never split.
        adds_special_tokens: True if the tokenizer adds special tokens before or after a text.
        adds_end_token: True if the tokenizer adds a special token after a text.
        image_tokens: Token ids for images, video or sound → their names.
        other_end_ids: Ids of further tokens, such as the end of a chat turn, at which an engine stops.
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
            add_special_tokens: True adds the special tokens that the tokenizer puts around a text. False adds none,
                as needed for a rendered chat. None adds them, but no second `bos` if the text starts with `bos`.
        """
        tokens = self._codec.encode(text, add_special_tokens=add_special_tokens is not False)
        is_double = add_special_tokens is None and self.bos is not None and tokens[:2] == [self.bos, self.bos]
        return tokens[1:] if is_double else tokens

    def tokenize_after_tokens(self, tokens: Sequence[int], text: str) -> list[int] | None:
        """Tokenize `text` as a continuation of `tokens`; return None if no tokenization decodes to the joined text."""
        context = list(tokens[-_CONTEXT:])
        before = self._codec.decode(context, False)
        together = self._codec.decode(self._codec.encode(before + text, add_special_tokens=False), False)
        texts = (before + text, together, together.removeprefix(" "))  # some tokenizers add spaces after special tokens
        for after in (self._codec.encode(text, add_special_tokens=False), self.tokenize_after_text(before, text)):
            if after is not None and self._codec.decode([*context, *after], False) in texts:
                return after
        return None

    def tokenize_after_text(self, before: str, text: str) -> list[int] | None:
        """Tokenize `before` + `text` and return the tokens of `text`; None if the tokens of `before` change."""
        first = self._codec.encode(before, add_special_tokens=False)
        both = self._codec.encode(before + text, add_special_tokens=False)
        return both[len(first) :] if both[: len(first)] == first else None

    def offsets(self, text: str, tokens: Sequence[int]) -> list[int] | None:
        """Return each token's character offset in `text`; None if `tokens` are not the tokens of `text`."""
        added, plain = (self._codec.spans(text, add_special_tokens=add) for add in (True, False))
        for spans in (added, added[1:], plain):  # `added[1:]` is for a text that starts with `bos`
            if [span.token for span in spans] == list(tokens):
                return _offsets_of(spans)
        return None

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens to text; unknown ids add no text."""
        return self._codec.decode(tokens, skip_special_tokens)

    def detokenizer(self, shown: Collection[str] | None) -> Callable[[list[int]], str]:
        """Return a function that decodes tokens but hides special tokens not in `shown`; None shows all tokens."""
        hidden: Collection[int] = ()
        if shown is not None:
            hidden = self.special_ids - {self._codec.id_of(text) for text in shown}

        def detokenize(tokens: list[int]) -> str:
            return self._codec.decode([token for token in tokens if token not in hidden], False)

        return detokenize

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes that a token adds in the middle of a text; None if they cannot be determined.

        The bytes may be part of a character. For a special token, they are the token's name.
        """
        name = self._codec.token_of(token)
        if token in self.special_ids and name is not None:
            return name.encode()
        return token_bytes(name, self._text_inside(token))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, spelled as in the tokenizer files; None if there is no such token."""
        return self._codec.id_of(token)

    def token_of(self, token: int) -> str | None:
        """Return a token's spelling in the tokenizer files; None for an unknown id."""
        return self._codec.token_of(token)

    @property
    def chat_template(self) -> str:
        """Template for chats without tools; "" if the directory has no template."""
        return self._templates.source(has_tools=False)

    @property
    def tool_template(self) -> str:
        """Template for chats with tools, often the same as `chat_template`."""
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
            values: Additional template variables, by name.
            adds_prompt: True to end the text with the opening of the assistant's reply.
            continues: True to leave the last message open, so that the reply continues it.

        Raises:
            ValueError: If the directory has no chat template, transformers is missing, or the template raises an error.
        """
        source = self._templates.source(has_tools=bool(tools))
        if not source:
            raise ValueError(self._templates.missing())
        tokenizer = self._chat_tokenizer
        # Parameters of transformers' function, and variables that it sets, cannot be template variables.
        own_names = {*inspect.signature(type(tokenizer).apply_chat_template).parameters, "messages"}
        reserved = sorted(values.keys() & own_names)
        if reserved:
            raise ValueError(f"chat template variables cannot be named {', '.join(reserved)}; remove them")
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
            raise ValueError(f"the model's chat template rejects the messages: {error}") from error

    @cached_property
    def _chat_tokenizer(self) -> Any:
        return auto_tokenizer(self._directory, "its chat template")

    def _text_inside(self, token: int) -> str:
        """Return the text that a token adds between two others; a token decoded alone might lose its leading space."""
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
        if isinstance(token, dict):  # an added token, given with its flags
            token = token.get("content")
        return self._codec.id_of(token) if isinstance(token, str) else None


def _offsets_of(spans: Sequence[Span]) -> list[int]:
    """Return the start of each token: the end of the previous token, unless both are part of the same character."""
    offsets, end = [], 0
    for span in spans:
        offsets.append(end if span.start == span.end else min(span.start, end))
        end = max(end, span.end)
    return offsets


def has_tokenizer(directory: Path) -> bool:
    """Return True if a directory contains tokenizer files."""
    return any((directory / name).exists() for name in (_JSON, *_OTHERS))


def load_tokenizer(directory: str | Path, vocab_size: int) -> HuggingFaceTokenizer | None:
    """Load a model directory's tokenizer; return None if it has none, so that requests must use token ids.

    Raises:
        ValueError: If a file is damaged, has ids beyond the model's vocabulary, or needs transformers and transformers
            is not installed.
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
