"""The access log: one line for each HTTP request when it ends, as text or as a JSON object."""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from .exchange import Exchange

AccessLogFormat = Literal["text", "json", "off"]

Write = Callable[[str], object]


def write_line(line: str) -> None:
    """Write a line to stdout; a closed pipe does not stop the server."""
    with suppress(OSError, ValueError):
        print(line, flush=True)


class AccessLog:
    """Writes one line for each exchange.

    Args:
        write: Called with each line, without its newline.
        now: Returns the current time.
    """

    def __init__(
        self,
        form: AccessLogFormat = "off",
        write: Write = write_line,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._line: Callable[[dict[str, Any]], str] | None = {"text": _text, "json": _json, "off": None}[form]
        self._write = write
        self._now = now

    def note(self, exchange: Exchange) -> None:
        """Write the line of an exchange that has ended."""
        if self._line is not None:
            self._write(self._line(_fields(exchange, self._now())))


def _fields(exchange: Exchange, now: datetime) -> dict[str, Any]:
    """Return the fields of a line, under their JSON names."""
    return {
        "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": exchange.request_id,
        "key": exchange.key_name or None,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "prompt_tokens": exchange.prompt_tokens,
        "cached_tokens": exchange.cached_tokens,
        "completion_tokens": exchange.completion_tokens,
        "first_token_seconds": exchange.seconds_to(exchange.first_token),
        "seconds": exchange.seconds_to(exchange.ended),
        "error": exchange.error,
    }


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))


def _text(fields: dict[str, Any]) -> str:
    head = f"{fields['time']} {fields['method']} {fields['path']} {fields['status']}"
    names = {
        "key": "key",
        "prompt_tokens": "prompt",
        "cached_tokens": "cached",
        "completion_tokens": "completion",
        "first_token_seconds": "first_token_s",
        "seconds": "seconds",
        "error": "error",
        "request_id": "id",
    }
    told = [f"{short}={fields[name]}" for name, short in names.items() if fields[name] is not None]
    return " ".join([head, *told])
