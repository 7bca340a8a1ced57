"""Cache for the token ids of earlier prompts and replies; tokenizing a reply's text could give different ids."""

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
    """Text of a prompt and its reply, with the token ids that the engine used."""

    text: str
    token_ids: tuple[int, ...]


class _Key(NamedTuple):
    kind: tuple[str, bool | None]  # (tenant's salt, argument `adds`)
    text: str


class Transcripts:
    """Thread-safe LRU cache from texts to token ids, with at most `max_bytes` per API key.

    A prompt reuses the same tenant's longest entry that is a prefix of its text; only the rest is tokenized. The next
    turn of a conversation finds its entry if the template renders the earlier messages unchanged, but not if the
    template drops reasoning or trims replies.
    """

    def __init__(self, max_bytes: int, max_entries: int = _MOST_ENTRIES) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: dict[str, OrderedDict[_Key, array[int]]] = {}
        self._bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def longest(self, tenant: Tenant, text: str, adds: bool | None = None) -> Transcript | None:
        """Return the tenant's longest entry that is a prefix of `text` and has the same `adds`, or None.

        `adds` is the setting for adding special tokens: True, False, or None for the tokenizer's default.
        """
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
        """Store the token ids of a non-empty text, unless this entry alone exceeds `max_bytes`."""
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
        """Return the number of bytes in an owner's entries that count toward `max_bytes`."""
        return self._bytes.get(owner, 0)

    def _drop(self, owner: str, key: _Key) -> None:
        tokens = self._entries[owner].pop(key, None)
        if tokens is not None:
            self._bytes[owner] -= _size(key, tokens)


def _size(key: _Key, tokens: "array[int]") -> int:
    return _CHARACTER_BYTES * (len(key.kind[0]) + len(key.text)) + tokens.itemsize * len(tokens)
