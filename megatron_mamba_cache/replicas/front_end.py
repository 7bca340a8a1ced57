"""What a front end and the engines tell each other through a coordinator, beside Megatron's messages.

Megatron's replies come whole, when a request has ended. A client whose sampling parameters say `streams` hears of each
step instead: `["progress", client's request id, {...}]`; the reply still comes at the end. A client may send
`["cancel", request id]`, `["flush", weights version or None]` and `["watch"]`, which brings it `["states", {replica:
{...}}]` now and then. To the replicas cancels and flushes travel as submissions that are none, since all ranks of a
replica see these in one order.
"""

import msgpack
from megatron.core.inference.headers import Headers

PROGRESS, CANCEL, FLUSH, WATCH, STATE, STATES = "progress", "cancel", "flush", "watch", "state", "states"

STREAMS = "streams"
"""Sampling parameter of a request whose client wants to hear of each step."""

CANCELS, FLUSHES = "cancels", "flushes"
"""Sampling parameters of a submission that is none; no client may send them."""


def pack_cancel(request_id: int) -> bytes:
    """Return the message that makes a replica drop a request."""
    return msgpack.packb([Headers.SUBMIT_REQUEST.value, request_id, [], {CANCELS: True}])


def pack_flush(request_id: int, weights_version: str | None) -> bytes:
    """Return the message that makes a replica flush its cache; no request has the id."""
    return msgpack.packb([Headers.SUBMIT_REQUEST.value, request_id, [], {FLUSHES: [weights_version]}])
