"""Routes of OpenAI's responses API, and its response format."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..errors import ApiError
from ..formats import Event
from ..job import Choice, Job, JobRules
from ..orders import OrderMaker, ServedModel, tenant_of
from ..parsers.parts import merged
from ..reply import Piece
from ..responses import reply_to
from .items import ChatMessage
from .output import ResponseOutput
from .schemas import ResponsesRequest
from .stored import StoredResponses

_INCOMPLETE = {"length": "max_output_tokens", "abort": "abort"}
"""Reason why a response is incomplete, by finish reason."""


def responses_routes(model: ServedModel, rules: JobRules, orders: OrderMaker, stored: StoredResponses) -> APIRouter:
    """Return the routes of the responses API below `/v1/responses`."""
    router = APIRouter(prefix="/v1/responses")

    @router.post("", response_model=None)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        owner, previous = _owner_of(request), body.previous_response_id
        earlier = [] if previous is None else stored.messages_up_to(owner, previous)
        messages = body.messages(partial(stored.item, owner))
        chat = body.as_chat([*earlier, *messages])

        def keep(reply: ChatMessage, response: dict[str, Any]) -> None:
            if body.store is not False:
                stored.keep(owner, [*messages, reply], response)

        order = orders.chat(chat, tenant_of(request, chat), "text.format")
        summarizes = body.reasoning is not None and body.reasoning.summarizes
        form = ResponsesFormat(model.name, body.settings(), keep, summarizes=summarizes)
        return reply_to(rules, order, form, streams=bool(body.stream))

    @router.get("/{response_id}")
    async def retrieve(response_id: str, request: Request) -> dict[str, Any]:
        return stored.find(_owner_of(request), response_id).body

    @router.delete("/{response_id}")
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        stored.forget(_owner_of(request), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


class ResponsesFormat:
    """`Format` for `/v1/responses`; the job must have exactly one choice.

    Args:
        settings: Request fields that the response repeats.
        keep: Called with (reply as a chat message, response body) when a response is complete.
        summarizes: If True, the reasoning's summary repeats the whole reasoning.
    """

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any],
        keep: Callable[[ChatMessage, dict[str, Any]], None],
        *,
        summarizes: bool,
    ) -> None:
        self._common = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._common |= {"model": model, **settings}
        self._keep = keep
        self._output = ResponseOutput(summarizes=summarizes)

    def opening(self, _job: Job) -> list[Event]:
        response = self._response("in_progress", usage=None)
        kinds = ("response.created", "response.in_progress")
        return [self._output.event(kind, response=response) for kind in kinds]

    def events(self, _job: Job, _choice: Choice, piece: Piece) -> list[Event]:
        return [event for part in piece.parts for event in self._output.add(part)]

    def closing(self, job: Job) -> list[Event]:
        status = _status(job)
        ended = self._output.cut(status)
        return [*ended, self._output.event(f"response.{status}", response=self._complete(job))]

    def failure(self, error: ApiError) -> Event:
        return self._output.event("error", code=error.code, message=error.message, param=error.param)

    def body(self, job: Job, _pieces: Mapping[int, Sequence[Piece]]) -> dict[str, Any]:
        for part in merged(job.choices[0].reply.parts):
            self._output.add(part)
        self._output.cut(_status(job))
        return self._complete(job)

    def _complete(self, job: Job) -> dict[str, Any]:
        """Return the body of the complete response, and pass it to `keep`."""
        response = self._response(_status(job), _usage(job), _INCOMPLETE.get(job.choices[0].reply.finish_reason or ""))
        self._keep(self._output.message(), response)
        return response

    def _response(self, status: str, usage: dict[str, Any] | None, cut_by: str | None = None) -> dict[str, Any]:
        return {
            **self._common,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None if cut_by is None else {"reason": cut_by},
            "output": list(self._output.items),
            "usage": usage,
        }


def _status(job: Job) -> str:
    return "incomplete" if job.choices[0].reply.finish_reason in _INCOMPLETE else "completed"


def _usage(job: Job) -> dict[str, Any]:
    usage = job.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.written_tokens,
            **usage.by_tier,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _owner_of(request: Request) -> str:
    return request.scope.get("owner", "")
