"""One HTTP request from its arrival to the end of its response, as the access log tells of it."""

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.types import Scope

from .errors import ApiError

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class Exchange:
    """A request and its response.

    Args:
        request_id: The client's, or one that was made.
        path: As it came, without the query; percent-encoded bytes stay encoded.
        arrived: Seconds of the monotonic clock.
        key_name: Name of the API key; "" before it is known, or where no key is needed.
        status: Of the response, or 499 if its client left before the end; 0 before it begins.
        prompt_tokens, cached_tokens, completion_tokens: None for a request without replies of the model.
        first_token: When its first token came.
        ended: When it ended.
        error: Code or type of the error that it was answered with.
        is_cut_off: Whether the end of the server ended it.
    """

    request_id: str
    method: str
    path: str
    arrived: float = field(default_factory=time.monotonic)
    key_name: str = ""
    status: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token: float | None = None
    ended: float | None = None
    error: str | None = None
    is_cut_off: bool = False

    @staticmethod
    def of_scope(scope: Scope) -> "Exchange":
        """Begin the exchange of an HTTP request."""
        path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogatepass")
        return Exchange(_request_id(scope), scope["method"], _printable(path.partition(b"?")[0]))

    def note_error(self, error: ApiError) -> None:
        """Note the error that the request is answered with, in the middle of a stream too."""
        self.error = error.code or error.type


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange that a request belongs to; one of no consequence where none was begun."""
    found = scope.get("exchange")
    return found if isinstance(found, Exchange) else Exchange.of_scope(scope)


def _request_id(scope: Scope) -> str:
    """Return the client's `X-Request-Id` if it may stand in a header and in a line of a log, or a new one."""
    told: bytes = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return told.decode() if _SANE_ID.fullmatch(told) else uuid.uuid4().hex


def _printable(path: bytes) -> str:
    """Return a path on one line of ASCII without spaces, whatever a client has sent."""
    return "".join(chr(byte) if 0x21 <= byte <= 0x7E else f"%{byte:02X}" for byte in path)
