"""Send a job's replies, whole or as a stream; a client that leaves takes its requests along."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .formats import Format
from .job import Job
from .reply import Piece

_Found = TypeVar("_Found")
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

CLIENT_CLOSED_REQUEST = 499


def error_response(error: ApiError) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    return JSONResponse(error.body(), error.status, error.headers())


async def whole_reply(job: Job, form: Format, request: Request) -> Response:
    """Return the replies once all have ended.

    Raises:
        ApiError: If the job is refused or fails.
    """
    async with job:
        pieces = await unless_disconnected(request.receive, _collected(job))
        if pieces is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(form.body(job, pieces))


class EventStream(Response):
    """The replies as server-sent events, from the moment that the job is taken in.

    Args:
        includes_usage: Whether the last event has the usage.
    """

    def __init__(self, job: Job, form: Format, *, includes_usage: bool) -> None:
        super().__init__()
        self._job = job
        self._form = form
        self._includes_usage = includes_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; whatever ends this, nothing of the job stays in the engine."""
        try:
            async with self._job:
                await unless_disconnected(receive, self._send_events(send))
        except ApiError as error:  # the job was refused, and nothing has been sent
            await error_response(error)(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async for event in self._events():
                await send({"type": "http.response.body", "body": _encoded(event), "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": _encoded(error.body()), "more_body": False})
        else:
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        async for choice, piece in self._job.pieces():
            yield self._form.chunk(choice, piece)
        if self._includes_usage:
            yield self._form.usage_chunk(self._job)


async def unless_disconnected(receive: Callable[[], Awaitable[Any]], work: Awaitable[_Found]) -> _Found | None:
    """Return what `work` returns; None, and cancel it, if the client leaves before. Raises what it raises."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _collected(job: Job) -> dict[int, list[Piece]]:
    pieces: dict[int, list[Piece]] = defaultdict(list)
    async for choice, piece in job.pieces():
        pieces[choice.index].append(piece)
    return pieces


def _encoded(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
