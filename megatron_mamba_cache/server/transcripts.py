"""Exact tokens of earlier texts; tokenizing a reply's text may give different tokens."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .tenants import Tenant

_MOST_ENTRIES = 512
_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Transcript:
    """Text of a prompt and reply, with its exact tokens."""

    text: str
    token_ids: tuple[int, ...]


class _Key(NamedTuple):
    kind: tuple[str, bool | None]  # (the tenant's salt, argument `adds`)
    text: str


class Transcripts:
    """Thread-safe LRU cache from text to tokens, with at most `max_bytes` for each API key.

    A later prompt of the same tenant reuses the longest entry that it begins with; only the rest is tokenized. A
    conversation's next turn begins with an entry if the template renders the earlier messages unchanged, and not if it
    drops reasoning or trims replies.
    """

    def __init__(self, max_bytes: int, max_entries: int = _MOST_ENTRIES) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: dict[str, OrderedDict[_Key, array[int]]] = {}
        self._bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def longest(self, tenant: Tenant, text: str, adds: bool | None = None) -> Transcript | None:
        """Return the tenant's longest entry that is a prefix of `text`, for the same `adds`; None if there is none.

        `adds` is True if special tokens were added, False if not, None for the tokenizer's default."""
        with self._lock:
            entries = self._entries.get(tenant.owner, OrderedDict())
            kind = (tenant.salt, adds)
            fitting = [key for key in entries if key.kind == kind and text.startswith(key.text)]
            if not fitting:
                return None
            key = max(fitting, key=lambda found: len(found.text))
            entries.move_to_end(key)
            return Transcript(key.text, tuple(entries[key]))

    def remember(self, tenant: Tenant, text: str, token_ids: Sequence[int], adds: bool | None = None) -> None:
        """Store the tokens of a non-empty text, unless they exceed `max_bytes` alone."""
        key, tokens = _Key((tenant.salt, adds), text), array("q", token_ids)
        size = _size(key, tokens)
        if not text or size > self._max_bytes:
            return
        with self._lock:
            entries = self._entries.setdefault(tenant.owner, OrderedDict())
            self._drop(tenant.owner, key)
            entries[key] = tokens
            self._bytes[tenant.owner] = self._bytes.get(tenant.owner, 0) + size
            while self._bytes[tenant.owner] > self._max_bytes or len(entries) > self._max_entries:
                self._drop(tenant.owner, next(iter(entries)))

    def num_bytes(self, owner: str) -> int:
        """Return the total size of an owner's entries, as counted against `max_bytes`."""
        return self._bytes.get(owner, 0)

    def _drop(self, owner: str, key: _Key) -> None:
        tokens = self._entries[owner].pop(key, None)
        if tokens is not None:
            self._bytes[owner] -= _size(key, tokens)


def _size(key: _Key, tokens: "array[int]") -> int:
    return _CHARACTER_BYTES * (len(key.kind[0]) + len(key.text)) + tokens.itemsize * len(tokens)
