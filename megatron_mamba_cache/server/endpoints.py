"""Routes for OpenAI's completions and chat completions, and for tokenization.

A route converts its request to an `Order` (module `orders`) and encodes the replies with a `Format` (module `formats`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import BaseModel
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from .errors import ApiError, bad_request
from .fair_threads import FairThreads
from .formats import ChatFormat, CompletionFormat, StreamSettings
from .job import JobRules
from .orders import OrderMaker, ServedModel, tenant_of
from .responses import reply_to
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationFields, TokenizeRequest
from .tenants import Tenant

_PACKAGE = "fastapi_offline"
_ASSETS = "docs/assets"
_NO_ICON = "data:,"

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "OpenAI": "Chat completions, completions and responses, for OpenAI's clients",
        "Anthropic": "Messages, for Anthropic's clients",
        "Tokens": "Text to token ids and back, in vLLM's format",
        "Probes and metrics": "For orchestrators and Prometheus",
        "Administration": "These need an admin key if one is set",
    }
)
"""Groups of routes on the documentation page, with their descriptions."""

OPERATIONS: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("post", "/v1/chat/completions"): ("OpenAI", "Reply to a chat"),
        ("post", "/v1/completions"): ("OpenAI", "Continue prompts"),
        ("post", "/v1/responses"): ("OpenAI", "Create a response"),
        ("get", "/v1/responses/{response_id}"): ("OpenAI", "Get a stored response"),
        ("delete", "/v1/responses/{response_id}"): ("OpenAI", "Delete a stored response"),
        ("get", "/v1/models"): ("OpenAI", "List the served models"),
        ("get", "/v1/models/{name}"): ("OpenAI", "Describe a model"),
        ("post", "/v1/messages"): ("Anthropic", "Reply to messages"),
        ("post", "/v1/messages/count_tokens"): ("Anthropic", "Count the tokens of messages"),
        ("post", "/tokenize"): ("Tokens", "Tokenize a text or messages"),
        ("post", "/detokenize"): ("Tokens", "Turn token ids into text"),
        ("get", "/tokenizer_info"): ("Tokens", "Describe the tokenizer and its chat template"),
        ("get", "/health"): ("Probes and metrics", "Check that requests are served"),
        ("get", "/ping"): ("Probes and metrics", "Check that requests are served, for SageMaker"),
        ("post", "/ping"): ("Probes and metrics", "Check that requests are served, for SageMaker"),
        ("get", "/version"): ("Probes and metrics", "List versions"),
        ("get", "/metrics"): ("Probes and metrics", "Report metrics for Prometheus"),
        ("get", "/dashboard"): ("Probes and metrics", "Show the dashboard"),
        ("post", "/admin/flush"): ("Administration", "Make the cache unreachable, after loading new weights"),
        ("post", "/admin/pause"): ("Administration", "Run no further step; queue requests"),
        ("post", "/admin/resume"): ("Administration", "Continue after a pause"),
        ("post", "/admin/abort"): ("Administration", "End requests with the tokens that they have"),
        ("get", "/admin/weights"): ("Administration", "Return the version of the weights"),
    }
)
"""Group and summary of each route, by method and path."""


def add_documentation(app: FastAPI, *, needs_key: bool) -> None:
    """Add the page `/docs`, with a field for the API key if `needs_key`. Call this before FastAPI builds the schema."""
    _describe(app, needs_key=needs_key)
    folder = _asset_folder()
    if folder is not None:
        app.mount(f"/{_ASSETS}", StaticFiles(directory=folder))

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        if folder is None:
            raise ApiError(501, "/docs requires fastapi-offline; run pip install fastapi-offline", "not_installed")
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=_NO_ICON,
            swagger_ui_parameters={"validatorUrl": None},
        )


def _asset_folder() -> Path | None:
    """Return the folder with the Swagger UI files; return None if `fastapi-offline` is not installed."""
    found = find_spec(_PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).with_name("static")


def _describe(app: FastAPI, *, needs_key: bool) -> None:
    """Add groups and summaries of the routes to the OpenAPI schema, and an API key scheme if `needs_key`."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema = plain()
        schema["tags"] = [{"name": name, "description": text} for name, text in GROUPS.items()]
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                if (method, path) in OPERATIONS:
                    group, operation["summary"] = OPERATIONS[method, path]
                    operation["tags"] = [group]
        if needs_key:
            schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["API key"] = {"type": "http", "scheme": "bearer"}
            schema["security"] = [{"API key": []}]
        return schema

    app.openapi = described  # type: ignore[method-assign]


