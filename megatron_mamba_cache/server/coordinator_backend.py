"""A `Backend` for engines in other processes; a coordinator process routes the requests.

Megatron's `InferenceClient` returns only complete replies; this client also receives the progress after every step.
The messages are defined in `replicas.front_end`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord

from ..grammars.compiler import Grammars
from ..mcore.request_spec import SpecParams
from ..mcore.request_states import ROUTED_EXPERTS
from ..metrics import CacheSnapshot
from ..policy.request_rules import RequestRules
from ..policy.request_settings import RequestSpec, ScoredToken
from ..replicas.access import Access, LoopbackAccess
from ..replicas.channels import set_heartbeats
from ..replicas.front_end import ABORT, CANCEL, FLUSH, PROGRESS, STATES, STREAMS, WATCH
from ..replicas.progress_reports import progress_since
from ..replicas.replica_link import COORDINATOR_SILENCE_S
from .backend import BackendState, Listener, Progress, Ticket, by_id, ended
from .errors import engine_failed

logger = logging.getLogger(__name__)

_STOP_S = 20.0
_COUNTS = (
    *("cached_tokens_from_host", "cached_tokens_from_disk", "written_tokens"),
    *("draft_tokens", "accepted_tokens", "running_s"),
)
"""Counters, in addition to `cached_tokens`, that replicas report in a finished request's sampling parameters."""


