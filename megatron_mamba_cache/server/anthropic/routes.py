"""The routes of Anthropic's messages API."""

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..job import JobRules
from ..orders import OrderMaker, ServedModel, tenant_of
from ..responses import reply_to
from .format import MessagesFormat
from .schemas import CountTokensRequest, MessagesRequest


def messages_routes(model: ServedModel, rules: JobRules, orders: OrderMaker) -> APIRouter:
    """Return the routes below `/v1/messages`."""
    router = APIRouter(prefix="/v1/messages")

    @router.post("", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        chat = body.as_chat()
        order = orders.chat(chat, tenant_of(request, chat), "output_config.format")
        form = MessagesFormat(model.name, body.max_tokens, tells_thinking=body.tells_thinking)
        return reply_to(rules, replace(order, fits_room=True), form, streams=bool(body.stream))

    @router.post("/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, Any]:
        chat = body.as_chat()
        model.check_name(chat.model)
        tenant = tenant_of(request, chat)
        prompt = await rules.threads.run(tenant.owner, partial(model.reader.read_chat, tenant, chat.conversation()))
        return {"input_tokens": len(prompt.token_ids)}

    return router
