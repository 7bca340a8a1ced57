"""Compile grammars for one vocabulary, and cache them for the next requests."""

import json
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from itertools import islice
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import GrammarError
from ..installation import MissingExtraError, require_extra
from .exclusive_branches import exclude_branches
from .forms import GUIDANCE, LOCATION
from .held_words import Refusal, hold_words
from .narrowed_schemas import check_escapes, guidance_for, narrow
from .schema_errors import close_endless, close_names, explained
from .schema_words import at_location, list_of, mapping_of, values_in

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from .matching import Vocabulary

_MOST_CHARACTERS, _MOST_CHARACTERS_OF_PART = 2 * 2**20, 256 * 1024
_MOST_OBJECTS = 20_000
_MOST_OBJECTS_OF_PART = 2_000  # the time to compile an object grows with the square of its properties
_MOST_VALUES = 200_000  # of a schema that is written out
_KEPT_CHARACTERS, _MOST_KEPT = 8 * 2**20, 512
TOO_COMPLEX = "the grammar of this request has become too complex to go on"
"""Start of the failure reason of a request whose compiled grammar failed."""


class Grammars:
    """The grammars of one model, whose masks are `vocab_size` wide. Thread-safe; compiling releases Python's lock."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer: Any = None
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_characters = 0
        self._failures: dict[int, str] = {}
        self._lock = Lock()

    def read(self, tokenizer: Any) -> None:
        """Take over the model's tokenizer; its vocabulary is read by `prepare` or for the first grammar."""
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Read the vocabulary, which takes half a second; on failure, the error of each grammar explains it."""
        with suppress(GrammarError):
            self._read_vocabulary()

    def error_of(self, grammar: str) -> str | None:
        """Return why a grammar cannot be used; None if it can. Compiles a new one, which may take a while."""
        try:
            self.matcher(grammar)
        except GrammarError as error:
            return str(error)
        return None

    def matcher(self, grammar: str) -> "LLMatcher":
        """Return a matcher at a grammar's start; raise `GrammarError` if it or the tokenizer cannot be used."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar)
            self._keep(grammar, found)
        return found.deep_copy()

    def note_failure(self, request_id: int, reason: str) -> None:
        """Record that the grammar of a running request cannot continue; callable from any thread."""
        first_line = reason.strip().partition("\n")[0]
        self._failures[request_id] = f"{TOO_COMPLEX}: {first_line:.200}"

    def take_failures(self) -> dict[int, str]:
        """Return and clear the failures of running requests, by request."""
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
        value = _parsed(grammar)
        library = _llguidance()
        vocabulary = self._read_vocabulary()
        schemas = _prepare(value, library)
        try:
            matcher: LLMatcher = library.compiled(vocabulary, json.dumps(value, ensure_ascii=False))
        except GrammarError:
            for location, schema in schemas:
                with at_location(location):
                    explained(schema, library.schema_error)
            raise
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


@lru_cache(maxsize=4096)
def has_text(terminal: str) -> bool:
    """Return True if a terminal, given by its right-hand side, has any text, or cannot be compiled."""
    found: bool = _llguidance().has_text(terminal)
    return found


def _parsed(grammar: str) -> Any:
    """Return a grammar's value; raise `GrammarError` if it is not JSON, or too large to compile in a moment."""
    _check(len(grammar), "characters", _MOST_CHARACTERS)
    try:
        value = json.loads(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the grammar is no JSON text, or is nested too deeply: {error}") from error
    parts = _parts(value)
    for part in parts[1:] or parts:  # the first one puts the others together
        with at_location(_location(part)):
            _check(len(json.dumps(part, ensure_ascii=False)), "characters", _MOST_CHARACTERS_OF_PART)
            _check_objects(part, _MOST_OBJECTS_OF_PART)
    _check_objects(value, _MOST_OBJECTS)
    return value


def _check(count: int, things: str, most: int) -> None:
    if count > most:
        raise GrammarError(f"the grammar has {count} {things} in it; at most {most} are allowed")


def _check_objects(value: Any, most: int) -> None:
    _check(sum(isinstance(found, dict) for found in values_in(value)), "objects", most)


def _parts(grammar: Any) -> list[Any]:
    return list_of(mapping_of(grammar).get("grammars"))


def _location(part: Any) -> str:
    return str(mapping_of(part).get(LOCATION, ""))


def _prepare(grammar: Any, library: ModuleType) -> list[tuple[str, dict[str, Any]]]:
    """Rewrite the JSON schemas of a grammar in place, and return them with their locations."""
    schemas = []
    for part in _parts(grammar):
        location = _location(part)
        if isinstance(part, dict) and isinstance(part.get("json_schema"), dict):
            with at_location(location):
                part["json_schema"] = prepared(part["json_schema"], library.goes_on, library.schema_error)
                if sum(1 for _ in islice(values_in(part["json_schema"]), _MOST_VALUES)) == _MOST_VALUES:
                    reason = "the schema is too large with propertyNames and uniqueItems written out; make it smaller"
                    raise GrammarError(reason)
            schemas.append((location, part["json_schema"]))
            part.pop(LOCATION, None)
    return schemas


@cache
def _llguidance() -> ModuleType:
    """Return the module that uses llguidance; raise `GrammarError` if it is not installed."""
    try:
        require_extra("server", "a reply of a given form")
    except MissingExtraError as error:
        raise GrammarError(str(error)) from error
    from . import matching

    return matching


GoesOn = Callable[[dict[str, Any], str], bool]
"""Returns True if a reply of a schema may continue with a quote after some text."""


def prepared(schema: dict[str, Any], goes_on: GoesOn, refusal: Refusal) -> dict[str, Any]:
    """Return a schema whose replies are finite and valid by the given one, which this changes.

    Raises:
        GrammarError: If no grammar can enforce the schema; it says where and why.
    """
    settings = schema.get(GUIDANCE, {})
    try:
        held = {word: value for word, value in schema.items() if word != GUIDANCE}
        hold_words(held, refusal)
        exclude_branches(held)
        close_endless(held)
        settings = {**settings, **guidance_for(held)}
        close_names(held, lambda found: goes_on({**found, GUIDANCE: settings}, "{"))
        narrow(held)
        settings = {**settings, **guidance_for(held)}
        check_escapes(held, lambda found: goes_on({**found, GUIDANCE: settings}, ""))
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    return {**held, GUIDANCE: settings}
