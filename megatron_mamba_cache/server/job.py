"""One HTTP request's replies, from the gate to the last of them."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from .backend import Backend, GenerationRequest, Progress, Ticket
from .errors import bad_request, unavailable
from .limits import QueueGate
from .prompts import Prompt
from .reply import Piece, Reply
from .tenants import Tenant

_UINT63 = 2**63


@dataclass(slots=True)
class Choice:
    """A reply in the making.

    Args:
        index: Among the choices of all prompts.
        prompt_index: Of its prompt.
    """

    index: int
    prompt_index: int
    request: GenerationRequest
    reply: Reply
    ticket: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an HTTP request.

    Args:
        cached_tokens: Prompt tokens that were skipped, of each prompt's first choice.
        draft_tokens, accepted_tokens: Drafts verified for all choices, and those kept.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int

    def body(self) -> dict[str, Any]:
        """Return OpenAI's object; `draft_tokens` is beyond it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
                "draft_tokens": self.draft_tokens,
            },
        }


@dataclass(slots=True)
class JobTimes:
    """When things happened to a job, in seconds of a clock; None: not yet."""

    started: float
    first_token: float | None = None
    ended: float | None = None


@dataclass(slots=True)
class JobRules:
    """What all jobs of a server share.

    Args:
        end_ids: Tokens that end replies.
        on_end: Told of each job that has ended, whole or not.
    """

    backend: Backend
    gate: QueueGate
    detokenize: Callable[[list[int]], str]
    end_ids: frozenset[int]
    on_end: Callable[["Job"], None] = field(default=lambda _job: None)
    is_draining: bool = False


class Job:
    """The choices of one HTTP request; as a context, it leaves nothing behind in the engine.

    Args:
        plain: The request of every choice but for its prompt; the choices of a prompt have seeds of their own.
        num_choices: Replies that are drawn for each prompt.
        stops: Stop strings.

    Raises:
        ApiError: On entering: 400 if a request can never run, 429 if too many are there, 503 if the server drains.
    """

    def __init__(
        self,
        rules: JobRules,
        tenant: Tenant,
        prompts: list[Prompt],
        plain: GenerationRequest,
        num_choices: int,
        stops: tuple[str, ...],
    ) -> None:
        self.tenant = tenant
        self.prompts = prompts
        self.choices = [
            Choice(
                prompt_index * num_choices + number,
                prompt_index,
                replace(plain, prompt=prompt.token_ids, seed=choice_seed(plain.seed, number)),
                Reply(rules.detokenize, stops, rules.end_ids),
            )
            for prompt_index, prompt in enumerate(prompts)
            for number in range(num_choices)
        ]
        self._rules = rules
        self._mail: asyncio.Queue[tuple[Choice, Progress]] = asyncio.Queue()
        self._inside = 0
        self.times = JobTimes(time.monotonic())

    def check(self) -> None:
        """Raise `ApiError` if the job cannot be taken now, or ever."""
        if self._rules.is_draining:
            raise unavailable("the server is shutting down", "shutting_down")
        for choice in self.choices:
            fault = self._rules.backend.fault_of(choice.request)
            if fault is not None:
                code = "context_length_exceeded" if "max_sequence_length" in fault else None
                raise bad_request(fault, "prompt", code)

    async def __aenter__(self) -> "Job":
        self.check()
        self._rules.gate.enter(len(self.choices))
        self._inside = len(self.choices)
        for choice in self.choices:
            choice.ticket = self._rules.backend.submit(choice.request, self._mailer(choice))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for choice in self.choices:
            self._leave(choice)
        self.times.ended = time.monotonic()
        self._rules.on_end(self)

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """Yield what the choices grow by until all have ended; pieces without text or tokens are left out.

        Raises:
            ApiError: 500 if one of them fails.
        """
        while self._inside:
            choice, progress = await self._mail.get()
            if choice.ticket is None:
                continue  # mail that was on its way when a stop string was found
            if progress.tokens and self.times.first_token is None:
                self.times.first_token = time.monotonic()
            piece = choice.reply.take(progress)
            if piece.finish_reason is not None:
                self._leave(choice)
            if piece.text or piece.tokens or piece.finish_reason:
                yield choice, piece

    def usage(self) -> Usage:
        """Return the counts so far."""
        firsts = {choice.prompt_index: choice for choice in reversed(self.choices)}
        latest = [choice.reply.latest for choice in self.choices]
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(len(choice.reply.token_ids) for choice in self.choices),
            cached_tokens=sum(choice.reply.latest.cached_tokens for choice in firsts.values()),
            draft_tokens=sum(progress.draft_tokens for progress in latest),
            accepted_tokens=sum(progress.accepted_tokens for progress in latest),
        )

    def _mailer(self, choice: Choice) -> Callable[[Progress], None]:
        return lambda progress: self._mail.put_nowait((choice, progress))

    def _leave(self, choice: Choice) -> None:
        if choice.ticket is not None:
            self._rules.backend.cancel(choice.ticket)
            choice.ticket = None
            self._inside -= 1
            self._rules.gate.leave()


def choice_seed(seed: int, number: int) -> int:
    """Return the seed of a request's choice: its own of the first one, others that follow from it behind."""
    if number == 0:
        return seed % _UINT63
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "little") % _UINT63
