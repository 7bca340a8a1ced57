"""The routes of OpenAI's completions and chat completions.

A route turns its request into an `Order` (`orders`) and sends the job's replies in a `Format` (`formats`).
"""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .formats import ChatFormat, CompletionFormat, StreamSettings
from .job import JobRules
from .orders import OrderMaker, ServedModel, tenant_of
from .responses import reply_to
from .schemas import ChatRequest, CompletionRequest, GenerationFields


def openai_routes(model: ServedModel, rules: JobRules, orders: OrderMaker) -> APIRouter:
    """Return the routes below `/v1`."""
    router = APIRouter(prefix="/v1")
    longest = rules.backend.max_sequence_length

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_described(model, name, longest) for name in model.names]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        model.check_name(name)
        return _described(model, name, longest)

    @router.post("/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        order = orders.completion(body, tenant_of(request, body))
        return reply_to(rules, order, CompletionFormat(model.name, _stream_settings(body)), streams=bool(body.stream))

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        order = orders.chat(body, tenant_of(request, body))
        tells_reasoning = body.include_reasoning is not False
        form = ChatFormat(model.name, _stream_settings(body), tells_reasoning=tells_reasoning)
        return reply_to(rules, order, form, streams=bool(body.stream))

    return router


def _stream_settings(body: GenerationFields) -> StreamSettings:
    return StreamSettings(
        includes_usage=body.includes_usage,
        tells_usage_always=body.tells_usage_always,
        returns_token_ids=bool(body.return_token_ids),
        request_id=body.request_id,
    )


def _described(model: ServedModel, name: str, max_model_len: int) -> dict[str, Any]:
    """Return a model's entry; the fields after `owned_by` are vLLM's."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "megatron-mamba-cache",
        "root": model.name,
        "parent": None,
        "max_model_len": max_model_len,
    }
