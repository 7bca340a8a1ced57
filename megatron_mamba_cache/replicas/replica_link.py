"""Connection between a replica's process and the coordinator, which replaces Megatron's socket."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgpack
import zmq
from megatron.core.inference.headers import Headers

from ..policy.boundary_journal import BoundaryChanges
from .channels import Channel, set_heartbeats
from .front_end import PROGRESS
from .prompt_keys import KeySalt
from .wire import FENCED, KEY_BYTES, PROBE, WELCOME, Hello, KeyReport, Unsent, pack_hello, pack_report, pack_unsent

_LINGER_MS = 1000
_ENCRYPTION_BYTES = 64
"""Size reserved for encryption: CURVE adds 33 bytes to a message, which count towards the size limit."""
_WELCOME_POLL_S = 0.01
_REPORT_BYTES = 1024  # upper bound for the size of a report without its keys

COORDINATOR_SILENCE_S = 60.0
"""Number of seconds without a message from the coordinator after which a replica ends."""


class ReplicaFencedError(RuntimeError):
    """Raised when the coordinator has ended or has declared this replica dead."""


class ReplicaLink:
    """Connection that registers a process with the coordinator and then carries Megatron's messages.

    Args:
        max_message_bytes: Maximum size of a message to the coordinator; see `RoutingSettings`.
        channel: Security that the coordinator requires; None: no authentication and no encryption.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: Hello,
        max_message_bytes: int,
        channel: Channel | None = None,
    ) -> None:
        self._address = address
        self._max_message_bytes = max_message_bytes - _ENCRYPTION_BYTES
        self._is_welcome = False
        self._unread: deque[bytes] = deque()  # for the engine
        self._last_heard = time.monotonic()
        self._socket = context.socket(zmq.DEALER, zmq.Socket)
        name = f"{hello.replica}/{hello.member}"
        if hello.proof:
            name += f"/{secrets.token_hex(16)}"  # random, so that clients cannot guess it
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        (channel or Channel()).secure_connection(self._socket)
        set_heartbeats(self._socket)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # unlimited, so that no message is dropped or delayed during a long step
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(address)
        self._socket.send(pack_hello(hello))

    def recv(self, flags: int = 0) -> bytes:
        """Return the next message for the engine; skip probes and the welcome.

        Raises:
            zmq.Again: If there is no message and `flags` has `zmq.NOBLOCK`.
            ReplicaFencedError: If the coordinator has ended or has declared this replica dead.
        """
        return self._unread.popleft() if self._unread else self._next(flags)

    def check(self) -> None:
        """Read all messages that have arrived and keep them for `recv`.

        Raises:
            ReplicaFencedError: If the coordinator has ended or has declared this replica dead.
        """
        try:
            while True:
                self._unread.append(self._next(zmq.NOBLOCK))
        except zmq.Again:
            return

    def _next(self, flags: int) -> bytes:
        while True:
            message = self._receive(flags)
            if message == FENCED:
                raise ReplicaFencedError(
                    "the coordinator has declared this replica dead, because it could not be reached or one of its "
                    "processes has ended; its requests were sent to other replicas; restart this replica"
                )
            self._is_welcome = self._is_welcome or message == WELCOME
            if message not in (PROBE, WELCOME):
                return message

    def _receive(self, flags: int) -> bytes:
        try:
            message: bytes = self._socket.recv(flags)
        except zmq.Again:
            if time.monotonic() - self._last_heard > COORDINATOR_SILENCE_S:
                raise ReplicaFencedError(
                    f"nothing was received from the coordinator at {self._address} for {COORDINATOR_SILENCE_S:g} s; "
                    "restart it and its replicas"
                ) from None
            raise
        self._last_heard = time.monotonic()
        return message

    async def wait_for_welcome(self, timeout_s: float) -> None:
        """Wait until another task has read the coordinator's welcome; raise `ConnectionError` after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not self._is_welcome:
            if time.monotonic() > end:
                raise ConnectionError(
                    f"no coordinator has accepted this replica at {self._address} within {timeout_s:g} s; check the "
                    "address, and that all ranks of the replica have started"
                )
            await asyncio.sleep(_WELCOME_POLL_S)

    def drain(self) -> None:
        """Discard all messages, on a rank that gets its requests from another rank; raise like `check`."""
        try:
            while True:
                self.recv(zmq.NOBLOCK)
        except zmq.Again:
            return

    def send(self, message: bytes) -> None:
        """Send a message from the engine, split into several if it exceeds the size limit; see `messages_within`."""
        for part in messages_within(self._max_message_bytes, message):
            self._socket.send(part)

    def report_keys(self, changes: BoundaryChanges, salt: KeySalt | None) -> None:
        """Report changes in the cached boundaries; `salt` is None if it has not changed since the last report."""
        for part in reports_within(self._max_message_bytes, KeyReport(changes, salt)):
            self._socket.send(part)

    def close(self) -> None:
        """Close the connection; unless the engines were stopped, the coordinator then declares the replica dead."""
        self._socket.close()


def messages_within(max_bytes: int, message: bytes) -> Iterator[bytes]:
    """Yield a message unchanged, or split into one message per request if it is larger than `max_bytes`.

    Only messages with replies or progress can be split. If the message for one request is still too large, it is
    replaced by an `Unsent`, and the coordinator then fails that request.

    Raises:
        ValueError: If a message of another kind is larger than `max_bytes`.
    """
    if len(message) <= max_bytes:
        yield message
        return
    kind, *body = msgpack.unpackb(message, strict_map_key=False)
    if kind not in (Headers.ENGINE_REPLY.value, PROGRESS):
        raise ValueError(f"a message of kind {kind!r} exceeds max_message_bytes={max_bytes} and cannot be split")
    for entry in body[0]:
        part = msgpack.packb([kind, [entry]])
        if len(part) > max_bytes:
            reason = (
                f"its reply has {len(part)} bytes, above max_message_bytes={max_bytes}; ask for fewer log-probs, "
                "or raise max_message_bytes in the coordinator's RoutingSettings"
            )
            part = pack_unsent(Unsent(_request_id(kind, entry), reason))
        yield part


def reports_within(max_bytes: int, report: KeyReport) -> Iterator[bytes]:
    """Yield a report as one or more messages, in order; each has at most `max_bytes`, unless it has only one key."""
    changes, salt, flushed = report.changes, report.salt, report.changes.were_flushed
    most = max((max_bytes - _REPORT_BYTES) // KEY_BYTES, 1)
    dropped, published = changes.dropped, changes.published
    while True:
        some_dropped, dropped = dropped[:most], dropped[most:]
        room = most - len(some_dropped)
        some_published, published = published[:room], published[room:]
        yield pack_report(KeyReport(BoundaryChanges(some_published, some_dropped, flushed), salt))
        if not dropped and not published:
            return
        salt, flushed = None, False


def _request_id(kind: Any, entry: Any) -> int:
    """Return the request id of an entry in a message: a reply's record, or a pair of request id and progress."""
    return int(entry[0] if kind == PROGRESS else entry["requests"][0]["request_id"])