class TokenizeReply(BaseModel):
    """Response with the token ids of a text or chat."""

    count: int
    max_model_len: int  # maximum number of prompt and generated tokens in a request
    tokens: list[int]
    token_strs: list[str] | None = None  # vocabulary entry of each token, if requested


class DetokenizeReply(BaseModel):
    """Response with the decoded text, including special tokens."""

    prompt: str


@dataclass(frozen=True, slots=True)
class TokenizingRoutes:
    """Routes `/tokenize`, `/detokenize` and, if enabled, `/tokenizer_info`."""

    model: ServedModel
    tokenizer: Any
    threads: FairThreads
    max_model_len: int
    describes_tokenizer: bool = False  # True enables `/tokenizer_info`

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post("/tokenize")
        async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeReply:
            self.model.check_name(body.model)
            owner = request.scope.get("owner", "")
            return await self.threads.run(owner, partial(self._tokenized, Tenant(owner), body))

        @router.post("/detokenize")
        async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeReply:
            self.model.check_name(body.model)
            return await self.threads.run(request.scope.get("owner", ""), partial(self._text_of, body.tokens))

        if self.describes_tokenizer:

            @router.get("/tokenizer_info")
            async def tokenizer_info() -> dict[str, Any]:
                return _described_of_tokenizing(self.tokenizer)

        return router

    def _tokenized(self, tenant: Tenant, body: TokenizeRequest) -> TokenizeReply:
        tokens = self._tokens_of(tenant, body)
        return TokenizeReply(
            count=len(tokens),
            max_model_len=self.max_model_len,
            tokens=list(tokens),
            token_strs=[self._spelled(token) for token in tokens] if body.return_token_strs else None,
        )

    def _tokens_of(self, tenant: Tenant, body: TokenizeRequest) -> Sequence[int]:
        reader = self.model.reader
        add = body.add_special_tokens
        if body.messages is not None:
            return reader.read_chat(tenant, body.conversation_of(body.messages), add_special_tokens=bool(add)).token_ids
        if not body.prompt:
            return () if add is False else self.tokenizer.tokenize("")
        return reader.read(tenant, body.prompt, add).token_ids

    def _text_of(self, tokens: Sequence[int]) -> DetokenizeReply:
        size = self.tokenizer.vocab_size
        for index, token in enumerate(tokens):
            if token >= size:
                raise bad_request(f"token {token} is outside the vocabulary of {size} tokens", f"tokens.{index}")
        return DetokenizeReply(prompt=self.tokenizer.detokenize(list(tokens), skip_special_tokens=False))

    def _spelled(self, token: int) -> str:
        spell = getattr(self.tokenizer, "token_of", None)
        found: str | None = None if spell is None else spell(token)
        return self.tokenizer.detokenize([token]) if found is None else found


def _described_of_tokenizing(tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer's class name, settings and chat template, in the format of vLLM's `/tokenizer_info`."""
    settings = {key: value for key, value in getattr(tokenizer, "settings", {}).items() if key != "name_or_path"}
    template = getattr(tokenizer, "chat_template", "") or None
    return {"tokenizer_class": type(tokenizer).__name__, **settings, "chat_template": template}


def openai_routes(model: ServedModel, rules: JobRules, orders: OrderMaker) -> APIRouter:
    """Return the routes for models, completions and chat completions below `/v1`."""
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
        includes_reasoning = body.include_reasoning is not False
        form = ChatFormat(model.name, _stream_settings(body), includes_reasoning=includes_reasoning)
        return reply_to(rules, order, form, streams=bool(body.stream))

    return router


def _stream_settings(body: GenerationFields) -> StreamSettings:
    return StreamSettings(
        includes_usage=body.includes_usage,
        usage_in_every_event=body.usage_in_every_event,
        returns_token_ids=bool(body.return_token_ids),
        request_id=body.request_id,
    )


def _described(model: ServedModel, name: str, max_model_len: int) -> dict[str, Any]:
    """Return the entry for one model name in `/v1/models`; the fields after `owned_by` are vLLM's extensions."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "megatron-mamba-cache",
        "root": model.name,
        "parent": None,
        "max_model_len": max_model_len,
    }
