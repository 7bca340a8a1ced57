"""The routes of OpenAI's responses API."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..job import JobRules
from ..orders import OrderMaker, ServedModel, tenant_of
from ..responses import reply_to
from .format import ResponsesFormat
from .items import ChatMessage
from .schemas import ResponsesRequest
from .stored import StoredResponses


def responses_routes(model: ServedModel, rules: JobRules, orders: OrderMaker, stored: StoredResponses) -> APIRouter:
    """Return the routes below `/v1/responses`."""
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


def _owner_of(request: Request) -> str:
    owner: str = request.scope.get("owner", "")
    return owner
