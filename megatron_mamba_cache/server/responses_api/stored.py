"""Store for responses that later requests can continue or read, with a memory limit per API key."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError, bad_request
from .items import ChatMessage


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Stored response: its body, and its input and reply as chat messages."""

    messages: tuple[ChatMessage, ...]  # input and reply, without the previous responses' messages
    body: dict[str, Any]  # response body as sent to the client


class StoredResponses:
    """Thread-safe LRU store of responses, with at most `max_bytes` of JSON per API key; 0 stores nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._stored: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}
        self._response_of: dict[tuple[str, str], str] = {}  # response id, by (owner, output item's id)
        self._lock = threading.Lock()

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return an owner's response by id; raise `ApiError` 404 if it is not stored."""
        found = self._used(owner, response_id)
        if found is None:
            raise ApiError(404, f"the response {response_id!r:.300} is not stored on this server", "response_not_found")
        return found

    def messages_up_to(self, owner: str, response_id: str) -> list[ChatMessage]:
        """Return the messages of a response and of all responses before it in the conversation, oldest first.

        Raise `ApiError` 400, with the code that OpenAI's API uses, if one of the responses is not stored.
        """
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            stored = self._used(owner, wanted)
            if stored is None:
                sentence = f"previous response with id {wanted!r} not found: it is not stored on this server"
                raise bad_request(sentence, "previous_response_id", "previous_response_not_found")
            found.append(stored)
            wanted = stored.body["previous_response_id"]
        return [message for stored in reversed(found) for message in stored.messages]

    def item(self, owner: str, item_id: str) -> dict[str, Any]:
        """Return an output item of any of the owner's responses by id; raise `ApiError` 400 if it is not stored."""
        response = self._used(owner, self._response_of.get((owner, item_id), ""))
        for item in () if response is None else response.body["output"]:
            if item["id"] == item_id:
                return dict(item)
        sentence = f"item with id {item_id!r:.300} not found: it is not stored on this server; send the item itself"
        raise bad_request(sentence, "input", "item_not_found")

    def keep(self, owner: str, messages: Sequence[ChatMessage], body: dict[str, Any]) -> None:
        """Store a response under the id in `body`, unless it exceeds `max_bytes`; evict the least recently used."""
        stored = StoredResponse(tuple(messages), body)
        size = _size(stored)
        if size > self._max_bytes:
            return
        with self._lock:
            entries = self._stored.setdefault(owner, OrderedDict())
            entries[body["id"]] = stored
            self._response_of |= {(owner, item["id"]): body["id"] for item in body.get("output", ())}
            self._sizes[owner] = self._sizes.get(owner, 0) + size
            while self._sizes[owner] > self._max_bytes:
                self._forget(owner, next(iter(entries)))

    def forget(self, owner: str, response_id: str) -> None:
        """Delete an owner's response; raise `ApiError` 404 if it is not stored."""
        self.find(owner, response_id)
        with self._lock:
            self._forget(owner, response_id)

    def num_bytes(self, owner: str) -> int:
        """Return the number of bytes in an owner's responses that count toward `max_bytes`."""
        return self._sizes.get(owner, 0)

    def _used(self, owner: str, response_id: str) -> StoredResponse | None:
        """Mark a response as most recently used and return it; return None if it is not stored."""
        with self._lock:
            entries = self._stored.get(owner)
            if entries is None or response_id not in entries:
                return None
            entries.move_to_end(response_id)
            return entries[response_id]

    def _forget(self, owner: str, response_id: str) -> None:
        stored = self._stored[owner].pop(response_id, None)
        if stored is not None:
            self._sizes[owner] -= _size(stored)
            for item in stored.body.get("output", ()):
                self._response_of.pop((owner, item["id"]), None)


def _size(stored: StoredResponse) -> int:
    return len(json.dumps([stored.messages, stored.body]))
