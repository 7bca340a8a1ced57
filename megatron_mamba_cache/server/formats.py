"""Response encoders: the interface, and the formats of OpenAI's completions and chat completions."""

import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..mcore.request_states import encoded_routes
from .errors import ApiError
from .job import Choice, Job
from .parsers.parts import CallArguments, CallBegin, Content, ParsedReply, Part, Reasoning
from .reply import Piece, TokenInfo


@dataclass(frozen=True, slots=True)
class Event:
    """Server-sent event; `data` is a JSON object, or text to send unchanged."""

    data: Mapping[str, Any] | str
    name: str | None = None


class Format(Protocol):
    """Interface of an encoder that converts a job's replies to server-sent events or to one JSON body."""

    def opening(self, job: Job) -> list[Event]:
        """Return the events that begin a stream."""

    def events(self, job: Job, choice: Choice, piece: Piece) -> list[Event]:
        """Return the events for the next piece of a choice's reply."""

    def closing(self, job: Job) -> list[Event]:
        """Return the events that end a stream after all choices have ended."""

    def failure(self, error: ApiError) -> Event:
        """Return the event that ends a stream after an error."""

    def body(self, job: Job, pieces: Mapping[int, Sequence[Piece]]) -> dict[str, Any]:
        """Return the complete response body; `pieces` has the pieces of each reply, by choice index."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Request options that change the response to a completion or chat completion."""

    includes_usage: bool = False  # True: a stream ends with a chunk that has the usage
    usage_in_every_event: bool = False  # True: every other chunk has the usage so far
    returns_token_ids: bool = False
    request_id: str | None = None  # suffix of the response id; None: random


