"""The routes of OpenAI's API."""

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .backend import Backend, GenerationRequest
from .errors import ApiError, bad_request
from .formats import ChatFormat, CompletionFormat, Format
from .job import Job, JobRules
from .limits import ServerLimits
from .prompts import Prompt, PromptReader
from .replies import EventStream, whole_reply
from .schemas import ChatRequest, CompletionRequest, GenerationFields
from .tenants import Tenant

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and what turns requests into its tokens.

    Args:
        name: That clients call it by.
        created: Seconds since the epoch, as `/v1/models` tells it.
    """

    name: str
    reader: PromptReader
    created: int


def openai_routes(model: ServedModel, backend: Backend, rules: JobRules, limits: ServerLimits) -> APIRouter:
    """Return the routes below `/v1`."""
    router = APIRouter(prefix="/v1")
    maker = _JobMaker(model, backend, rules, limits)

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_described(model)]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        maker.check_model(name)
        return _described(model)

    @router.post("/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        tenant = tenant_of(request, body)
        texts = body.prompts
        prompts = await asyncio.to_thread(lambda: [model.reader.read(tenant, text) for text in texts])
        job = maker.job(prompts, body, tenant, body.max_tokens or _DEFAULT_COMPLETION_TOKENS, body.logprobs)
        return await _answer(job, _form(CompletionFormat, model, body), body, request)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        tenant = tenant_of(request, body)
        messages = [message.plain() for message in body.messages]
        prompt = await asyncio.to_thread(model.reader.read_chat, tenant, messages)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        room = backend.max_sequence_length - len(prompt.token_ids)
        wanted = body.max_completion_tokens or body.max_tokens or max(room, 1)
        job = maker.job([prompt], body, tenant, wanted, (body.top_logprobs or 0) if body.logprobs else None)
        return await _answer(job, _form(ChatFormat, model, body), body, request)

    return router


def tenant_of(request: Request, body: GenerationFields) -> Tenant:
    """Return whose prefixes a request may share; `scope["owner"]` has been found by its API key."""
    return Tenant(request.scope.get("owner", ""), body.cache_salt or "")


class _JobMaker:
    def __init__(self, model: ServedModel, backend: Backend, rules: JobRules, limits: ServerLimits) -> None:
        self._model = model
        self._backend = backend
        self._rules = rules
        self._limits = limits

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` 404 for another model than the one that is served."""
        if name is not None and name != self._model.name:
            raise ApiError(
                404, f"the model {name!r} is not served here, but {self._model.name!r} is", "model_not_found", "model"
            )

    def job(
        self, prompts: list[Prompt], body: GenerationFields, tenant: Tenant, max_tokens: int, num_log_probs: int | None
    ) -> Job:
        """Return the job of a request.

        Raises:
            ApiError: If the model is another one, or the choices are too many.
        """
        self.check_model(body.model)
        num_choices = body.n or 1
        if num_choices * len(prompts) > self._limits.max_choices:
            raise bad_request(
                f"{len(prompts)} prompts times n={num_choices} make {len(prompts) * num_choices} choices; at most "
                f"{self._limits.max_choices} are allowed in a request",
                "n",
            )
        seed = secrets.randbelow(2**63) if body.seed is None else body.seed
        top_k = max(body.top_k or 0, 0)
        plain = GenerationRequest(
            prompt=(),
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=1 if body.top_p == 0 else top_k,  # no probability at all: the most probable token
            top_p=body.top_p or 0.0,
            seed=seed,
            tenant=tenant.name,
            num_log_probs=num_log_probs,
            ignores_end=bool(body.ignore_eos),
        )
        return Job(self._rules, tenant, prompts, plain, num_choices, body.stops)


def _form(kind: type[CompletionFormat] | type[ChatFormat], model: ServedModel, body: GenerationFields) -> Format:
    return kind(model.name, includes_usage=body.includes_usage, returns_token_ids=bool(body.return_token_ids))


async def _answer(job: Job, form: Format, body: GenerationFields, request: Request) -> Response:
    if body.stream:
        return EventStream(job, form, includes_usage=body.includes_usage)
    return await whole_reply(job, form, request)


def _described(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "megatron-mamba-cache"}


def seconds_now() -> int:
    """Return the time as `/v1/models` tells it."""
    return int(time.time())
