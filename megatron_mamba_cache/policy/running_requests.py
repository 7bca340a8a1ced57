"""The requests that have a row, and every change of which ones those are."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from .admission import Refusal
from .block_growth import GrowthOutcome, grow_rows, resume_rows
from .boundaries import prefill_chunk_end
from .prefix_cache import PrefixCache
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


class RunningRequests:
    """Rows over one prefix cache, oldest admission first, paused ones included.

    Args:
        max_requests: Most rows at a time.
        max_tokens: Most tokens of a step.
        max_beside: Most prompt tokens of a step in which rows decode; None: as many as fit.
    """

    def __init__(self, cache: PrefixCache, max_requests: int, max_tokens: int, max_beside: int | None = None) -> None:
        self.cache = cache
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._max_beside = max_tokens if max_beside is None else max_beside
        self._rows: list[RunningRequest] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._rows)

    @property
    def is_full(self) -> bool:
        """True when no request can join before another ends, whatever memory there is."""
        return len(self._rows) >= self._max_requests

    @property
    def num_free(self) -> int:
        """How many requests can join before another ends."""
        return max(self._max_requests - len(self._rows), 0)

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
        """Prompt tokens that the next step may still compute."""
        counts = self.counts
        num_decoding = counts.rows - counts.paused - counts.prefilling
        budget = self._max_tokens - counts.tokens
        return min(budget, self._max_beside - (counts.tokens - num_decoding)) if num_decoding else budget

    def admit(self, candidate: Candidate, budget: int, following: Iterable[Candidate] = ()) -> RunningRequest | Refusal:
        """Admit a request with its first prefill chunk in the next step, or return why not.

        Args:
            budget: Tokens of this request that the step may compute.
            following: Requests that wait after it: where they part from its prompt, it keeps a state for them.
        """
        if self.is_full:
            return Refusal.NO_ROW
        plan = self.cache.plan(candidate, budget)
        while plan in (Refusal.NO_BLOCKS, Refusal.NO_SLOT) and not self._rows:  # no row will make room
            if not self.cache.tiers.make_room(candidate.request_id):
                break
            plan = self.cache.plan(candidate, budget)
        if isinstance(plan, Refusal):
            self.cache.counters.admissions_deferred += plan is Refusal.WAITS_FOR_PREFIX
            return plan
        row = self.cache.admit(candidate, plan, self.cache.branches(candidate, following))
        self._rows.append(row)
        return row

    def continue_prefill(self, row: RunningRequest, budget: int) -> None:
        """Schedule the next prefill chunk of a row."""
        chunk_end = prefill_chunk_end(
            start=row.computed,
            prompt_len=row.spec.prompt_len,
            budget=budget,
            block_size=self.cache.block_size,
            align=self.cache.rules.align_prefill_chunks,
        )
        self.cache.schedule_chunk(row, chunk_end)

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

    def _release(self, row: RunningRequest) -> None:
        self.cache.release(row)
        self._rows.remove(row)
