"""Routes of Anthropic's messages API, and its response format."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..conversation import arguments_object
from ..errors import ApiError
from ..formats import Event
from ..job import Choice, Job, JobRules
from ..orders import OrderMaker, ServedModel, tenant_of
from ..parsers.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning, merged
from ..reply import Piece
from ..responses import reply_to
from ..strict_json import strict_text
from .schemas import CountTokensRequest, MessagesRequest

_REASONS = {"length": "max_tokens", "abort": "abort", "tool_calls": "tool_use"}


def messages_routes(model: ServedModel, rules: JobRules, orders: OrderMaker) -> APIRouter:
    """Return the routes of the messages API below `/v1/messages`."""
    router = APIRouter(prefix="/v1/messages")

    @router.post("", response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        chat = body.as_chat()
        order = orders.chat(chat, tenant_of(request, chat), "output_config.format")
        form = MessagesFormat(model.name, body.max_tokens, includes_thinking=body.includes_thinking)
        return reply_to(rules, replace(order, fits_room=True), form, streams=bool(body.stream))

    @router.post("/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, Any]:
        chat = body.as_chat()
        model.check_name(chat.model)
        tenant = tenant_of(request, chat)
        prompt = await rules.threads.run(tenant.owner, partial(model.reader.read_chat, tenant, chat.conversation()))
        return {"input_tokens": len(prompt.token_ids)}

    return router


class MessagesFormat:
    """`Format` for `/v1/messages`; the job must have exactly one choice.

    `max_tokens` is the client's limit; fewer tokens may fit in the context. If `includes_thinking` is False, thinking
    blocks are empty.
    """

    def __init__(self, model: str, max_tokens: int, *, includes_thinking: bool) -> None:
        self._common = {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}
        self._max_tokens = max_tokens
        self._includes_thinking = includes_thinking
        self._blocks = _BlockEvents()
        self._has_started = False

    def opening(self, _job: Job) -> list[Event]:
        """Return no events; the first event has the number of cached tokens, which is unknown until the first piece."""
        return []

    def events(self, job: Job, _choice: Choice, piece: Piece) -> list[Event]:
        return [*self._start(job), *(event for part in self._shown(piece.parts) for event in self._blocks.of(part))]

    def closing(self, job: Job) -> list[Event]:
        delta = _event("message_delta", delta=self._end(job), usage=_usage(job))
        return [*self._start(job), *self._blocks.end(), delta, _event("message_stop")]

    def failure(self, error: ApiError) -> Event:
        return Event(error.anthropic_body(), "error")

    def body(self, job: Job, _pieces: Mapping[int, Sequence[Piece]]) -> dict[str, Any]:
        (choice,) = job.choices
        content = _content(self._shown(merged(choice.reply.parts)))
        return {**self._common, "content": content, **self._end(job), "usage": _usage(job)}

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return the parts, with the text of reasoning removed if `includes_thinking` is False."""
        if self._includes_thinking:
            return parts
        return [replace(part, text="") if isinstance(part, Reasoning) else part for part in parts]

    def _end(self, job: Job) -> dict[str, Any]:
        """Return the fields `stop_reason` and `stop_sequence`."""
        reply, fitting = job.choices[0].reply, job.choices[0].spec.max_tokens
        if reply.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
        reason = _REASONS.get(reply.finish_reason or "", "end_turn")
        if reason == "max_tokens" and fitting < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _start(self, job: Job) -> list[Event]:
        if self._has_started:
            return []
        self._has_started = True
        message: dict[str, Any] = {
            **self._common,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(job),
        }
        return [_event("message_start", message=message)]


class _BlockEvents:
    """Encoder that converts one reply's parts to events for content blocks.

    A call's arguments are sent in one event at the end of the call, because only then can they be converted to a JSON
    object. Pings keep the connection alive until then.
    """

    def __init__(self) -> None:
        self._index = -1
        self._kind: type[Part] | None = None  # part type of the open block; None if no block is open
        self._arguments = ""  # arguments of the open call so far

    def of(self, part: Part) -> list[Event]:
        """Return the events for the next part; begin and end blocks as needed."""
        match part:
            case CallBegin(name):
                return self._begin(CallArguments, _tool_use(name, {}))
            case CallEnd():
                return self.end()
            case CallArguments(text):
                self._arguments += text
                return [_event("ping")]
            case Reasoning(text):
                opened = [] if self._kind is Reasoning else self._begin(Reasoning, _thinking(""))
                return [*opened, *([self._delta(type="thinking_delta", thinking=text)] if text else [])]
            case Content(text):
                opened = [] if self._kind is Content else self._begin(Content, {"type": "text", "text": ""})
                return [*opened, self._delta(type="text_delta", text=text)]

    def end(self) -> list[Event]:
        """Return the events that end the open block; return [] if no block is open."""
        if self._kind is None:
            return []
        last = []
        if self._kind is Reasoning:
            last = [self._delta(type="signature_delta", signature="")]
        if self._kind is CallArguments:
            last = [self._delta(type="input_json_delta", partial_json=strict_text(arguments_object(self._arguments)))]
        self._kind, self._arguments = None, ""
        return [*last, _event("content_block_stop", index=self._index)]

    def _begin(self, kind: type[Part], block: dict[str, Any]) -> list[Event]:
        ended = self.end()
        self._index += 1
        self._kind = kind
        return [*ended, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, **delta: str) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)


def _content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Convert a complete reply's merged parts to content blocks."""
    blocks: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Content(text):
                blocks.append({"type": "text", "text": text})
            case Reasoning(text):
                blocks.append(_thinking(text))
            case CallBegin(name):
                blocks.append(_tool_use(name, ""))
            case CallArguments(text):
                blocks[-1]["input"] += text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = arguments_object(block["input"])
    return blocks


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": arguments}


def _usage(job: Job) -> dict[str, Any]:
    """Return Anthropic's usage object; `input_tokens` excludes tokens read from or written to the cache."""
    usage = job.usage()
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.written_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        **usage.by_tier,
        "cache_creation_input_tokens": usage.written_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.written_tokens - usage.hour_tokens,
            "ephemeral_1h_input_tokens": usage.hour_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
