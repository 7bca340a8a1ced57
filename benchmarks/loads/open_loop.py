"""Serve open-loop conversations in real time: turns arrive on schedule, independent of the load of the engine."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from loads.conversation_load import Conversation
from loads.serving_engine import send
from measuring.gpu_time import GpuTime, GpuTimer, NoGpuTimer

from megatron_mamba_cache.mcore.step_report import failure_reason


class LoadClock:
    """Clock of a load: seconds since its creation, without the time in which it was stopped."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the creation of the clock, without stopped time."""
        return time.perf_counter() - self._start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context manager that stops the clock during its body."""
        began = time.perf_counter()
        yield
        self._start += time.perf_counter() - began

    def sleep_until(self, moment: float) -> None:
        """Wait until a moment; return at once if it has passed."""
        time.sleep(max(0.0, moment - self.now()))


@dataclass(slots=True)
class ServedTurn:
    """A request and its measured times, in seconds on the clock of the load.

    Args:
        conversation, turn: Indices from 0.
        token_moments: Time at which each generated token arrived; tokens of the same step arrive together.
        cached: Number of prompt tokens that needed no prefill.
    """

    conversation: int
    turn: int
    arrival: float
    prompt: list[int]
    admitted: float | None = None
    token_moments: list[float] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def has_ended(self) -> bool:
        """True when the whole reply has arrived."""
        return bool(self.reply)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the arrival to the first token; None before the first token."""
        return self.token_moments[0] - self.arrival if self.token_moments else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None before the end, or if the reply has only one token."""
        if not self.has_ended or len(self.token_moments) < 2:
            return None
        return (self.token_moments[-1] - self.token_moments[0]) / (len(self.token_moments) - 1)


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """Results of a load that an engine has served.

    Args:
        turns: Requests in order of arrival.
        num_unsent: Number of turns that had not arrived at the time limit.
        step_s: Total seconds of the engine's steps.
        peak_slots: Maximum number of state slots in use.
        gpu: GPU and host times of some steps in the middle of the load; None on a CPU, or if the load was too short.
    """

    turns: list[ServedTurn]
    num_unsent: int
    seconds: float
    num_steps: int
    step_s: float
    peak_slots: int
    gpu: GpuTime | None


class OpenLoop:
    """Serves conversations once, on an engine that serves nothing else.

    The first turn of a conversation arrives at the time set by the load, and each later turn arrives `think_s` after
    the preceding reply. A turn never waits for other conversations: if the engine cannot run it yet, it waits in the
    queue.

    Args:
        max_seconds: Time limit, after which waiting and running turns are abandoned.
        on_tokens: Function that is called after each step with the number of tokens that the step generated.
    """

    def __init__(
        self,
        engine: Any,
        conversations: Sequence[Conversation],
        *,
        max_seconds: float = float("inf"),
        on_tokens: Callable[[int], object] = lambda _: None,
        timer: GpuTimer | NoGpuTimer | None = None,
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._max_seconds = max_seconds
        self._on_tokens = on_tokens
        self._timer = timer or NoGpuTimer()
        self._num_turns = sum(len(conversation.turns) for conversation in conversations)
        self._turns: list[ServedTurn] = []  # indexed by request id
        self._running: dict[int, ServedTurn] = {}
        self._unadmitted: dict[int, ServedTurn] = {}
        self._coming: list[tuple[float, int, int]] = []  # heap of (arrival, conversation, turn)
        self._histories = [list(conversation.prefix) for conversation in conversations]
        self._num_steps = self._peak_slots = 0
        self._step_s = 0.0

    def run(self) -> ServedLoad:
        """Serve all turns, or as many as the time limit allows.

        Raises:
            RuntimeError: If a request fails.
        """
        self._coming = [(conversation.arrival_s, index, 0) for index, conversation in enumerate(self._conversations)]
        heapq.heapify(self._coming)
        clock = LoadClock()
        while (self._coming or self._running) and clock.now() < self._max_seconds:
            self._send_arrivals(clock.now())
            if self._running:
                self._step(clock)
            else:
                clock.sleep_until(min(self._coming[0][0], self._max_seconds))
        seconds = clock.now()
        return ServedLoad(
            turns=self._turns,
            num_unsent=self._num_turns - len(self._turns),
            seconds=seconds,
            num_steps=self._num_steps,
            step_s=self._step_s,
            peak_slots=self._peak_slots,
            gpu=self._timer.result(),
        )

    def _send_arrivals(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            arrival, index, number = heapq.heappop(self._coming)
            turn = self._conversations[index].turns[number]
            self._histories[index] += turn.new_tokens
            request_id, served = len(self._turns), ServedTurn(index, number, arrival, list(self._histories[index]))
            self._turns.append(served)
            self._running[request_id] = self._unadmitted[request_id] = served
            send(self._engine, request_id, served.prompt, turn.num_reply)

    def _step(self, clock: LoadClock) -> None:
        num_ended = len(self._turns) - len(self._running)
        if self._timer.wants_to_start(max(num_ended / self._num_turns, clock.now() / self._max_seconds)):
            with clock.stopped():
                self._timer.start()
        began = clock.now()
        result = self._engine.step_modern()  # returns after the tokens were copied to the host
        now = clock.now()
        self._step_s += now - began
        self._num_steps += 1
        if self._timer.add_step(now - began):
            with clock.stopped():
                self._timer.stop()
        self._note_admissions(began)
        self._note_tokens(result["active_request_ids"], now)
        for record in result["finished_request_records"]:
            self._finish(record.merge(), now)
        slots = self._engine.context.memory.slots
        self._peak_slots = max(self._peak_slots, slots.num_slots - slots.count_by_owner()["free"])

    def _note_admissions(self, began: float) -> None:
        waiting = set(self._engine.waiting_request_ids)
        for request_id in [request_id for request_id in self._unadmitted if request_id not in waiting]:
            self._unadmitted.pop(request_id).admitted = began

    def _note_tokens(self, request_ids: Sequence[int], now: float) -> None:
        for request_id in request_ids:
            parts = self._engine.requests[request_id].record.requests
            self._take_tokens(self._running[request_id], sum(len(part.generated_tokens) for part in parts), now)

    def _take_tokens(self, turn: ServedTurn, num_tokens: int, now: float) -> None:
        num_new = num_tokens - len(turn.token_moments)
        turn.token_moments += [now] * num_new
        self._on_tokens(num_new)

    def _finish(self, request: Any, now: float) -> None:
        reason = failure_reason(request)
        if reason is not None:
            raise RuntimeError(f"request {request.request_id} failed: {reason}")
        served = self._running.pop(request.request_id)
        served.reply = list(request.generated_tokens)
        served.cached = self._engine.cached_tokens(request.request_id)
        self._take_tokens(served, len(served.reply), now)
        self._histories[served.conversation] += served.reply
        turns, following = self._conversations[served.conversation].turns, served.turn + 1
        if following < len(turns):
            heapq.heappush(self._coming, (now + turns[following].think_s, served.conversation, following))


def fitting(conversations: Sequence[Conversation], max_length: int) -> list[Conversation]:
    """Return the conversations without the turns whose prompt and reply exceed `max_length` tokens."""
    cut = [_cut(conversation, max_length) for conversation in conversations]
    return [conversation for conversation in cut if conversation.turns]


def _cut(conversation: Conversation, max_length: int) -> Conversation:
    added = [len(turn.new_tokens) + turn.num_reply for turn in conversation.turns]
    lengths = accumulate(added, initial=len(conversation.prefix))
    num_fitting = sum(length <= max_length for length in lengths) - 1
    return Conversation(conversation.arrival_s, conversation.prefix, conversation.turns[: max(0, num_fitting)])
