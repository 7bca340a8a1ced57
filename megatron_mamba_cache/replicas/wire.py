"""Messages between replicas and the coordinator that extend Megatron's protocol.

All messages are lists packed by msgpack. The first item is a number in Megatron's messages and a string in the messages
defined here. A replica sends `["hello", {...}]`, `["keys", {...}]` and `["unsent", request id, reason]`. The
coordinator sends `["welcome"]`, `["probe"]` and `["fenced"]`.
"""

from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from ..policy.boundary_journal import BoundaryChanges
from ..policy.identifiers import BlockKey
from ..policy.routing import ReplicaName
from .prompt_keys import KeySalt

HELLO, KEYS, UNSENT = "hello", "keys", "unsent"
WELCOME = msgpack.packb(["welcome"])
"""Message to all processes of a replica when the last of them has joined."""

PROBE = msgpack.packb(["probe"])
"""Message that tests a connection; replicas ignore it."""

FENCED = msgpack.packb(["fenced"])
"""Message that informs a replica's process that the replica has been declared dead."""

KEY_BYTES = 32
"""Number of bytes per block key in a report."""

_MOST_CHARACTERS = 128
_MOST_REASON_CHARACTERS = 1000
_OPENING_BYTES = 64


class WireError(ValueError):
    """Raised for a malformed or forbidden message."""


def packed(*message: Any) -> bytes:
    """Pack the parts of a message with msgpack."""
    found: bytes = msgpack.packb(message)
    return found


@dataclass(frozen=True, slots=True)
class Hello:
    """First message that a process sends to the coordinator, to join as part of a replica.

    Args:
        replica: Name of the replica, unique across all launches.
        member: Rank within the replica's model-parallel group; member 0 gets the requests.
        num_members: Number of ranks in that group. The replica gets requests once all members have joined, and is
            declared dead if any member dies.
        domain: Name shared by the replicas of one expert-parallel group, which are declared dead together; "" without
            expert parallelism.
        proof: Proof that the process may receive other clients' prompts; "" if the connection is already authenticated.
    """

    replica: ReplicaName
    member: int = 0
    num_members: int = 1
    domain: str = ""
    proof: str = ""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """Report of changes in a replica's cached boundaries; `salt` is None if it has not changed."""

    changes: BoundaryChanges
    salt: KeySalt | None = None


@dataclass(frozen=True, slots=True)
class Unsent:
    """Notice that a replica cannot send a request's reply or progress, because the message is too large."""

    request_id: int
    reason: str


def opening_of(message: bytes) -> tuple[Any, ...]:
    """Return the first two items of a packed message, its kind and the first value of its body.

    Only the first `_OPENING_BYTES` bytes are read.

    Raises:
        WireError: If the message does not begin with two such items.
    """
    opening = msgpack.Unpacker(raw=False)
    opening.feed(message[:_OPENING_BYTES])
    try:
        if opening.read_array_header() >= 2:
            return opening.unpack(), opening.unpack()
    except Exception as error:
        raise WireError(f"the message does not begin with a kind and a body: {message[:_OPENING_BYTES]!r}") from error
    raise WireError("the message has no body")


def pack_hello(hello: Hello) -> bytes:
    """Pack a "hello" message."""
    return packed(HELLO, asdict(hello))


def hello_of(body: Any) -> Hello:
    """Parse the body of a "hello" message; raise `WireError` if it is invalid."""
    fields = _fields(body, {"replica": str, "member": int, "num_members": int, "domain": str, "proof": str})
    if max(len(fields[name]) for name in ("replica", "domain", "proof")) > _MOST_CHARACTERS:
        raise WireError(f"a name in the hello message has more than {_MOST_CHARACTERS} characters")
    if not 0 <= fields["member"] < fields["num_members"]:
        raise WireError(f"member is {fields['member']}; it must be less than num_members={fields['num_members']}")
    return Hello(**fields)


def pack_report(report: KeyReport) -> bytes:
    """Pack a "keys" message."""
    changes, salt = report.changes, report.salt
    body = {
        "salt": None if salt is None else [salt.fingerprint, salt.weights_version, salt.epoch, salt.block_size],
        "flushed": changes.were_flushed,
        "published": _pack_keys(changes.published),
        "dropped": _pack_keys(changes.dropped),
    }
    return packed(KEYS, body)


def report_of(body: Any) -> KeyReport:
    """Parse the body of a "keys" message; raise `WireError` if it is invalid."""
    fields = _fields(body, {"salt": (list, type(None)), "flushed": bool, "published": bytes, "dropped": bytes})
    changes = BoundaryChanges(_keys(fields["published"]), _keys(fields["dropped"]), fields["flushed"])
    return KeyReport(changes, None if fields["salt"] is None else _salt(fields["salt"]))


def pack_unsent(unsent: Unsent) -> bytes:
    """Pack an "unsent" message."""
    return packed(UNSENT, unsent.request_id, unsent.reason)


def unsent_of(body: list[Any]) -> Unsent:
    """Parse the body of an "unsent" message; raise `WireError` if it is invalid."""
    if [type(value) for value in body] != [int, str]:
        raise WireError(f"the body must be a request id and a reason, found {body!r:.100}")
    return Unsent(body[0], body[1][:_MOST_REASON_CHARACTERS])


def _salt(values: list[Any]) -> KeySalt:
    kinds = (str, str, int, int)
    if len(values) != len(kinds) or not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        raise WireError(f"salt is {values!r:.100}; it must be [str, str, int, int]")
    if values[3] < 1:
        raise WireError(f"the block size in the salt is {values[3]}; it must be at least 1")
    return KeySalt(*values)


def _fields(body: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(body, dict) or body.keys() != kinds.keys():
        raise WireError(f"the body must have the fields {sorted(kinds)}, found {body!r:.100}")
    for name, kind in kinds.items():
        if not isinstance(body[name], kind):
            raise WireError(f"{name} is {body[name]!r:.100}, which has the wrong type")
    return body


def _pack_keys(keys: tuple[BlockKey, ...]) -> bytes:
    return b"".join(key.to_bytes(KEY_BYTES, "big") for key in keys)


def _keys(packed: bytes) -> tuple[BlockKey, ...]:
    if len(packed) % KEY_BYTES:
        raise WireError(f"the keys have {len(packed)} bytes, which is not a multiple of {KEY_BYTES}")
    starts = range(0, len(packed), KEY_BYTES)
    return tuple(BlockKey(int.from_bytes(packed[start : start + KEY_BYTES], "big")) for start in starts)
