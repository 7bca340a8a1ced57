"""Streaming client for a server that implements OpenAI's chat completions API."""

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from .flag_sources import UsageError

DEFAULT_URL = "http://127.0.0.1:5000"
_CONNECT_S = 600.0  # timeout in seconds; the first reply may have to wait for kernel compilation
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
Message = Mapping[str, str]


class ChatError(Exception):
    """Raised if a request to the server fails or is rejected; the message is one line."""


@dataclass(slots=True)
class Turn:
    """A reply that is being received: its text, token counts and times."""

    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None  # seconds until the first text; None until it arrives
    seconds: float = 0.0
    finish_reason: str = "cut off"

    def __str__(self) -> str:
        prompt, generated = (self.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens"))
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        share = 100 * cached / prompt if prompt else 0.0
        first = "no token" if self.first_token_s is None else f"first token after {1000 * self.first_token_s:.0f} ms"
        if not self.usage:  # the server sends usage at the end of a stream
            return f"[{first}, {self.finish_reason}]"
        rate = generated / self.seconds if self.seconds else 0.0
        return (
            f"[{cached} of {prompt} prompt tokens cached ({share:.0f} %), {first}, {generated} tokens at {rate:.0f}/s, "
            f"{self.finish_reason}]"
        )


class ChatClient:
    """Client for one server. `url` may end with /v1; the constructor raises `UsageError` for an invalid URL or key."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url is {url!r}; it must begin with http:// or https://")
        if not _names_a_host(url):
            raise UsageError(f"--url is {url!r}; it must be http://HOST or http://HOST:PORT")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError(
                "--api-key must have only printable ASCII characters, because it is sent in an HTTP header"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def first_model(self) -> str:
        """Return the name of the first model that the server lists; raise `ChatError` if it lists no model."""
        with closing(self._open("/v1/models", None)) as reply:
            try:
                models = [str(model["id"]) for model in json.load(reply)["data"]]
            except (OSError, HTTPException) as error:
                raise ChatError(f"the connection to {self.url} was lost: {error}") from error
            except _UNREADABLE as error:
                raise ChatError(f"{self.url} does not return a list of models in the format of OpenAI's API") from error
        if not models:
            raise ChatError(f"{self.url} lists no models; give a model name with --model")
        return models[0]

    def stream(
        self, turn: Turn, model: str, messages: Sequence[Message], settings: Mapping[str, Any]
    ) -> Generator[str, None, None]:
        """Yield the text of a reply as it arrives, and update `turn`. Closing the generator cancels the reply.

        Raises:
            ChatError: If the server cannot be reached, rejects the request or fails.
        """
        start = time.perf_counter()
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
        with closing(self._open("/v1/chat/completions", body | dict(settings))) as reply:
            try:
                for text in map(lambda event: _note(turn, event), _events(reply)):
                    if text and turn.first_token_s is None:
                        turn.first_token_s = time.perf_counter() - start
                    yield text
            except (OSError, HTTPException) as error:
                raise ChatError(f"the connection to {self.url} was lost: {error}") from error
            except _UNREADABLE as error:
                raise ChatError(f"{self.url} does not reply in the format of OpenAI's API") from error
            finally:
                turn.seconds = time.perf_counter() - start

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json", **self._key})
        try:
            return urlopen(request, timeout=_CONNECT_S)
        except HTTPError as error:
            raise ChatError(f"{self.url} replied with status {error.code}: {_message_of(error)}") from error
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ChatError(f"cannot connect to {self.url}: {getattr(reason, 'strerror', None) or reason}") from error


def _events(reply: Any) -> Iterator[dict[str, Any]]:
    for line in reply:
        text = line.decode("utf-8").strip()
        if text.startswith("data:") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data:"))


def _note(turn: Turn, event: Mapping[str, Any]) -> str:
    """Record a stream event in the turn, and return the event's text; "" if it has none."""
    if event.get("error"):
        error = event["error"]
        raise ChatError(str(error.get("message", error) if isinstance(error, dict) else error))
    turn.usage = event.get("usage") or turn.usage
    shown = ""
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        turn.text += content
        shown += (delta.get("reasoning_content") or delta.get("reasoning") or "") + content
        turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
    return shown


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _message_of(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (*_UNREADABLE, OSError, HTTPException):
        return error.reason
