"""A `Backend` that runs an engine in a separate thread of this process."""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from ..errors import CacheIntegrityError
from ..mcore.engine import MambaCacheEngine
from ..mcore.request_spec import PROMPT_SCORES
from ..mcore.request_states import tokens_after
from ..mcore.suspendable_engine import LANDING_INTERVAL_S
from ..metrics import CacheSnapshot
from ..policy.request_settings import RequestSpec
from ..replicas.engine import MOST_FAILED_STEPS
from .backend import BackendState, Listener, Progress, Ticket, by_id, ended
from .errors import engine_failed

logger = logging.getLogger(__name__)

_STATE_INTERVAL_S = 0.1
_Answer = TypeVar("_Answer")
_Mail = list[tuple[Callable[[Progress], None], Progress]]


class EngineThread:
    """`Backend` that runs one engine's steps in a thread; `end_ids` are the model's end-of-sequence tokens."""

    def __init__(self, engine: MambaCacheEngine, end_ids: frozenset[int]) -> None:
        self._engine = engine
        self._rules = engine.context.request_rules
        self.max_sequence_length = self._rules.max_sequence_length
        self.grammars = engine.context.grammars
        self._end_ids = end_ids
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets = itertools.count()
        self._listeners: dict[Ticket, Listener] = {}
        self._state = BackendState()
        self._state_at = 0.0
        self._generated = 0
        self._failed_in_a_row = 0
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # The following methods run in the event loop.

    async def start(self) -> None:
        """Start the engine's thread; `deliver` callbacks will run in the current event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def state(self) -> BackendState:
        return self._state

    def error_of(self, spec: RequestSpec) -> str | None:
        return self._rules.error_of(spec)

    def submit(self, spec: RequestSpec, deliver: Callable[[Progress], None]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        stamped = replace(spec, request_id=ticket, arrived_s=int(time.time()))
        self._commands.put(lambda: self._add(ticket, stamped, deliver))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        self._commands.put(lambda: self._drop(ticket))

    def fail_all(self, reason: str) -> None:
        self._commands.put(lambda: self._fail_all(reason))

    async def flush(self, weights_version: str | None) -> None:
        await self.between_steps(lambda engine: self._then_look(partial(engine.flush, weights_version)))

    async def pause(self) -> None:
        await self.between_steps(lambda engine: self._then_look(engine.pause))

    async def resume(self) -> None:
        await self.between_steps(lambda engine: self._then_look(engine.resume_generation))

    async def abort(self, tickets: Collection[Ticket]) -> None:
        await self.between_steps(lambda _engine: self._abort(tickets))

    async def between_steps(self, act: Callable[[MambaCacheEngine], _Answer]) -> _Answer:
        """Call `act(engine)` between two steps and return its result; raise `ApiError` 503 if the engine has failed."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Answer] = loop.create_future()

        def run() -> None:
            try:
                if self._state.failure is not None:
                    raise engine_failed(self._state.failure)
                found = act(self._engine)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, answer, None, error)
            else:
                loop.call_soon_threadsafe(_settle, answer, found, None)

        self._commands.put(run)
        return await answer

    async def stop(self) -> None:
        self._commands.put(self._end)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # The following methods run in the engine's thread.

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._engine.warmup()
            self._look(at_once=True)
            while not self._is_stopping:
                self._obey()
                if self._engine.has_unfinished_requests():
                    self._step()
                self._look()
        except BaseException as error:
            logger.exception("the engine has failed")
            self._break(f"the engine has failed: {error!r}")

    def _obey(self) -> None:
        """Run all queued commands; if the engine has no requests, wait for the first command."""
        if not self._engine.has_unfinished_requests():
            self._look(at_once=True)
            self._next_command()()
        while not self._commands.empty():
            self._commands.get()()

    def _next_command(self) -> Callable[[], None]:
        """Wait for the next command and return it; meanwhile, finish pending copies to host memory and disk."""
        while self._engine.has_idle_copies:
            with contextlib.suppress(queue.Empty):
                return self._commands.get(timeout=LANDING_INTERVAL_S)
            self._engine.land_idle_copies()
            self._look(at_once=True)
        return self._commands.get()

    def _step(self) -> None:
        try:
            report = self._engine.step_modern()
        except CacheIntegrityError:
            raise  # do not retry, because the cache is inconsistent
        except Exception:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= MOST_FAILED_STEPS:
                raise
            logger.exception("a step failed; its requests are retried")
            return
        mail: _Mail = []
        generated = self._generated
        for request_id in report["active_request_ids"]:
            listener = self._listeners.get(request_id)
            if listener is not None:
                parts = self._engine.requests[request_id].record.requests
                progress = self._progress(request_id, listener, parts)
                if progress.tokens:
                    mail.append((listener.deliver, progress))
        for record in report["finished_request_records"]:
            mail += self._last_mail(record)
        if self._generated > generated:  # a step without new tokens does not prove that steps work again
            self._failed_in_a_row = 0
        self._post(mail)

    def _last_mail(self, record: Any) -> _Mail:
        """Return the last progress of a request that has ended; nothing if it has no listener."""
        listener = self._listeners.pop(record.request_id, None)
        if listener is None:
            return []
        progress = self._progress(record.request_id, listener, record.requests)
        return [(listener.deliver, ended(replace(progress, routes=record.routes), listener.end_ids, record))]

    def _progress(self, request_id: Ticket, listener: Listener, parts: list[Any]) -> Progress:
        known = listener.num_tokens
        tokens = tokens_after(known, parts)
        listener.num_tokens += len(tokens)
        self._generated += len(tokens)
        wants_log_probs = parts[0].sampling_params.return_log_probs
        wants_top = wants_log_probs and parts[0].sampling_params.top_n_logprobs
        return Progress(
            tokens=tuple(tokens),
            log_probs=tuple(tokens_after(known, parts, "generated_log_probs")) if wants_log_probs else (),
            alternatives=by_id(tokens_after(known, parts, "generated_top_n_logprobs")) if wants_top else (),
            prompt_log_probs=() if known else tuple(parts[0].prompt_log_probs or ()),
            prompt_alternatives=() if known else by_id(parts[0].prompt_top_n_logprobs or ()),
            prompt_scores=() if known else tuple(getattr(parts[0].sampling_params, PROMPT_SCORES, ())),
            **self._engine.counts_of(request_id).as_mapping(),
        )

    def _add(self, ticket: Ticket, spec: RequestSpec, deliver: Callable[[Progress], None]) -> None:
        try:
            if self._state.failure is not None:
                raise RuntimeError(self._state.failure)
            self._engine.submit(spec)
        except Exception as error:
            self._post([(deliver, Progress(end="error", error=str(error)))])
        else:
            self._listeners[ticket] = Listener.of(spec, deliver, self._end_ids)

    def _drop(self, ticket: Ticket) -> None:
        if self._listeners.pop(ticket, None) is not None:
            self._engine.cancel_request(ticket)

    def _abort(self, tickets: Collection[Ticket]) -> None:
        for ticket in tickets:
            record = self._engine.take_aborted(ticket)
            if record is not None:
                self._post(self._last_mail(record))
        self._look(at_once=True)

    def _fail_all(self, reason: str) -> None:
        listeners, self._listeners = self._listeners, {}
        for ticket in listeners:
            self._engine.cancel_request(ticket)
        self._post([(listener.deliver, Progress(end="error", error=reason)) for listener in listeners.values()])

    def _end(self) -> None:
        self._fail_all("the server is shutting down")
        self._is_stopping = True

    def _break(self, reason: str) -> None:
        """Mark the engine as failed; end all current and later requests with an error until `stop`."""
        self._state = replace(self._state, failure=reason)
        listeners, self._listeners = self._listeners, {}
        self._post([(listener.deliver, Progress(end="error", error=reason)) for listener in listeners.values()])
        while not self._is_stopping:
            self._commands.get()()

    def _then_look(self, act: Callable[[], None]) -> None:
        act()
        self._look(at_once=True)

    def _look(self, *, at_once: bool = False) -> None:
        """Update `state` if it is older than `_STATE_INTERVAL_S` or `at_once` is True."""
        now = time.monotonic()
        if not at_once and now - self._state_at < _STATE_INTERVAL_S:
            return
        engine, self._state_at = self._engine, now
        running = len(engine.context.running_requests)
        self._state = replace(
            self._state,
            is_ready=True,
            cache=CacheSnapshot.summed([engine.context.snapshot()]),  # `summed` copies the counters
            num_running=running,
            num_waiting=len(engine.requests) - running,
            generated_tokens=self._generated,
            weights_version=engine.context.weights_version,
            is_paused=engine.is_paused,
        )

    def _post(self, mail: _Mail) -> None:
        if mail and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_hand_out, mail)


def _hand_out(mail: _Mail) -> None:
    for deliver, progress in mail:
        deliver(progress)


def _settle(answer: "asyncio.Future[Any]", found: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(found)
