"""The requests that have a row, and every change of which ones those are."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .admission import Refusal
from .block_growth import GrowthOutcome, grow_rows, resume_rows
from .boundaries import prefill_chunk_end
from .prefix_cache import PrefixCache
from .prompt_limit import PromptLimit
from .requests import Candidate, RunningRequest


class RowCounts(NamedTuple):
    """How many rows there are, how many of them skip the next step, and what the others compute.

    Args:
        paused: Rows that compute nothing: those without a KV block for their next token, and prompts that wait.
        prefilling: Rows that compute prompt tokens.
        tokens: Tokens to compute, without drafts.
    """

    rows: int = 0
    paused: int = 0
    prefilling: int = 0
    tokens: int = 0

    @property
    def decoding(self) -> int:
        """Rows that compute the token after the newest one."""
        return self.rows - self.paused - self.prefilling

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts to compute."""
        return self.tokens - self.decoding


class RunningRequests:
    """Rows over one prefix cache, oldest admission first, paused ones included.

    Args:
        max_requests: Most rows at a time.
        max_tokens: Most tokens of a step.
        beside: Limits the prompt tokens of a step in which rows decode; None: as many as fit.
    """

    def __init__(
        self, cache: PrefixCache, max_requests: int, max_tokens: int, beside: PromptLimit | None = None
    ) -> None:
        self.cache = cache
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._beside = beside
        self._rows: list[RunningRequest] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._rows)

    @property
    def rows(self) -> Sequence[RunningRequest]:
        """All rows, in order."""
        return self._rows

    @property
    def decoding(self) -> list[RunningRequest]:
        """Rows that decode in the next step."""
        return [row for row in self._rows if not row.is_paused and not row.is_prefilling]

    @property
    def prefilling(self) -> list[RunningRequest]:
        """Rows with prompt tokens left to compute."""
        return [row for row in self._rows if row.is_prefilling]

    @property
    def any_paused(self) -> bool:
        """True when a row waits for a KV block."""
        return any(row.is_paused for row in self._rows)

    @property
    def counts(self) -> RowCounts:
        """What the next step consists of, drafts aside."""
        num_decoding = num_prefilling = num_prompt_tokens = 0
        for row in self._rows:
            if row.is_prefilling:
                num_prefilling += row.scheduled > 0
                num_prompt_tokens += row.scheduled
            elif not row.is_paused:
                num_decoding += 1
        return RowCounts(
            rows=len(self._rows),
            paused=len(self._rows) - num_prefilling - num_decoding,
            prefilling=num_prefilling,
            tokens=num_decoding + num_prompt_tokens,
        )

    @property
    def budget(self) -> int:
        """Tokens that the next step may still compute."""
        return self._max_tokens - self.counts.tokens

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens that the next step may still compute, of a prompt without a history."""
        budget = self.budget
        if self._limit is None:
            return budget
        return min(budget, int(self._limit.most_tokens - self._prompt_cost(self._limit)))

    @property
    def _limit(self) -> PromptLimit | None:
        """What limits the next step's prompt tokens besides `budget`."""
        return self._beside if self._beside is not None and self.counts.decoding else None

    def admit(
        self, candidate: Candidate, budget: int, age: int | None = None, following: Iterable[Candidate] = ()
    ) -> RunningRequest | Refusal:
        """Admit a request with its first prefill chunk in the next step, or return why not.

        Args:
            budget: Tokens of this request that the step may compute; fewer behind a history that `beside` counts.
            age: See `PrefixCache.admit`.
            following: Requests that wait after it: where they part from its prompt, it keeps a state for them.
        """
        if len(self._rows) >= self._max_requests:
            return Refusal.NO_ROW
        plan = self.cache.plan(candidate, budget)
        while plan in (Refusal.NO_BLOCKS, Refusal.NO_SLOT) and not self._rows:  # no row will make room
            if not self.cache.tiers.make_room(candidate.spec.request_id):
                break
            plan = self.cache.plan(candidate, budget)
        if isinstance(plan, Refusal):
            self.cache.counters.admissions_deferred += plan is Refusal.WAITS_FOR_PREFIX
            return plan
        chunk_end = self._chunk_end(plan.match.skip_tokens, candidate.spec.prompt_len, budget)
        branches = self.cache.branches(candidate, following)
        row = self.cache.admit(candidate, replace(plan, chunk_end=chunk_end), age, branches)
        self._rows.append(row)
        return row

    def continue_prefill(self, row: RunningRequest, budget: int) -> None:
        """Schedule the next prefill chunk of a row."""
        self.cache.schedule_chunk(row, self._chunk_end(row.computed, row.spec.prompt_len, budget))

    def drop(self, rows: Collection[RunningRequest]) -> None:
        """Drop rows; what they published stays findable.

        If releasing one raises, it and those after it stay.
        """
        for row in list(rows):
            self._release(row)

    def grow(self, paused_capacity: int) -> GrowthOutcome:
        """Give decoding rows the KV blocks that they need; rows may be paused, resumed or evicted, see `grow_rows`.

        What is held for waiting requests makes room first.
        """
        if self.cache.tiers.takes_room and self.cache.kv.num_available < len(self._rows):
            self.cache.tiers.make_room()
        return grow_rows(list(self._rows), self.cache, paused_capacity, self._release)

    def resume(self) -> None:
        """Resume paused rows while KV blocks last, after others left between steps."""
        resume_rows(self._rows, self.cache)

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless rows, blocks and slots agree."""
        self.cache.check_integrity(self._rows)

    def _chunk_end(self, start: int, prompt_len: int, budget: int) -> int:
        """Return where a prompt's prefill chunk ends that begins at a position in the next step.

        Where rows decode, chunks are small, and most end off a boundary: few of their states are worth keeping.
        """
        num_tokens, align = budget, self.cache.rules.align_prefill_chunks
        if self._limit is not None:
            counts, remaining = self.counts, prompt_len - start
            beside = {"num_decoding": counts.decoding, "num_before": counts.prompt_tokens}
            num_tokens = self._limit.chunk(start, remaining, budget, **beside)
            align = align and self._limit.keeps_state(start, num_tokens)
        return prefill_chunk_end(
            start=start, prompt_len=prompt_len, budget=num_tokens, block_size=self.cache.block_size, align=align
        )

    def _prompt_cost(self, limit: PromptLimit) -> float:
        """Return what the next step's prompt tokens cost."""
        return sum(limit.cost(row.computed, row.scheduled) for row in self.prefilling)

    def _release(self, row: RunningRequest) -> None:
        self.cache.release(row)
        self._rows.remove(row)
