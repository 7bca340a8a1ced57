"""The HTTP application: routes, error handlers and their shared state."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from .access import AccessControl, CrossOrigin, Entrance
from .anthropic.routes import messages_routes
from .backend import Backend
from .bodies import Bodies
from .dashboard import History, dashboard_routes
from .endpoints import TokenizingRoutes, add_documentation, openai_routes
from .errors import ApiError, bad_request, schema_error, unexpected
from .exchange import AccessLog, Exchange, exchange_of
from .fair_threads import FairThreads
from .job import Choice, Job, JobRules
from .limits import QueueGate, ServerLimits
from .load_record import LoadRecord
from .metrics import ServerMetrics
from .orders import OrderMaker, ServedModel
from .parsers.families import ReplySyntax
from .prompts import Prompt, PromptReader
from .reply import Reply
from .responses import error_response
from .responses_api.routes import responses_routes
from .responses_api.stored import StoredResponses
from .schemas import AbortRequest, FlushRequest
from .tenants import ApiKeys, Tenant
from .traces import Traces
from .transcripts import Transcripts

_UNREADABLE_TO_FASTAPI = "There was an error parsing the body"
_UNREADABLE = bad_request(
    "the body is not valid JSON: it is not UTF-8, is nested too deeply, or has a number with too many digits",
    code="invalid_json",
)
_NUM_TOKENIZING = 2  # number of tokenizer threads; a small number leaves CPU time for the engine


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings for the HTTP server; the engines have separate settings."""

    model_name: str  # the model's name in the API
    tokenizer: Any
    end_ids: frozenset[int]  # ids of the model's end-of-sequence tokens
    keys: ApiKeys = field(default_factory=ApiKeys)
    limits: ServerLimits = field(default_factory=ServerLimits)
    access_log: AccessLog = field(default_factory=AccessLog)
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the server from a browser
    versions: Mapping[str, str] = field(default_factory=dict)  # versions that `/version` reports, by package name
    syntax: ReplySyntax = field(default_factory=ReplySyntax)  # formats of the model's reasoning and tool calls
    load_record: LoadRecord = field(default_factory=LoadRecord)
    describes_tokenizer: bool = False  # True enables the route `/tokenizer_info`
    traces: Traces = field(default_factory=Traces)
    other_names: tuple[str, ...] = ()  # other model names that requests may use


