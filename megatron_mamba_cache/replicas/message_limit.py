"""Keep a replica's messages within the size limit; the coordinator's socket closes a connection that exceeds it."""

from collections.abc import Iterator
from typing import Any

import msgpack
from megatron.core.inference.headers import Headers

from ..policy.boundary_journal import BoundaryChanges
from .front_end import PROGRESS
from .wire import KEY_BYTES, KeyReport, Unsent, pack_report, pack_unsent

_REPORT_BYTES = 1024  # of a report without its keys


def messages_within(max_bytes: int, message: bytes) -> Iterator[bytes]:
    """Yield an engine's message as messages of at most `max_bytes` each, in order.

    Replies and progress are split by request. If the part of a single request exceeds the limit, an `Unsent` replaces
    it, which makes the coordinator fail that request.
    """
    if len(message) <= max_bytes:
        yield message
        return
    kind, *body = msgpack.unpackb(message, strict_map_key=False)
    if kind not in (Headers.ENGINE_REPLY.value, PROGRESS):
        raise ValueError(f"a message of kind {kind!r} is above max_message_bytes={max_bytes} and cannot be split")
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
    """Yield a report as messages of at most `max_bytes` each, but of one key at least; they apply in order."""
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
    """Return the request that an entry is about: a record of a reply, or a pair of progress."""
    return int(entry[0] if kind == PROGRESS else entry["requests"][0]["request_id"])
