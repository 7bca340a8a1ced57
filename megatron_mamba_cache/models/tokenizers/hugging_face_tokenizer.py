"""The tokenizer of a Hugging Face model directory; nothing is downloaded, and torch is not needed.

The tokenizers package reads a `tokenizer.json` even if transformers is installed, so that a text has the same tokens on
every machine. transformers is needed only for other tokenizer files and for chat templates.
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
    """A token to decode others next to, its text at the start of a text, and its text after another token."""

    token: int
    before: str
    after: str


class HuggingFaceTokenizer:
    """A directory's tokenizer with the interface of Megatron's controller.

    Args:
        directory: Its chat templates, `config.json` and `generation_config.json` are read too.
        vocab_size: The model's, which may be larger than the tokenizer's.
        settings: Of `tokenizer_config.json`, with values of `special_tokens_map.json` that it lacks.

    Attributes:
        bos: The id of the token that begins a text; None without one.
        eod: The id that ends a text, the first of `end_ids_of`; -1 without one.
        longest_token: Most characters of a token, as the tokenizer's files spell it.
        special_ids: Tokens that mark something and are not text.
        added_ids: Tokens that were added to the vocabulary, special or not; they are never split.
        adds_special_tokens: True if the tokenizer's files put special tokens around a text.
        adds_end_token: True if they put one after it.
        image_tokens: Ids that are not text but images, video or sound, and their names.
        other_end_ids: Further ids that end a text, for instance a chat turn; an engine stops at each.
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
        """Return the text's tokens.

        Args:
            add_special_tokens: True adds the special tokens that the files put around a text; False adds none, as for a
                rendered chat; None adds them, but `bos` only once if the text spells it out.
        """
        tokens = self._codec.encode(text, add_special_tokens=add_special_tokens is not False)
        is_double = add_special_tokens is None and self.bos is not None and tokens[:2] == [self.bos, self.bos]
        return tokens[1:] if is_double else tokens

    def tokenize_after_tokens(self, tokens: Sequence[int], text: str) -> list[int] | None:
        """Return the tokens of a text that continues after others; None if no token can start there."""
        context = list(tokens[-_CONTEXT:])
        before = self._codec.decode(context, False)
        together = self._codec.decode(self._codec.encode(before + text, add_special_tokens=False), False)
        texts = (before + text, together, together.removeprefix(" "))  # some add spaces after special tokens
        for after in (self._codec.encode(text, add_special_tokens=False), self.tokenize_after_text(before, text)):
            if after is not None and self._codec.decode([*context, *after], False) in texts:
                return after
        return None

    def tokenize_after_text(self, before: str, text: str) -> list[int] | None:
        """Return the tokens of a text when both are tokenized together; None if a token spans both."""
        first = self._codec.encode(before, add_special_tokens=False)
        both = self._codec.encode(before + text, add_special_tokens=False)
        return both[len(first) :] if both[: len(first)] == first else None

    def offsets(self, text: str, tokens: Sequence[int]) -> list[int] | None:
        """Return the characters of a text before each of its tokens; None if `tokenize` gives it other tokens."""
        added, plain = (self._codec.spans(text, add_special_tokens=add) for add in (True, False))
        for spans in (added, added[1:], plain):  # `bos` comes once
            if [span.token for span in spans] == list(tokens):
                return _offsets_of(spans)
        return None

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens; an id that stands for nothing gives no text."""
        return self._codec.decode(tokens, skip_special_tokens)

    def detokenizer(self, shown: Collection[str] | None) -> Callable[[list[int]], str]:
        """Return `detokenize` of no special tokens but those with these texts; None shows all."""
        hidden: Collection[int] = ()
        if shown is not None:
            hidden = self.special_ids - {self._codec.id_of(text) for text in shown}

        def detokenize(tokens: list[int]) -> str:
            return self._codec.decode([token for token in tokens if token not in hidden], False)

        return detokenize

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes that a token adds inside a text; None if the files do not give them.

        They need not be whole characters. A special token has the bytes of its name.
        """
        name = self._codec.token_of(token)
        if token in self.special_ids and name is not None:
            return name.encode()
        return token_bytes(name, self._text_inside(token))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as the tokenizer's files spell it; None if there is none."""
        return self._codec.id_of(token)

    def token_of(self, token: int) -> str | None:
        """Return a token as the tokenizer's files spell it; None for an id that stands for nothing."""
        return self._codec.token_of(token)

    @property
    def chat_template(self) -> str:
        """The source of the template for chats without tools; "" if the directory has none."""
        return self._templates.source(has_tools=False)

    @property
    def tool_template(self) -> str:
        """The source of the template for chats with tools, often the same."""
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
        """Return the prompt of a conversation.

        Args:
            messages: Each with "role" and "content", oldest first.
            tools: Definitions of functions, as OpenAI's API has them.
            values: Further variables of the template.
            adds_prompt: True to end the text with the start of the assistant's reply.
            continues: True to leave the last message open, to be continued.

        Raises:
            ValueError: If the directory has no chat template, transformers is missing, or the template refuses.
        """
        source = self._templates.source(has_tools=bool(tools))
        if not source:
            raise ValueError(self._templates.missing())
        tokenizer = self._chat_tokenizer
        reserved = sorted(values.keys() & _reserved_values(type(tokenizer)))
        if reserved:
            raise ValueError(f"a chat template may not be given {', '.join(reserved)}; leave it out")
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
        except Exception as error:  # templates raise errors of their own
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error

    @cached_property
    def _chat_tokenizer(self) -> Any:
        return auto_tokenizer(self._directory, "its chat template")

    def _text_inside(self, token: int) -> str:
        """Return the text that a token adds between two others; at an end of a text, decoders strip spaces."""
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
        if isinstance(token, dict):  # an added token with its settings
            token = token.get("content")
        return self._codec.id_of(token) if isinstance(token, str) else None


def _offsets_of(spans: Sequence[Span]) -> list[int]:
    """Return where tokens begin: after the token before, unless both are part of a character; spans may lack spaces."""
    offsets, end = [], 0
    for span in spans:
        offsets.append(end if span.start == span.end else min(span.start, end))
        end = max(end, span.end)
    return offsets


def _reserved_values(tokenizer: type) -> frozenset[str]:
    """Return names that are arguments of transformers' function or set by it, and so no template's variables."""
    names = inspect.signature(tokenizer.apply_chat_template).parameters  # type: ignore[attr-defined]
    return frozenset({*names, "messages"})


def has_tokenizer(directory: Path) -> bool:
    """Return True if a directory holds files of a tokenizer."""
    return any((directory / name).exists() for name in (_JSON, *_OTHERS))


def load_tokenizer(directory: str | Path, vocab_size: int) -> HuggingFaceTokenizer | None:
    """Read the tokenizer of a model directory; None if it holds none, so that requests use token ids.

    Raises:
        ValueError: Naming the file, if it is damaged, has ids beyond the model's vocabulary, or needs transformers,
            which is not installed.
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
            f"{tokenizer_at} has token ids up to {codec.largest_id}, but the model of {model_at} "
            f"has a vocabulary of {vocab_size}; the two do not belong together"
        )
    return HuggingFaceTokenizer(codec, directory, vocab_size, settings)


def _settings(directory: Path) -> dict[str, Any]:
    """Return the tokenizer's configuration, with missing values taken from an older file."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).exists():
            found = read_json_object(directory / name)
            merged |= {key: value for key, value in found.items() if value is not None}
    return merged
