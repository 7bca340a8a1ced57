"""Messages for streaming, cancels and flushes between a server's front end and its engines.

They extend Megatron's protocol, in which a reply is sent only when a request has ended. If the sampling parameters set
`streams`, the client also gets `["progress", client's request id, {...}]` after each step. A client may send
`["cancel", request id]`, `["abort", [request ids]]`, `["flush", weights version or None]` and `["watch"]`, which
subscribes it to `["states", {replica: {...}}]`. An aborted request is answered with the tokens that it has. The
coordinator forwards cancels, aborts and flushes to the replicas as submissions of requests, because all ranks of a
replica receive submissions in the same order.
"""

from megatron.core.inference.headers import Headers

from .wire import packed

PROGRESS, CANCEL, ABORT, FLUSH = "progress", "cancel", "abort", "flush"
WATCH, STATE, STATES = "watch", "state", "states"

STREAMS = "streams"
"""Sampling parameter that requests progress after each step."""

CANCELS, ABORTS, FLUSHES = "cancels", "aborts", "flushes"
"""Sampling parameters that mark a submission as a cancel, an abort or a flush; clients may not send them."""


def pack_cancel(request_id: int) -> bytes:
    """Pack the message that makes a replica cancel a request."""
    return packed(Headers.SUBMIT_REQUEST.value, request_id, [], {CANCELS: True})


def pack_abort(request_id: int) -> bytes:
    """Pack the message that makes a replica end a request and reply with the tokens that it has."""
    return packed(Headers.SUBMIT_REQUEST.value, request_id, [], {ABORTS: True})


def pack_flush(request_id: int, weights_version: str | None) -> bytes:
    """Pack the message that makes a replica flush its cache.

    Args:
        request_id: Id that no request uses; Megatron requires an id in each submission.
        weights_version: Version of the weights from now on; None keeps the current version.
    """
    return packed(Headers.SUBMIT_REQUEST.value, request_id, [], {FLUSHES: [weights_version]})
