"""HTTP responses that contain a job's replies, complete or streamed."""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, is_of_anthropic, unexpected
from .exchange import Exchange, exchange_of
from .formats import Event, Format
from .job import Job, JobRules, job_of
from .orders import Order
from .reply import Piece

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """Return an error response in the format of the API that the request used."""
    exchange = exchange_of(scope)
    is_anthropic = is_of_anthropic(exchange.path)
    body = error.anthropic_body() | {"request_id": exchange.request_id} if is_anthropic else error.body()
    return JSONResponse(body, error.status, error.headers())


class JobResponse(Response):
    """Base class of responses that run an `Order`'s job; if the client disconnects, the job is cancelled."""

    def __init__(self, rules: JobRules, order: Order, form: Format) -> None:
        super().__init__()
        self._rules = rules
        self._order = order
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the order and send its replies; raise `ApiError` if it fails before the response starts."""
        await unless_disconnected(receive, self._answer(send, exchange_of(scope)))

    async def _answer(self, send: Send, exchange: Exchange) -> None:
        async with job_of(self._rules, self._order, exchange.request_id) as job:
            try:
                await self._send(job, send, exchange)
            finally:
                _note_usage(job, exchange)

    async def _send(self, job: Job, send: Send, exchange: Exchange) -> None:
        raise NotImplementedError


class WholeReply(JobResponse):
    """Response that sends one JSON object after all replies have ended."""

    async def _send(self, job: Job, send: Send, _exchange: Exchange) -> None:
        pieces: dict[int, list[Piece]] = defaultdict(list)
        async for choice, piece in job.pieces():
            pieces[choice.index].append(piece)
        if job.scores_prompts or job.returns_routes:  # build megabytes of JSON outside of the event loop
            response = await self._rules.threads.run(job.tenant.owner, lambda: self._body(job, pieces))
        else:
            response = self._body(job, pieces)
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    def _body(self, job: Job, pieces: Mapping[int, Sequence[Piece]]) -> JSONResponse:
        return JSONResponse(self._form.body(job, pieces))


class EventStream(JobResponse):
    """Response that streams server-sent events; it starts once the job is submitted to the engine."""

    async def _send(self, job: Job, send: Send, exchange: Exchange) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async for events in self._events(job):
                if events:
                    body = b"".join(_encoded(event) for event in events)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except ApiError as error:
            await self._fail(error, send, exchange)
        except Exception:
            logger.exception("a stream on %s failed", exchange.path)
            await self._fail(unexpected(), send, exchange)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, error: ApiError, send: Send, exchange: Exchange) -> None:
        """Send an error event as the stream's last event."""
        exchange.note_error(error)
        event = _encoded(self._form.failure(error))
        await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _events(self, job: Job) -> AsyncIterator[list[Event]]:
        yield self._form.opening(job)
        async for choice, piece in job.pieces():
            yield self._form.events(job, choice, piece)
        yield self._form.closing(job)


def reply_to(rules: JobRules, order: Order, form: Format, *, streams: bool) -> Response:
    """Return the response to a request (`order`): an event stream if `streams`, otherwise one JSON object."""
    return (EventStream if streams else WholeReply)(rules, order, form)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` and return True; if the client disconnects first, cancel `work` and return False."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _note_usage(job: Job, exchange: Exchange) -> None:
    usage = job.usage()
    exchange.prompt_tokens, exchange.cached_tokens = usage.prompt_tokens, usage.cached_tokens
    exchange.completion_tokens, exchange.first_token = usage.completion_tokens, job.times.first_token
    exchange.queue_seconds = job.times.queue_seconds
    reasons = [choice.reply.finish_reason for choice in job.choices]
    exchange.finish_reasons = tuple(reason for reason in reasons if reason is not None)


def _encoded(event: Event) -> bytes:
    name = "" if event.name is None else f"event: {event.name}\n"
    data = (
        event.data if isinstance(event.data, str) else json.dumps(event.data, ensure_ascii=False, separators=(",", ":"))
    )
    return f"{name}data: {data}\n\n".encode()
