"""Messages between a front end and its engines, in addition to Megatron's.

Megatron sends a complete reply when a request has ended. If the sampling parameters set `streams`, the client also gets
`["progress", client's request id, {...}]` after each step, followed by the reply at the end. A client may send
`["cancel", request id]`, `["flush", weights version or None]` and `["watch"]`, which subscribes it to
`["states", {replica: {...}}]`. Cancels and flushes reach the replicas as special submissions, because all ranks of a
replica receive submissions in the same order.
"""

from megatron.core.inference.headers import Headers

from .wire import packed

PROGRESS, CANCEL, FLUSH, WATCH, STATE, STATES = "progress", "cancel", "flush", "watch", "state", "states"

STREAMS = "streams"
"""Sampling parameter that requests progress after each step."""

CANCELS, FLUSHES = "cancels", "flushes"
"""Sampling parameters that mark a submission as a cancel or a flush; clients may not send them."""


def pack_cancel(request_id: int) -> bytes:
    """Return the message that makes a replica drop a request."""
    return packed(Headers.SUBMIT_REQUEST.value, request_id, [], {CANCELS: True})


def pack_flush(request_id: int, weights_version: str | None) -> bytes:
    """Return the message that makes a replica flush its cache; `request_id` must be unused."""
    return packed(Headers.SUBMIT_REQUEST.value, request_id, [], {FLUSHES: [weights_version]})
