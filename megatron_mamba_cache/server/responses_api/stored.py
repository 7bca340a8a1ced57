"""Responses that later requests continue or read again: in memory, with a limit for each API key."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError
from .items import ChatMessage


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response.

    Args:
        messages: Its input and its reply, without those of the response before it.
        body: As its client had it.
    """

    messages: tuple[ChatMessage, ...]
    body: dict[str, Any]

    @property
    def previous(self) -> str | None:
        """The id of the response that it continues."""
        found: str | None = self.body["previous_response_id"]
        return found


class StoredResponses:
    """The latest responses of each API key; the least recently used leaves first. Thread-safe.

    Args:
        max_bytes: Limit of a key's responses, as JSON; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._stored: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def find(self, owner: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response of an owner.

        Raises:
            ApiError: 404 if it is not kept.
        """
        with self._lock:
            entries = self._stored.get(owner)
            if entries is None or response_id not in entries:
                raise ApiError(404, f"the response {response_id!r} is not kept here", "response_not_found", param)
            entries.move_to_end(response_id)
            return entries[response_id]

    def messages_up_to(self, owner: str, response_id: str) -> list[ChatMessage]:
        """Return the messages of a response and of all that it continues, oldest first.

        Raises:
            ApiError: 404 if one of them is not kept.
        """
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            found.append(self.find(owner, wanted, "previous_response_id"))
            wanted = found[-1].previous
        return [message for stored in reversed(found) for message in stored.messages]

    def keep(self, owner: str, messages: Sequence[ChatMessage], body: dict[str, Any]) -> None:
        """Keep a response under its body's id; one that is larger than the whole limit is not kept."""
        stored = StoredResponse(tuple(messages), body)
        size = _size(stored)
        if size > self._max_bytes:
            return
        with self._lock:
            entries = self._stored.setdefault(owner, OrderedDict())
            entries[body["id"]] = stored
            self._sizes[owner] = self._sizes.get(owner, 0) + size
            while self._sizes[owner] > self._max_bytes:
                self._forget(owner, next(iter(entries)))

    def forget(self, owner: str, response_id: str) -> None:
        """Forget a response of an owner.

        Raises:
            ApiError: 404 if it is not kept.
        """
        self.find(owner, response_id)
        with self._lock:
            self._forget(owner, response_id)

    def num_bytes(self, owner: str) -> int:
        """Return the size of an owner's responses, as counted against the limit."""
        return self._sizes.get(owner, 0)

    def _forget(self, owner: str, response_id: str) -> None:
        stored = self._stored[owner].pop(response_id, None)
        if stored is not None:
            self._sizes[owner] -= _size(stored)


def _size(stored: StoredResponse) -> int:
    return len(json.dumps([stored.messages, stored.body]))
