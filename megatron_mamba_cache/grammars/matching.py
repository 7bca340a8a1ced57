"""Interface to llguidance: vocabularies, matchers, and the thread pool that computes token masks."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, cast

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ..errors import GrammarError
from .schema_words import list_of, schemas_in

_LONGEST_REASON = 400
_MOST_THREADS = 8
_QUOTE = ord('"')
_NO_TEXT = "NoExtension"
_MOST_ITEMS = 16_000  # maximum number of alternatives that the parser may track at one position
_MOST_ITEMS_A_STEP = 64_000
_BYTES_OF_TEXT = {*range(256)} - {0xC0, 0xC1, *range(0xF5, 0x100)}
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/')  # literal or regular expression
_MARKS = {"object": "{}", "array": "[]", "string": '""'}
_BEFORE = ("", "\n", "a")  # prefixes tried when a text is tokenized, in case a token spans prefix and text
_FUEL, _FUEL_A_STEP = 10_000_000, 2_000_000  # limits on regex work: a few seconds in all, and under one second per step


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Vocabulary with the attributes that llguidance's `TokenizerWrapper` reads."""

    tokens: list[bytes]  # bytes of each token, [vocab]
    special_token_ids: list[int]  # ids of tokens without text
    eos_token_id: int
    bos_token_id: int | None
    spell: Callable[[bytes], list[int]]

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids of a text."""
        return self.spell(text.encode() if isinstance(text, str) else text)


class _Spelling:
    """Tokenizes text so that the concatenated bytes of the tokens equal the text.

    A tokenizer may add special tokens or a space before a text, or convert the name of a special token to that token.
    Its tokens are therefore used only if their bytes equal the text.

    Args:
        tokens: Bytes of each token, [vocab]; empty for special tokens.
    """

    def __init__(self, tokenize: Callable[[str], Sequence[int]], tokens: Sequence[bytes]) -> None:
        self._tokenize = tokenize
        self._tokens = tokens
        self._ids = {text: token for token, text in reversed([*enumerate(tokens)]) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokenizer's tokens if their bytes equal `text`, else a greedy longest match from left to right."""
        for before in _BEFORE:
            found = self._tokenize(before + text.decode(errors="replace"))
            if (tail := self._tail(found, text)) is not None:
                return tail
        return self._longest_first(text)

    def _tail(self, found: Sequence[int], text: bytes) -> list[int] | None:
        """Return the tokens at the end of `found` whose concatenated bytes equal `text`; None if there are none."""
        end = len(found)
        while end and not self._tokens[found[end - 1]]:
            end -= 1
        start, missing = end, len(text)
        while start and missing > 0:
            start -= 1
            missing -= len(self._tokens[found[start]])
        tail = list(found[start:end])
        return tail if b"".join(self._tokens[token] for token in tail) == text else None

    def _longest_first(self, text: bytes) -> list[int]:
        found, start = [], 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((size for size in sizes if text[start : start + size] in self._ids), None)
            if size is None:
                break  # no token starts with this byte, so the rest cannot be tokenized
            found.append(self._ids[text[start : start + size]])
            start += size
        return found


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's vocabulary for llguidance's matchers."""

    tokenizer: LLTokenizer
    characters: frozenset[str] | None  # characters in all tokens; None if tokens can spell any character

    def check(self, grammar: str) -> None:
        """Raise `GrammarError` if a literal text in a grammar contains a character that no token contains."""
        if self.characters is None:
            return
        for text in _texts_of(json.loads(grammar)):
            missing = next((character for character in text if character not in self.characters), None)
            if missing is not None:
                raise GrammarError(f"the model has no token for {missing!r}, which the reply needs for {text!r:.80}")


def read_vocabulary(tokenizer: Any, vocab_size: int) -> Vocabulary:
    """Return a model's vocabulary. Matchers allow a token without text only if the grammar gives its id.

    Raises:
        GrammarError: If the tokenizer has no end token or no method `bytes_of`.
    """
    end_ids = [end for end in (tokenizer.eod, *getattr(tokenizer, "other_end_ids", ())) if end >= 0]
    bytes_of = getattr(tokenizer, "bytes_of", None)
    if not end_ids or bytes_of is None:
        lack = "an end token" if bytes_of is not None else "a method bytes_of"
        raise GrammarError(f"structured outputs need a tokenizer with {lack}, which this model's tokenizer lacks")
    special = {*getattr(tokenizer, "special_ids", ()), *end_ids}
    tokens = [b"" if token in special else bytes_of(token) or b"" for token in range(vocab_size)]
    special |= {token for token, text in enumerate(tokens) if not text}
    named = [b"<|%d|>" % token if token in special else text for token, text in enumerate(tokens)]
    vocabulary = _Vocabulary(named, sorted(special), end_ids[0], None, _Spelling(tokenizer.tokenize, tokens))
    read = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=cast(Any, end_ids))
    return Vocabulary(read, _characters_of(tokens))


def compiled(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    """Return a new matcher for a grammar; raise `GrammarError` if no text matches or compilation fails."""
    vocabulary.check(grammar)
    limits = LLParserLimits(
        max_items_in_row=_MOST_ITEMS,
        step_max_items=_MOST_ITEMS_A_STEP,
        initial_lexer_fuel=_FUEL,
        step_lexer_fuel=_FUEL_A_STEP,
    )
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(_first_lines(matcher.get_error()))
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        reason = matcher.get_error()
        if reason.startswith(_NO_TEXT):
            raise GrammarError("no finite text matches the grammar: its rules or references never end")
        raise GrammarError(_first_lines(reason.partition("<state>")[0]))
    if not _can_begin(matcher, mask):
        raise GrammarError("the model has no token with which a reply in this format can start")
    return matcher


def _can_begin(matcher: LLMatcher, mask: bytes) -> bool:
    """Return True if the grammar allows an empty text, or a text that starts with a token in `mask`."""
    allowed = (8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1)
    return matcher.is_accepting() or any(matcher.validate_tokens([token]) for token in islice(allowed, 1))


def schema_error(schema: dict[str, Any]) -> str | None:
    """Return the error that llguidance gives for a JSON schema with any vocabulary; None if it compiles the schema."""
    matcher = _byte_matcher(schema)
    return matcher.get_error() if matcher.is_error() else None


def goes_on(schema: dict[str, Any], text: str) -> bool:
    """Return False if no JSON text that satisfies `schema` has a quote after the prefix `text`, True if one may."""
    matcher = _byte_matcher(schema)
    if matcher.is_error():
        return True
    matcher.try_consume_tokens(list(text.encode()))
    mask = matcher.compute_bitmask()
    return not matcher.is_error() and bool(mask[_QUOTE >> 3] >> (_QUOTE & 7) & 1)


def has_text(terminal: str) -> bool:
    """Return False if no text matches the terminal with this Lark definition, True if some text may match it."""
    lark = f"start: TEXT\nTEXT: {terminal}"
    matcher = LLMatcher(_bytes(), json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not matcher.get_error().startswith(_NO_TEXT)


def _byte_matcher(schema: dict[str, Any]) -> LLMatcher:
    return LLMatcher(_bytes(), json.dumps({"grammars": [{"json_schema": schema}]}), log_level=0)


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def mask_executor() -> LLExecutor:
    """Return a thread pool for token masks, with at most half as many threads as CPU cores."""
    return LLExecutor(num_threads=max(1, min(_MOST_THREADS, (os.cpu_count() or 2) // 2)))


def _characters_of(tokens: Sequence[bytes]) -> frozenset[str] | None:
    texts = {text for text in tokens if text}
    if all(bytes([byte]) in texts for byte in _BYTES_OF_TEXT):
        return None
    return frozenset(character for text in texts for character in text.decode(errors="ignore"))


def _texts_of(grammar: Any) -> Iterator[str]:
    """Yield the literal texts in a grammar, and the punctuation and names that its JSON schemas require."""
    parts = grammar.get("grammars") if isinstance(grammar, dict) else None
    for part in filter(lambda part: isinstance(part, dict), parts or ()):
        for quoted in _QUOTED.findall(str(part.get("lark_grammar", ""))):
            with suppress(ValueError):  # skip regular expressions, and literals with escapes that JSON does not have
                yield json.loads(quoted)
        for schema in schemas_in(part.get("json_schema")):
            yield from _marks_of(schema)
            values = [schema["const"]] if "const" in schema else list_of(schema.get("enum"))
            yield from (json.dumps(value, ensure_ascii=False) for value in values)


def _marks_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the punctuation and property names that every JSON text for a schema contains."""
    kind = schema.get("type")
    yield _MARKS.get(kind, "") if isinstance(kind, str) else ""
    required = [name for name in list_of(schema.get("required")) if isinstance(name, str)]
    yield ",".join(f"{json.dumps(name, ensure_ascii=False)}:" for name in required)


def _first_lines(reason: str) -> str:
    text = " ".join(line.strip() for line in reason.strip().splitlines())
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."
