"""Compile grammars for a model's vocabulary, and cache them for later requests."""

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
_MOST_VALUES = 200_000  # maximum number of JSON values in a schema after rewriting
_KEPT_CHARACTERS, _MOST_KEPT = 8 * 2**20, 512
TOO_COMPLEX = "the grammar of this request has become too complex to continue"
"""Start of the error message for a running request whose grammar matcher has failed."""


class Grammars:
    """Compiles grammars for one model's vocabulary and caches them. Thread-safe; compilation releases the GIL."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer: Any = None
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_characters = 0
        self._failures: dict[int, str] = {}
        self._lock = Lock()

    def read(self, tokenizer: Any) -> None:
        """Set the model's tokenizer. Its vocabulary is read later, by `prepare` or by the first compilation."""
        self._tokenizer = tokenizer

    def prepare(self) -> None:
        """Read the vocabulary, which takes half a second. If that fails, compiling any grammar raises the error."""
        with suppress(GrammarError):
            self._read_vocabulary()

    def error_of(self, grammar: str) -> str | None:
        """Return the error message for a grammar, or None if it is usable. Compiling a new grammar can take seconds."""
        try:
            self.matcher(grammar)
        except GrammarError as error:
            return str(error)
        return None

    def matcher(self, grammar: str) -> "LLMatcher":
        """Return a new matcher for a grammar; raise `GrammarError` if the grammar or the tokenizer is unusable."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar)
            self._keep(grammar, found)
        return found.deep_copy()

    def note_failure(self, request_id: int, reason: str) -> None:
        """Record that the matcher of a running request failed. Callable from any thread."""
        first_line = reason.strip().partition("\n")[0]
        self._failures[request_id] = f"{TOO_COMPLEX}: {first_line:.200}"

    def take_failures(self) -> dict[int, str]:
        """Return the recorded failure messages, keyed by request id, and clear them."""
        if not self._failures:
            return {}
        taken, self._failures = self._failures, {}
        return taken

    @cached_property
    def executor(self) -> "LLExecutor":
        """Thread pool that computes token masks."""
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
                    raise GrammarError("structured outputs need a tokenizer, and this engine has none")
                self._vocabulary = _llguidance().read_vocabulary(self._tokenizer, self.vocab_size)
            return self._vocabulary


@lru_cache(maxsize=4096)
def has_text(terminal: str) -> bool:
    """Return False if no text matches the terminal with this Lark definition, True if some text may match it."""
    found: bool = _llguidance().has_text(terminal)
    return found


def _parsed(grammar: str) -> Any:
    """Parse a grammar's JSON; raise `GrammarError` if it is invalid or too large to compile quickly."""
    _check(len(grammar), "characters", _MOST_CHARACTERS)
    try:
        value = json.loads(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the grammar is not JSON, or is nested too deeply: {error}") from error
    parts = _parts(value)
    for part in parts[1:] or parts:  # the first part is the start rule, which refers to the others
        with at_location(_location(part)):
            _check(len(json.dumps(part, ensure_ascii=False)), "characters", _MOST_CHARACTERS_OF_PART)
            _check_objects(part, _MOST_OBJECTS_OF_PART)
    _check_objects(value, _MOST_OBJECTS)
    return value


def _check(count: int, things: str, most: int) -> None:
    if count > most:
        raise GrammarError(f"the grammar has {count} {things}; at most {most} are allowed")


def _check_objects(value: Any, most: int) -> None:
    _check(sum(isinstance(found, dict) for found in values_in(value)), "objects", most)


def _parts(grammar: Any) -> list[Any]:
    return list_of(mapping_of(grammar).get("grammars"))


def _location(part: Any) -> str:
    return str(mapping_of(part).get(LOCATION, ""))


def _prepare(grammar: Any, library: ModuleType) -> list[tuple[str, dict[str, Any]]]:
    """Rewrite the JSON schemas in a grammar, in place; return (location, schema) pairs."""
    schemas = []
    for part in _parts(grammar):
        location = _location(part)
        if isinstance(part, dict) and isinstance(part.get("json_schema"), dict):
            with at_location(location):
                part["json_schema"] = prepared(part["json_schema"], library.goes_on, library.schema_error)
                if sum(1 for _ in islice(values_in(part["json_schema"]), _MOST_VALUES)) == _MOST_VALUES:
                    reason = "the schema becomes too large when propertyNames and uniqueItems are expanded; simplify it"
                    raise GrammarError(reason)
            schemas.append((location, part["json_schema"]))
            part.pop(LOCATION, None)
    return schemas


@cache
def _llguidance() -> ModuleType:
    """Return the module that wraps llguidance; raise `GrammarError` if llguidance is not installed."""
    try:
        require_extra("server", "structured output")
    except MissingExtraError as error:
        raise GrammarError(str(error)) from error
    from . import matching

    return matching


GoesOn = Callable[[dict[str, Any], str], bool]
"""Returns True if JSON text that satisfies a schema may continue with a quote after a given prefix."""


def prepared(schema: dict[str, Any], goes_on: GoesOn, refusal: Refusal) -> dict[str, Any]:
    """Return a schema that llguidance can enforce and that allows only finite values of `schema`. Modifies `schema`.

    Raises:
        GrammarError: If the schema cannot be enforced; the message gives the location and the reason.
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
