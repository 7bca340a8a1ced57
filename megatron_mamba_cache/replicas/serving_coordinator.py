"""Coordinator for the HTTP server, with streamed replies, cancels, aborts, flushes and reports of replica states."""

from typing import Any

from .coordinator import PrefixCoordinator
from .front_end import ABORT, CANCEL, FLUSH, PROGRESS, STATE, STATES, WATCH, pack_abort, pack_cancel, pack_flush
from .membership import Replica
from .requests_in_flight import RequestInFlight
from .wire import WireError, packed


class ServingCoordinator(PrefixCoordinator):
    """Coordinator that also handles the messages defined in `front_end`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._watchers: set[bytes] = set()
        self._states: dict[str, dict[str, Any]] = {}

    def _handle(self, sender: bytes, kind: Any, body: list[Any]) -> None:
        replica = self._members.of_socket(sender)
        if replica is not None and kind == PROGRESS:
            self._forward_progress(replica, body)
        elif replica is not None and kind == STATE:
            (self._states[replica.name],) = body
            self._tell_states()
        elif sender in self._clients and kind == CANCEL:
            self._cancel(sender, body)
        elif sender in self._clients and kind == ABORT:
            self._abort(sender, body)
        elif sender in self._clients and kind == FLUSH:
            self._flush(body)
        elif sender in self._clients and kind == WATCH:
            self._watchers.add(sender)
            self._send(sender, self._packed_states())
        else:
            super()._handle(sender, kind, body)

    def _lose(self, identity: bytes, reason: str) -> None:
        super()._lose(identity, reason)
        living = {replica.name for replica in self._members.serving}
        self._states = {name: state for name, state in self._states.items() if name in living}
        self._tell_states()

    def _forget_client(self, identity: bytes) -> None:
        super()._forget_client(identity)
        self._watchers.discard(identity)
        for request in self._in_flight.of_client(identity):
            self._drop(request)

    def _forward_progress(self, replica: Replica, body: list[Any]) -> None:
        (news,) = body
        for request_id, progress in news:
            request = self._in_flight.get(request_id)
            if request is not None and request.replica == replica.name:
                self._send(request.client, packed(PROGRESS, request.client_request_id, progress))

    def _cancel(self, client: bytes, body: list[Any]) -> None:
        (client_request_id,) = body
        request = self._in_flight.find(client, client_request_id)
        if request is not None:  # None if the request has already ended
            self._drop(request)

    def _abort(self, client: bytes, body: list[Any]) -> None:
        (client_request_ids,) = body
        for client_request_id in client_request_ids:
            request = self._in_flight.find(client, client_request_id)
            if request is not None and request.replica is not None:  # None if the request has already ended
                request.is_aborted = True
                self._send(self._members[request.replica].identity, pack_abort(request.request_id))

    def _drop(self, request: RequestInFlight) -> None:
        replica = request.replica
        self._finish(request)
        if replica is not None:
            self._send(self._members[replica].identity, pack_cancel(request.request_id))

    def _flush(self, body: list[Any]) -> None:
        (weights_version,) = body
        if not isinstance(weights_version, str | None):
            raise WireError(f"the weights version is {weights_version!r:.50}; it must be a string or None")
        request_id, self.next_request_id = self.next_request_id, self.next_request_id + 1
        for replica in self._members.serving:
            self._send(replica.identity, pack_flush(request_id, weights_version))

    def _tell_states(self) -> None:
        self._send_all(self._watchers & self._clients, self._packed_states())

    def _packed_states(self) -> bytes:
        return packed(STATES, self._states)
