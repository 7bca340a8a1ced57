"""Grammars compiled for one vocabulary, and kept for the next requests that send the same."""

import json
from collections import OrderedDict
from contextlib import suppress
from functools import cache, cached_property
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import GrammarError
from ..installation import MissingExtraError, require_extra
from .forms import GUIDANCE
from .narrowed_schemas import guidance_for, narrow
from .schema_words import drop_empty_words, values_in

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from .matching import Vocabulary

_MOST_CHARACTERS = 256 * 1024
_MOST_OBJECTS = 2_000  # the time to compile an object grows with the square of its properties
_KEPT_CHARACTERS, _MOST_KEPT = 8 * 2**20, 512
TOO_COMPLEX = "the grammar of this request has become too complex to go on"
"""How the reason begins for which a request fails whose grammar could be compiled."""


class Grammars:
    """The grammars of one model. Thread-safe; compiling leaves Python's lock to others.

    Args:
        vocab_size: The width of masks.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer: Any = None
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_characters = 0
        self._failures: dict[int, str] = {}
        self._lock = Lock()

    def read(self, tokenizer: Any) -> None:
        """Take over the model's tokenizer, whose vocabulary is read by `prepare` or when the first grammar comes."""
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Read the vocabulary, which takes half a second, unless that is impossible; a grammar's own error says why."""
        with suppress(GrammarError):
            self._read_vocabulary()

    def fault_of(self, grammar: str) -> str | None:
        """Return why a grammar cannot be used, None if it can; compiles it if it is new, which may take a while."""
        try:
            self.matcher(grammar)
        except GrammarError as error:
            return str(error)
        return None

    def matcher(self, grammar: str) -> "LLMatcher":
        """Return a matcher at a grammar's start.

        Raises:
            GrammarError: If the grammar or the tokenizer cannot be used.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar)
            self._keep(grammar, found)
        return found.deep_copy()

    def note_failure(self, request_id: int, reason: str) -> None:
        """Note that the grammar of a running request cannot go on, by any thread."""
        first_line = reason.strip().partition("\n")[0]
        self._failures[request_id] = f"{TOO_COMPLEX}: {first_line:.200}"

    def take_failures(self) -> dict[int, str]:
        """Return why grammars of running requests cannot go on, by request, and forget it."""
        if not self._failures:
            return {}
        taken, self._failures = self._failures, {}
        return taken

    @cached_property
    def executor(self) -> "LLExecutor":
        """Threads that make masks."""
        executor: LLExecutor = _llguidance().mask_executor()
        return executor

    def _compile(self, grammar: str) -> "LLMatcher":
        check_size(grammar)
        matcher: LLMatcher = _llguidance().compiled(self._read_vocabulary(), _prepared(grammar))
        return matcher

    def _keep(self, grammar: str, matcher: "LLMatcher") -> None:
        with self._lock:
            if grammar not in self._compiled:
                self._num_characters += len(grammar)
            self._compiled[grammar] = matcher
            while self._num_characters > _KEPT_CHARACTERS or len(self._compiled) > _MOST_KEPT:
                oldest, _ = self._compiled.popitem(last=False)
                self._num_characters -= len(oldest)

    def _read_vocabulary(self) -> "Vocabulary":
        with self._lock:
            if self._vocabulary is None:
                if self._tokenizer is None:
                    raise GrammarError("replies of a given form need a tokenizer, and this engine has none")
                self._vocabulary = _llguidance().read_vocabulary(self._tokenizer, self.vocab_size)
            return self._vocabulary


def check_size(grammar: str) -> None:
    """Raise `GrammarError` unless a grammar's text is JSON and small enough to be compiled in a moment."""
    if len(grammar) > _MOST_CHARACTERS:
        raise GrammarError(f"the grammar has {len(grammar)} characters; at most {_MOST_CHARACTERS} are allowed")
    try:
        num_objects = sum(isinstance(value, dict) for value in values_in(json.loads(grammar)))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the grammar is no JSON text, or is nested too deeply: {error}") from error
    if num_objects > _MOST_OBJECTS:
        raise GrammarError(f"the grammar has {num_objects} objects in it; at most {_MOST_OBJECTS} are allowed")


def _prepared(grammar: str) -> str:
    """Return a grammar's text with JSON schemas that llguidance holds to, and without what says nothing in them."""
    value = json.loads(grammar)
    parts = value.get("grammars") if isinstance(value, dict) else None
    for part in parts if isinstance(parts, list) else ():
        schema = part.get("json_schema") if isinstance(part, dict) else None
        if isinstance(schema, dict):
            drop_empty_words(schema)
            narrow(schema)
            schema[GUIDANCE] = {**schema.get(GUIDANCE, {}), **guidance_for(schema)}
    return json.dumps(value, ensure_ascii=False)


@cache
def _llguidance() -> ModuleType:
    """Return the module that uses llguidance.

    Raises:
        GrammarError: If it is not installed.
    """
    try:
        require_extra("server", "a reply of a given form")
    except MissingExtraError as error:
        raise GrammarError(str(error)) from error
    from . import matching

    return matching