class CoordinatorBackend:
    """`Backend` that sends requests to a coordinator, which distributes them among engine replicas.

    If a replica dies, its requests restart on another replica. Each listener still receives each token only once.

    Args:
        address: Address of the coordinator, such as "tcp://host:5555".
        rules: Limits that requests must satisfy, identical in all replicas.
        end_ids: Ids of the tokens that end a reply.
        access: Access rules and encryption for the connection; None allows only unencrypted loopback connections.
        tokenizer: The model's tokenizer; without it, grammars cannot constrain replies.
    """

    def __init__(
        self,
        address: str,
        rules: RequestRules,
        end_ids: frozenset[int],
        access: Access | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._access = access or LoopbackAccess()
        self.max_sequence_length = rules.max_sequence_length
        self.grammars = Grammars(rules.vocab_size)
        self.grammars.read(tokenizer)
        self._address = address
        self._rules = rules
        self._end_ids = end_ids
        self._tickets = itertools.count()
        self._listeners: dict[int, Listener] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._state = BackendState()
        self._flushed_to: str | None = None  # version of the latest flush until all replicas report it, then None
        self._wants_pause: bool | None = None  # the latest pause or resume, likewise
        self._has_paused = asyncio.Event()
        self._aborting: dict[int, asyncio.Future[None]] = {}  # tickets whose last progress `abort` awaits
        self._generated = 0
        self._stopped = asyncio.Event()
        self._last_heard = time.monotonic()

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        set_heartbeats(self._socket)
        for option, value in ((zmq.LINGER, 1000), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._access.channel.secure_connection(self._socket)
        self._socket.connect(self._address)
        self._send(Headers.CONNECT.value)
        self._send(WATCH)
        self._task = asyncio.get_running_loop().create_task(self._listen())

    @property
    def state(self) -> BackendState:
        return self._state

    def error_of(self, spec: RequestSpec) -> str | None:
        return self._rules.error_of(spec)

    def submit(self, spec: RequestSpec, deliver: Callable[[Progress], None]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        self._listeners[ticket] = Listener.of(spec, deliver, self._end_ids)
        params = SpecParams(spec).serialize() | {STREAMS: True}
        self._send(Headers.SUBMIT_REQUEST.value, ticket, spec.prompt.tolist(), params)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        if self._leave(ticket) is not None:
            self._send(CANCEL, ticket)

    def fail_all(self, reason: str) -> None:
        for ticket, listener in list(self._listeners.items()):
            self.cancel(Ticket(ticket))
            listener.deliver(Progress(end="error", error=reason))

    async def flush(self, weights_version: str | None) -> None:
        """Tell all replicas to flush their caches before they run later requests; return without waiting for them."""
        self._send(FLUSH, weights_version)
        if weights_version is not None:
            self._flushed_to = weights_version
            self._state = replace(self._state, weights_version=weights_version)

    async def pause(self) -> None:
        """Tell all replicas to pause, and wait until they have; raise `ApiError` 503 if the engines have failed."""
        self._has_paused.clear()
        self._send(Headers.PAUSE.value)
        await self._has_paused.wait()
        self._check()
        self._note_pause(is_paused=True)

    async def resume(self) -> None:
        """Tell all replicas to continue; return without waiting for them."""
        self._send(Headers.UNPAUSE.value)
        self._note_pause(is_paused=False)

    async def abort(self, tickets: Collection[Ticket]) -> None:
        running = [ticket for ticket in tickets if ticket in self._listeners]
        if running:
            loop = asyncio.get_running_loop()
            ends = [self._aborting.setdefault(ticket, loop.create_future()) for ticket in running]
            self._send(ABORT, running)
            await asyncio.wait(ends)
            self._check()

    async def stop(self) -> None:
        """Stop the engines of all replicas and the coordinator."""
        self.fail_all("the server is shutting down")
        self._send(Headers.STOP.value)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), _STOP_S)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._socket.close()
        self._context.term()

    def _send(self, *message: Any) -> None:
        zmq.Socket.send(self._socket, msgpack.packb(list(message)), zmq.NOBLOCK)

    async def _listen(self) -> None:
        while True:
            if await self._socket.poll(1000):
                self._last_heard = time.monotonic()
                message = msgpack.unpackb(await self._socket.recv(), raw=False)
                try:
                    self._handle(message[0], message[1:])
                except Exception:
                    logger.exception("cannot handle a message from the coordinator")
            elif time.monotonic() - self._last_heard > COORDINATOR_SILENCE_S and self._state.failure is None:
                reason = f"nothing was received from the coordinator at {self._address} for {COORDINATOR_SILENCE_S:g} s"
                self._state = replace(self._state, failure=reason)
                self.fail_all(reason)
                self._has_paused.set()

    def _handle(self, kind: Any, body: list[Any]) -> None:
        if kind == PROGRESS:
            ticket, news = body
            self._deliver(ticket, news)
        elif kind == Headers.ENGINE_REPLY.value:
            ticket, record = body
            self._finish(ticket, DynamicInferenceRequestRecord.deserialize(record))
        elif kind == STATES:
            (self._states,) = body
            self._look()
        elif kind == Headers.PAUSE_ACK.value:
            self._has_paused.set()
        elif kind == Headers.STOP_ACK.value:
            self._stopped.set()

    def _deliver(self, ticket: int, news: dict[str, Any]) -> None:
        listener = self._listeners.get(ticket)
        if listener is not None:
            progress = self._progress(listener, news)
            if progress.tokens:
                listener.deliver(progress)

    def _finish(self, ticket: int, record: DynamicInferenceRequestRecord) -> None:
        listener = self._leave(ticket)
        if listener is None:
            return
        params = record[0].sampling_params
        news = progress_since(0, record.requests, getattr(params, "cached_tokens", 0))
        counts = {name: getattr(params, name, 0) for name in _COUNTS}
        progress = replace(self._progress(listener, news | counts), routes=getattr(params, ROUTED_EXPERTS, None))
        listener.deliver(ended(progress, listener.end_ids, record))

    def _leave(self, ticket: int) -> Listener | None:
        """Remove and return the listener of a request that ends; None if it has ended before."""
        end = self._aborting.pop(ticket, None)
        if end is not None and not end.done():
            end.set_result(None)
        return self._listeners.pop(ticket, None)

    def _check(self) -> None:
        if self._state.failure is not None:
            raise engine_failed(self._state.failure)

    def _note_pause(self, *, is_paused: bool) -> None:
        self._wants_pause = is_paused
        self._state = replace(self._state, is_paused=is_paused)

    def _progress(self, listener: Listener, news: dict[str, Any]) -> Progress:
        """Return the part of `news` that the listener has not received; a restarted request sends its tokens again."""
        known = max(listener.num_tokens - news["start"], 0)
        is_first = not listener.num_tokens
        tokens = tuple(news["tokens"][known:])
        listener.num_tokens += len(tokens)
        self._generated += len(tokens)
        return Progress(
            tokens=tokens,
            log_probs=tuple(news["log_probs"][known:]),
            alternatives=by_id(news["alternatives"][known:]),
            prompt_log_probs=tuple(news["prompt_log_probs"]) if is_first else (),
            prompt_alternatives=by_id(news["prompt_alternatives"]) if is_first else (),
            prompt_scores=tuple(ScoredToken(*score) for score in news["prompt_scores"]) if is_first else (),
            cached_tokens=news["cached_tokens"],
            **{name: news[name] for name in _COUNTS},
        )

    def _look(self) -> None:
        """Update `state` from the replicas' latest states; if there are no replicas, the backend is not ready."""
        states = list(self._states.values())
        if not states:
            self._state = replace(self._state, is_ready=False)
            return
        versions = {state["weights_version"] for state in states}
        if versions == {self._flushed_to}:
            self._flushed_to = None
        are_paused = all(state["is_paused"] for state in states)
        if are_paused is self._wants_pause:
            self._wants_pause = None
        self._state = replace(
            self._state,
            is_ready=True,
            cache=CacheSnapshot.summed([CacheSnapshot.of_dict(state["cache"]) for state in states]),
            num_running=sum(state["num_running"] for state in states),
            num_waiting=sum(state["num_waiting"] for state in states),
            generated_tokens=self._generated,
            weights_version=self._flushed_to or states[0]["weights_version"],
            is_paused=are_paused if self._wants_pause is None else self._wants_pause,
        )