class _Envelope:
    """Base class with the response fields common to OpenAI's completions and chat completions."""

    prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, model: str, settings: StreamSettings) -> None:
        name = uuid.uuid4().hex if settings.request_id is None else settings.request_id
        self._common = {"id": f"{self.prefix}-{name}", "created": int(time.time()), "model": model}
        self._settings = settings

    def opening(self, _job: Job) -> list[Event]:
        return []

    def events(self, job: Job, choice: Choice, piece: Piece) -> list[Event]:
        chunk = self.chunk(choice, piece)
        return [Event(chunk | {"usage": job.usage().body()} if self._settings.usage_in_every_event else chunk)]

    def closing(self, job: Job) -> list[Event]:
        usage = {**self._common, "object": self.chunk_object, "choices": [], "usage": job.usage().body()}
        return [*([Event(usage)] if self._settings.includes_usage else []), Event("[DONE]")]

    def failure(self, error: ApiError) -> Event:
        return Event(error.body())

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the stream chunk for a piece of a reply."""
        raise NotImplementedError

    def _chunk(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        if self._settings.returns_token_ids:
            choice["token_ids"] = [] if piece.is_prompt else [token.token_id for token in piece.tokens]
        chunk = {**self._common, "object": self.chunk_object, "choices": [choice]}
        return chunk | ({"usage": None} if self._settings.includes_usage else {})

    def _body(self, job: Job, choices: list[dict[str, Any]]) -> dict[str, Any]:
        if self._settings.returns_token_ids:
            for described, choice in zip(choices, job.choices, strict=True):
                described["token_ids"] = choice.reply.token_ids
                described["prompt_token_ids"] = list(job.prompts[choice.prompt_index].token_ids)
        if job.returns_routes:
            for described, choice in zip(choices, job.choices, strict=True):
                described["routed_experts"] = encoded_routes(choice.reply.latest.routes)
        return {**self._common, "object": self.whole_object, "choices": choices, "usage": job.usage().body()}


class CompletionFormat(_Envelope):
    """`Format` for `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        described = self._choice(choice, piece.text, piece.tokens, piece.finish_reason)
        return self._chunk(described, piece)

    def body(self, job: Job, pieces: Mapping[int, Sequence[Piece]]) -> dict[str, Any]:
        choices = [
            self._choice(choice, _text(pieces[choice.index]), _tokens(pieces[choice.index]), choice.reply.finish_reason)
            for choice in job.choices
        ]
        if job.scores_prompts:
            found = job.prompt_log_probs()
            for described, choice in zip(choices, job.choices, strict=True):
                described["prompt_logprobs"] = found[choice.prompt_index]
        return self._body(job, choices)

    def _choice(self, choice: Choice, text: str, tokens: Sequence[TokenInfo], finish: str | None) -> dict[str, Any]:
        log_probs = None if choice.num_log_probs is None else self._log_probs(choice, tokens)
        return {"index": choice.index, "text": text, "logprobs": log_probs, "finish_reason": finish}

    def _log_probs(self, choice: Choice, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [_best(token) for token in tokens] if choice.num_log_probs else None,
            "text_offset": [token.offset for token in tokens],
        }


class _ChatDeltas:
    """Encodes one chat reply as stream deltas, which the client merges into the message."""

    def __init__(self, *, includes_reasoning: bool) -> None:
        self._includes_reasoning = includes_reasoning
        self._has_begun = False
        self._num_calls = 0

    def delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the delta for the parts of one piece; only a reply's first delta has the role."""
        delta: dict[str, Any] = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text) if self._includes_reasoning:
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallBegin(name):
                    function = {"name": name, "arguments": ""}
                    calls[self._num_calls] = {"id": _call_id(), "type": "function", "function": function}
                    self._num_calls += 1
                case CallArguments(text):
                    call = calls.setdefault(self._num_calls - 1, {"function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls.items()]
        if not delta.keys() & {"content", "reasoning_content", "tool_calls"}:
            delta["content"] = ""
        return delta


class ChatFormat(_Envelope):
    """`Format` for `/v1/chat/completions`; omits parsed reasoning unless `includes_reasoning`."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, settings: StreamSettings, *, includes_reasoning: bool) -> None:
        super().__init__(model, settings)
        self._deltas: dict[int, _ChatDeltas] = defaultdict(lambda: _ChatDeltas(includes_reasoning=includes_reasoning))
        self._includes_reasoning = includes_reasoning

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        described = {
            "index": choice.index,
            "delta": self._deltas[choice.index].delta(piece.parts),
            "logprobs": _chat_log_probs(choice, piece.tokens),
            "finish_reason": piece.finish_reason,
        }
        return self._chunk(described, piece)

    def body(self, job: Job, pieces: Mapping[int, Sequence[Piece]]) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": _chat_message(choice.reply.parsed(), includes_reasoning=self._includes_reasoning),
                "logprobs": _chat_log_probs(choice, _tokens(pieces[choice.index])),
                "finish_reason": choice.reply.finish_reason,
            }
            for choice in job.choices
        ]
        body = self._body(job, choices)
        return body | {"prompt_logprobs": job.prompt_log_probs()[0]} if job.scores_prompts else body


def _chat_message(reply: ParsedReply, *, includes_reasoning: bool) -> dict[str, Any]:
    """Convert a complete reply to a chat message; omit its reasoning unless `includes_reasoning`."""
    content = None if reply.calls and not reply.content else reply.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning and includes_reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def _best(token: TokenInfo) -> dict[str, float] | None:
    """Return the log-probs of a token and its top-n alternatives, keyed by text; None for a prompt's first token.

    If several tokens have the same text, as parts of a character do, only the first has its text as the key. The others
    have keys such as `token_id:5`. The order is the token itself, then its alternatives.
    """
    if token.log_prob is None:
        return None
    best = {token.text: token.log_prob}
    for other in token.alternatives:
        if other.token_id != token.token_id and other.log_prob is not None:
            best[f"token_id:{other.token_id}" if other.text in best else other.text] = other.log_prob
    return best


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Sequence[Piece]) -> list[TokenInfo]:
    return [token for piece in pieces for token in piece.tokens]


def _chat_log_probs(choice: Choice, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
    if choice.num_log_probs is None:
        return None
    content = [{**_named(token), "top_logprobs": [_named(other) for other in token.alternatives]} for token in tokens]
    return {"content": content, "refusal": None}


def _named(token: TokenInfo) -> dict[str, Any]:
    content = None if token.content is None else list(token.content)
    return {"token": token.text, "logprob": token.log_prob, "bytes": content}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
