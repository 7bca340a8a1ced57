"""Run prompt lines on an engine, each session in sequence, and measure when tokens are generated."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams

from ..mcore.engine import MambaCacheEngine
from ..mcore.request_states import encoded_routes, tokens_after
from ..mcore.step_report import failure_reason
from ..models.tokenizers.token_reader import image_error
from ..policy.request_rules import unfit_token
from ..server.text_stream import text_after
from .prompts import PromptLine
from .results import RequestRecord, RunResult


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Sampling settings from flags, and the number of tokens to generate for lines that do not give it."""

    num_tokens: int
    temperature: float
    top_k: int
    top_p: float

    @property
    def is_greedy(self) -> bool:
        """True when sampling always selects the most probable token."""
        return self.top_k == 1 or self.temperature == 0

    def parameters(self, line: PromptLine) -> SamplingParams:
        """Return Megatron's sampling parameters for a prompt line."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            num_tokens_to_generate=self.num_tokens if line.num_tokens is None else line.num_tokens,
        )


class SessionQueue:
    """Queue of prompt lines that releases a session's next line only when the previous line has finished."""

    def __init__(self, lines: Iterable[PromptLine]) -> None:
        self._first: list[PromptLine] = []
        self._later: dict[str | int, deque[PromptLine]] = {}
        for line in lines:
            if line.session is None:
                self._first.append(line)
            elif line.session in self._later:
                self._later[line.session].append(line)
            else:
                self._later[line.session] = deque()
                self._first.append(line)

    def initial_lines(self) -> list[PromptLine]:
        """Return the first line of each session and all lines without a session, in order."""
        return list(self._first)

    def line_after(self, finished: PromptLine) -> PromptLine | None:
        """Remove and return the next line in the session of `finished`; None if there is none."""
        if finished.session is None or not self._later[finished.session]:
            return None
        return self._later[finished.session].popleft()


class RequestRunner:
    """Runs prompt lines on an engine and records the results.

    Args:
        tokenizer: Encodes prompt text and decodes replies.
        on_tokens: Called after each step with the number of tokens that it generated.
        continues: Called with True if this engine has requests; returns True if the engine must run another step, which
            a peer's requests may require even if this engine has none.
    """

    def __init__(
        self,
        engine: MambaCacheEngine,
        tokenizer: Any,
        sampling: SamplingFlags,
        on_tokens: Callable[[int], object],
        continues: Callable[[bool], bool] = bool,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._on_tokens = on_tokens
        self._continues = continues
        self._running: dict[int, PromptLine] = {}
        self._added_at: dict[int, float] = {}
        self._records: dict[int, RequestRecord] = {}

    def run(self, lines: Iterable[PromptLine]) -> RunResult:
        """Run all lines and return the results; if a line cannot run, its record contains the error."""
        queue = SessionQueue(lines)
        start = time.perf_counter()
        for line in queue.initial_lines():
            self._start_session(line, queue)
        while self._engine.owes_step or self._continues(bool(self._running)):
            result = self._engine.step_modern()
            now = time.perf_counter()
            self._note_tokens(result["active_request_ids"], now)
            for record in result["finished_request_records"]:
                line = self._finish(record.merge(), now)
                self._start_session(queue.line_after(line), queue)
        records = [self._records[request_id] for request_id in sorted(self._records)]
        return RunResult(records, self._engine.context.snapshot(), time.perf_counter() - start)

    def _start_session(self, line: PromptLine | None, queue: SessionQueue) -> None:
        """Submit `line`; if its prompt is invalid, submit the next valid line of its session."""
        while line is not None:
            record = self._open_record(line)
            if record.error is None:
                self._running[line.request_id] = line
                self._added_at[line.request_id] = time.perf_counter()
                self._engine.add_request(line.request_id, record.prompt_tokens, self._sampling.parameters(line))
                return
            line = queue.line_after(line)

    def _open_record(self, line: PromptLine) -> RequestRecord:
        tokens = self._tokenizer.tokenize(line.prompt) if isinstance(line.prompt, str) else list(line.prompt)
        record = self._records[line.request_id] = RequestRecord(line.request_id, tokens)
        record.error = image_error(self._tokenizer, tokens)
        unfit = unfit_token(tokens)
        if unfit is not None:  # a token id too large for a tensor, which the engine cannot check
            record.error = f"token {unfit} in the prompt is outside the vocabulary of {self._tokenizer.vocab_size}"
        return record

    def _note_tokens(self, request_ids: Iterable[int], now: float) -> None:
        """Record the newly generated tokens of running requests."""
        for request_id in request_ids:
            record = self._records[request_id]
            parts = self._engine.requests[request_id].record.requests
            self._take_tokens(record, tokens_after(len(record.generated_tokens), parts), now)

    def _take_tokens(self, record: RequestRecord, tokens: list[int], now: float) -> None:
        if tokens and record.time_to_first_token_s is None:
            record.time_to_first_token_s = now - self._added_at[record.request_id]
        self._on_tokens(len(tokens))
        record.generated_tokens += tokens

    def _finish(self, request: Any, now: float) -> PromptLine:
        record = self._records[request.request_id]
        self._take_tokens(record, tokens_after(len(record.generated_tokens), [request]), now)
        record.text = text_after(self._tokenizer, record.prompt_tokens, record.generated_tokens)
        record.latency_s = now - self._added_at.pop(record.request_id)
        record.cached_tokens = self._engine.cached_tokens(record.request_id)
        tiers = self._engine.tier_tokens(record.request_id)
        record.cached_tokens_from_host, record.cached_tokens_from_disk = tiers.from_host, tiers.from_disk
        drafts = self._engine.draft_counts(record.request_id)
        record.draft_tokens, record.accepted_tokens = drafts.drafted, drafts.accepted
        record.routed_experts = encoded_routes(request.routes)
        record.error = failure_reason(request)
        return self._running.pop(record.request_id)
