"""Jobs: one HTTP request with all its replies, from the queue gate to the end of the last reply."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ..policy.request_settings import RequestSpec, ScoredToken
from .backend import Backend, Progress, Ticket
from .echo import Echo
from .errors import bad_request, too_long, unavailable
from .fair_threads import FairThreads
from .job_progress import JobTimes, Mail, PromptUsage, TokenTimes, Usage, prompt_usage
from .limits import QueueGate, QueuePermits
from .orders import Order
from .parsers.reasoning import PromptReasoning
from .prompt_scores import Entries
from .prompts import Prompt
from .reply import EmptyReply, Piece, Reply, ReplyPrompt


@dataclass(slots=True)
class Choice:
    """One reply in progress, and the engine request that generates it."""

    index: int  # index in the response, counted over all prompts
    prompt_index: int
    spec: RequestSpec
    reply: Reply
    ticket: Ticket | None = None  # None before submission, and after the request ends or is cancelled
    echo: Echo | None = None  # echo of the prompt, if requested; None after it is sent
    num_log_probs: int | None = None  # number of top log-probs per token; see `Order`
    prompt_scores: tuple[ScoredToken, ...] = ()  # log-probs of all prompt tokens but the first, if requested


async def _ignore(_job: "Job", _choice: Choice) -> None: ...


@dataclass(slots=True)
class JobRules:
    """Backend, queue gate, threads and callbacks that all jobs of a server share."""

    backend: Backend
    gate: QueueGate
    tokenizer: Any
    end_ids: frozenset[int]
    threads: FairThreads
    # Awaited for each complete reply, before the client receives the reply's last piece.
    on_reply: Callable[["Job", Choice], Awaitable[None]] = field(default=_ignore)
    on_end: Callable[["Job"], None] = field(default=lambda _job: None)  # called when a job ends or is cancelled
    token_times: TokenTimes = field(default_factory=TokenTimes)  # receives the token latencies of all jobs
    is_draining: bool = False
    is_over: bool = False  # True after a forced stop; requests that were already accepted may not start either
    open_jobs: dict["Job", str] = field(default_factory=dict)  # submitted jobs, with the ids of their HTTP requests

    def tickets_of(self, request_ids: Collection[str] | None) -> list[Ticket]:
        """Return the tickets of all choices in progress that HTTP requests with these ids have; None: of all."""
        jobs = [job for job, name in self.open_jobs.items() if request_ids is None or name in request_ids]
        return [choice.ticket for job in jobs for choice in job.choices if choice.ticket is not None]


@asynccontextmanager
async def job_of(rules: JobRules, order: Order, request_id: str = "") -> AsyncIterator["Job"]:
    """Context manager that tokenizes the prompts and submits the job; on exit, it cancels unfinished choices.

    Args:
        request_id: Id of the HTTP request.

    Raises:
        ApiError: 400 if a prompt or a grammar is invalid or a request can never run, 429 if too many requests
            are running or queued, 503 if the server is draining.
    """
    if rules.is_draining:
        raise unavailable("the server is shutting down", "shutting_down")
    arrived = time.monotonic()
    with rules.gate.enter(len(order.readings) * order.num_choices) as permits:
        prompts = [await rules.threads.run(order.tenant.owner, reading) for reading in order.readings]
        if order.form is not None:
            check = partial(order.form.check, rules.backend.grammars, prompts)
            await rules.threads.run(order.tenant.owner, check)
        with Job(rules, order, prompts, permits, arrived) as job:
            rules.open_jobs[job] = request_id
            try:
                yield job
            finally:
                del rules.open_jobs[job]


class Job:
    """One HTTP request's choices; a context manager that submits them and, on exit, cancels unfinished choices.

    Args:
        prompts: Tokenized prompts of `order`.
        permits: Queue permits, one for each choice; each is released when the engine finishes its choice.
        arrived: Monotonic time when the HTTP request reached the queue gate, in seconds.

    Raises:
        ApiError: On entering the context: 400 if a request can never run, 503 if the server was stopped.
    """

    def __init__(
        self, rules: JobRules, order: Order, prompts: list[Prompt], permits: QueuePermits, arrived: float
    ) -> None:
        self.tenant = order.tenant
        self.prompts = prompts
        self.choices = [
            Choice(
                prompt_index * order.num_choices + number,
                prompt_index,
                spec,
                _reply(rules, order, prompt),
                echo=prompt.echo,
                num_log_probs=order.num_log_probs,
            )
            for prompt_index, prompt in enumerate(prompts)
            for number, spec in enumerate(order.specs(prompt, rules.backend.max_sequence_length))
        ]
        self._rules = rules
        self._permits = permits
        self._scoring = order.scoring
        self.returns_routes = order.returns_routes
        self._mail = Mail()
        self.times = JobTimes(arrived, rules.token_times)

    def __enter__(self) -> "Job":
        self._check()
        for choice in self.choices:
            choice.ticket = self._rules.backend.submit(choice.spec, self._listener(choice))
        return self

    def __exit__(self, *_error: object) -> None:
        for choice in self.choices:
            self._cancel(choice)
        self.times.ended = time.monotonic()
        self._rules.on_end(self)

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """Yield each choice's pieces as they arrive, until all choices have ended; skip empty pieces.

        Raises:
            ApiError: 500 if a choice fails, 503 if the server's shutdown interrupts a choice.
        """
        num_open = len(self.choices)
        while num_open:
            index, progress = await self._mail.take()
            choice = self.choices[index]
            if choice.reply.finish_reason is not None:
                continue  # the reply has ended; the engine sent this progress before the cancellation
            if progress.end == "error" and self._rules.is_over:
                raise unavailable(f"the request failed: {progress.error}", "shutting_down")
            piece = choice.reply.take(progress)
            choice.prompt_scores = choice.prompt_scores or progress.prompt_scores
            echo, choice.echo = choice.echo, None
            if piece.finish_reason is not None:
                self._cancel(choice)
                num_open -= 1
                await self._rules.on_reply(self, choice)
            if echo is not None:
                yield choice, echo.piece(progress)
            if piece.text or piece.tokens or piece.finish_reason:
                yield choice, piece

    def usage(self) -> Usage:
        """Return the job's token counts so far."""
        firsts = {choice.prompt_index: choice for choice in reversed(self.choices)}
        prompts = [prompt_usage(choice.spec, choice.reply.latest) for choice in firsts.values()]
        latest = [choice.reply.latest for choice in self.choices]
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(len(choice.reply.token_ids) for choice in self.choices),
            draft_tokens=sum(progress.draft_tokens for progress in latest),
            accepted_tokens=sum(progress.accepted_tokens for progress in latest),
            reasoning_tokens=sum(choice.reply.num_reasoning_tokens for choice in self.choices),
            **{entry.name: sum(getattr(prompt, entry.name) for prompt in prompts) for entry in fields(PromptUsage)},
        )

    @property
    def scores_prompts(self) -> bool:
        """True if the client requested log-probs of the prompt tokens."""
        return self._scoring is not None

    def prompt_log_probs(self) -> list[Entries]:
        """Return one list of token log-probs per prompt. This takes about as long as tokenizing the prompts."""
        assert self._scoring is not None
        firsts = (choice for choice in self.choices if choice.spec.log_probs.prompt_top_n is not None)
        return [
            self._scoring.entries(self.prompts[choice.prompt_index].token_ids, choice.prompt_scores)
            for choice in firsts
        ]

    def _check(self) -> None:
        if self._rules.is_over:
            raise unavailable("the server was stopped", "shutting_down")
        if self._scoring is not None:
            self._scoring.check([len(prompt.token_ids) for prompt in self.prompts])
        for choice in self.choices:
            reason = self._rules.backend.error_of(choice.spec)
            if reason is not None:
                if "max_sequence_length" in reason:
                    raise too_long(reason, self._rules.backend.max_sequence_length)
                named = (name for name in ("logit_bias", "return_routed_experts") if reason.startswith(name))
                raise bad_request(reason, next(named, "prompt"))

    def _listener(self, choice: Choice) -> Callable[[Progress], None]:
        def hear(progress: Progress) -> None:
            if progress.tokens:
                self.times.note_tokens(choice.index, progress)
            if progress.end is not None:
                self._forget(choice)
            self._mail.put(choice.index, progress)

        return hear

    def _cancel(self, choice: Choice) -> None:
        if choice.ticket is not None:
            self._rules.backend.cancel(choice.ticket)
            self._forget(choice)

    def _forget(self, choice: Choice) -> None:
        """Release a choice's queue permit when its engine request ends or is cancelled; later calls do nothing."""
        if choice.ticket is not None:
            choice.ticket = None
            self._permits.leave()


def _reply(rules: JobRules, order: Order, prompt: Prompt) -> Reply:
    kind = EmptyReply if order.is_empty else Reply
    num_echoed = 0 if prompt.echo is None else len(prompt.echo.text)
    before = ReplyPrompt(prompt.token_ids, prompt.reasoning is PromptReasoning.OPEN, num_echoed)
    special = frozenset(getattr(rules.tokenizer, "special_ids", ()))
    end_ids = rules.end_ids | special.intersection(order.sampling.stop_token_ids)
    return kind(rules.tokenizer, order.stops, end_ids, prompt=before, reading=order.reading)