class Server:
    """HTTP server for one model; connects the ASGI application `app` to a backend and records metrics."""

    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        limits = settings.limits
        self.backend = backend
        self.settings = settings
        self.gate = QueueGate(limits, time.monotonic)
        self.bodies = Bodies(limits, settings.keys.num_owners)
        self.metrics = ServerMetrics(backend, self.gate, settings.model_name)
        self.history = History(backend, self.gate, self.metrics)
        self.transcripts = Transcripts(limits.transcript_bytes)
        self._reader = PromptReader(settings.tokenizer, self.transcripts, backend.max_sequence_length)
        self.rules = JobRules(
            backend,
            self.gate,
            settings.tokenizer,
            settings.end_ids,
            FairThreads(_NUM_TOKENIZING),
            self._remember,
            self._note_end,
            self.metrics,
        )
        app = CrossOrigin(self._build(), settings.cors_origins)
        self.app = Entrance(app, settings.access_log, self._note_exchange)

    def drain(self) -> None:
        """Refuse new requests, including those with an incomplete body; let accepted requests continue."""
        self.rules.is_draining = True
        self.bodies.stop()

    def end(self, reason: str) -> None:
        """End every unfinished request with an error that states `reason`; start no more requests."""
        self.app.cut_off()
        self.rules.is_over = True
        self.backend.fail_all(reason)

    def _note_exchange(self, exchange: Exchange) -> None:
        self.metrics.note_exchange(exchange)
        self.settings.traces.note(exchange)

    def _note_end(self, job: Job) -> None:
        self.metrics.note(job)
        self.settings.load_record.note(job)

    async def _remember(self, job: Job, choice: Choice) -> None:
        """Store the token ids of a prompt and its reply, so that the conversation's next turn reuses them."""
        prompt, reply = job.prompts[choice.prompt_index], choice.reply
        text, token_ids = reply.exact()
        self._reader.remember(job.tenant, prompt, text, token_ids)
        if reply.is_whole and (reply.is_parsed or reply.text != reply.text.strip()):  # templates may change it
            await self.rules.threads.run(job.tenant.owner, partial(self._remember_rewritten, job.tenant, prompt, reply))

    def _remember_rewritten(self, tenant: Tenant, prompt: Prompt, reply: Reply) -> None:
        rewritten = self._reader.rewritten(prompt, reply.parsed())
        same = None if rewritten is None else reply.same_in(rewritten)
        if same is not None:
            self._reader.remember(tenant, prompt, same, reply.exact()[1])

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        await self.backend.start()
        self.settings.load_record.start()
        self.settings.traces.start()
        preparing = asyncio.create_task(asyncio.to_thread(self.backend.grammars.prepare))
        sampling = asyncio.create_task(self.history.keep())
        try:
            yield
        finally:
            sampling.cancel()
            await preparing
            await self.backend.stop()
            self.rules.threads.close()
            await asyncio.to_thread(self.settings.load_record.close)
            await asyncio.to_thread(self.settings.traces.close)

    def _build(self) -> FastAPI:
        settings = self.settings
        app = FastAPI(
            title="megatron-mamba-cache",
            description="OpenAI-compatible inference of hybrid recurrent and attention models with prefix caching.",
            lifespan=self._lifespan,
            docs_url=None,
            redoc_url=None,
        )
        model = ServedModel(settings.model_name, self._reader, int(time.time()), settings.syntax, settings.other_names)
        orders = OrderMaker(model, settings.limits, settings.tokenizer)
        app.include_router(openai_routes(model, self.rules, orders))
        app.include_router(messages_routes(model, self.rules, orders))
        stored = StoredResponses(settings.limits.response_bytes)
        app.include_router(responses_routes(model, self.rules, orders, stored))
        longest = self.backend.max_sequence_length
        tokenizing = TokenizingRoutes(
            model, settings.tokenizer, self.rules.threads, longest, describes_tokenizer=settings.describes_tokenizer
        )
        app.include_router(tokenizing.router())
        app.include_router(dashboard_routes(self.history, settings.model_name))
        add_documentation(app, needs_key=settings.keys.are_needed)
        _add_own_routes(app, self)
        _add_error_handlers(app)
        app.add_middleware(
            AccessControl,
            keys=settings.keys,
            bodies=self.bodies,
            state=lambda: self.backend.state,
            is_draining=lambda: self.rules.is_draining,
        )
        app.openapi()  # builds and caches the schema; doing this on the first request would block all clients
        return app


def _add_own_routes(app: FastAPI, server: Server) -> None:
    @app.get("/ping")
    @app.post("/ping")
    @app.get("/health")
    async def health() -> JSONResponse:
        state = server.backend.state
        if state.failure is not None:
            return JSONResponse({"status": "failed", "reason": state.failure}, 503)
        if server.rules.is_draining or not state.is_ready:
            status = "draining" if state.is_ready else "starting"
            return JSONResponse({"status": status}, 503, {"Retry-After": "1"})
        return JSONResponse({"status": "paused" if state.is_paused else "ready"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return dict(server.settings.versions)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.post("/admin/flush", response_model=None)
    async def flush(body: FlushRequest | None = None) -> dict[str, Any]:
        try:
            await server.backend.flush(None if body is None else body.weights_version)
        except NotImplementedError as error:
            raise ApiError(501, str(error), "not_implemented") from error
        return {"weights_version": server.backend.state.weights_version}

    @app.post("/admin/pause", response_model=None)
    async def pause() -> dict[str, Any]:
        await server.backend.pause()
        return {"paused": True}

    @app.post("/admin/resume", response_model=None)
    async def resume() -> dict[str, Any]:
        await server.backend.resume()
        return {"paused": False}

    @app.post("/admin/abort", response_model=None)
    async def abort(body: AbortRequest | None = None) -> dict[str, Any]:
        tickets = server.rules.tickets_of(None if body is None else body.request_ids)
        await server.backend.abort(tickets)
        return {"aborted": len(tickets)}

    @app.get("/admin/weights")
    async def weights() -> dict[str, Any]:
        return {"weights_version": server.backend.state.weights_version}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        exchange_of(request.scope).note_error(error)
        return error_response(error, request.scope)

    @app.exception_handler(ValidationError)  # raised when a request translated to a chat completion is invalid
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError | ValidationError) -> Response:
        return await api_error(request, schema_error(error.errors(), request.headers.get("content-type")))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        shown = (
            _UNREADABLE if error.detail == _UNREADABLE_TO_FASTAPI else ApiError(error.status_code, str(error.detail))
        )
        response = error_response(shown, request.scope)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def defect(request: Request, _error: Exception) -> Response:
        return error_response(unexpected(), request.scope)
