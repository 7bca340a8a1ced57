"""Plan the drafts of each step: ask the drafter where drafts pay, and check its answer."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

from torch import Tensor

from ..policy.requests import RunningRequest
from .acceptance import ShadowDrafts
from .draft_policy import AllDrafts, DraftPolicy
from .drafter import (
    CapturesGraphs,
    CompilesKernels,
    Draft,
    Drafter,
    DraftRequest,
    HasVocabulary,
    ReadsHiddenStates,
)

_LOG = logging.getLogger(__name__)
_MOST_SHADOW_DRAFTS = 16
"""Rows of a step that a drafter is asked for to watch it: prompt lookup reads a prompt when it is first asked."""


@dataclass(frozen=True, slots=True)
class DraftLimit:
    """A row of the next step and how many drafts are wanted for it; 0 if none."""

    row: RunningRequest
    limit: int


class DraftPlanner:
    """Plans the drafts of each step.

    Args:
        drafter: Proposes the tokens.
        max_drafts: The most drafts of a row in a step, at least 1; `NoDrafts` stands for 0.
        vocab_size: Bound of token ids, and the width of distributions.
        policy: Says how many drafts each row gets.

    Raises:
        ValueError: If `max_drafts` or `vocab_size` is below 1, or the drafter has another vocabulary.
    """

    def __init__(self, drafter: Drafter, max_drafts: int, vocab_size: int, policy: DraftPolicy | AllDrafts) -> None:
        for name, value in (("max_drafts", max_drafts), ("vocab_size", vocab_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        if isinstance(drafter, HasVocabulary) and drafter.vocab_size != vocab_size:
            raise ValueError(
                f"{type(drafter).__name__} drafts from a vocabulary of {drafter.vocab_size} tokens, the model's has "
                f"{vocab_size}; give a draft model of the same vocabulary, padded to the same size"
            )
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._reads_hidden_states = isinstance(drafter, ReadsHiddenStates)  # a protocol is slow to ask in every step
        self._graphs = drafter if isinstance(drafter, CapturesGraphs) else None
        self._policy = policy
        self._asked: set[int] = set()  # requests of the step that is planned whose drafts were asked for
        self._has_drafts = False  # of the step that lands
        self._watched, self._num_failed_watches, self._turn = ShadowDrafts(), 0, 0
        self._hidden_states: dict[int, Tensor] = {}

    @property
    def max_drafts(self) -> int:
        """The most drafts of a row in a step."""
        return self._max_drafts

    @property
    def reads_hidden_states(self) -> bool:
        """True when `note_hidden_state` must be called."""
        return self._reads_hidden_states

    def warmup(self) -> None:
        """Compile what the drafter launches, before the first request."""
        if isinstance(self._drafter, CompilesKernels):
            self._drafter.warmup()

    def capture_if_wanted(self, prepare: Callable[[], None]) -> None:
        """Let the drafter capture the graphs that it lacks, before a step.

        Args:
            prepare: Called before; no other thread may wait for the device meanwhile.
        """
        if self._graphs is None or not self._graphs.wants_graphs:
            return
        prepare()
        try:
            self._graphs.capture()
        except Exception as error:  # what a drafter lacks must not fail a step
            _LOG.warning("%s runs without CUDA graphs: %r", type(self._drafter).__name__, error)

    def check_weights(self) -> None:
        """Let the drafter drop graphs whose weights have moved."""
        if self._graphs is not None:
            self._graphs.check_weights()

    def drop_graphs(self) -> None:
        """Let the drafter drop its graphs."""
        if self._graphs is not None:
            self._graphs.drop_graphs()

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        """Return how many drafts each row of the next step should get; see `DraftPolicy`."""
        self._begin()
        return self._policy.counts(rows, rooms, budget)

    def foresee(self, rows: Sequence[RunningRequest]) -> None:
        """Decide what the rows of a step that runs are likely to draft in the next one; see `DraftPolicy`."""
        self._policy.foresee(rows, self._max_drafts)

    def rest(self, rows: Sequence[RunningRequest]) -> bool:
        """Return whether rows whose step has no drafts will all want none in the next step either."""
        return self._policy.rests(rows)

    def plan(self, limits: Sequence[DraftLimit]) -> list[Draft]:
        """Return one draft for each row, in order, at most its limit long; the drafter is called at most once.

        What the planner knows about the requests does not change, so a failed step may be planned again.

        Raises:
            ValueError: If the drafter's answer breaks its contract; the message names the drafter.
        """
        drafts = [Draft()] * len(limits)
        asked = [index for index, entry in enumerate(limits) if entry.limit > 0]
        self._asked = {limits[index].row.request_id for index in asked}
        if not asked:
            return drafts
        requests = [self._request(limits[index]) for index in asked]
        for index, draft in zip(asked, self._propose(requests), strict=True):
            drafts[index] = draft
        lengths = [len(draft.tokens) for draft in drafts]
        if all(length == entry.limit for length, entry in zip(lengths, limits, strict=True)):
            return drafts
        counts = self._policy.of_proposed([entry.row for entry in limits], lengths)
        return [draft.first(count) for draft, count in zip(drafts, counts, strict=True)]

    def note(self, row: RunningRequest, num_drafted: int, num_accepted: int) -> None:
        """Learn from a finished step of a row; call it once for each row of a step that may have had drafts.

        Args:
            num_drafted: Drafts that were verified, after any cut by the caller.
            num_accepted: How many of them were accepted; the base token does not count.

        A request whose drafts were not asked for, or that was forgotten meanwhile, is ignored.
        """
        if row.request_id in self._asked and num_drafted:
            self._has_drafts = True
            self._policy.note(row.request_id, num_drafted, num_accepted)

    def note_step(self, rows: Sequence[RunningRequest]) -> None:
        """Count a step that has landed; call it once for each, after its rows are noted and have their tokens."""
        self._policy.note_step(rows, asked=bool(self._asked), drafted=self._has_drafts)
        self._begin()
        if watched := self._policy.watched(rows):
            self._watch(watched)
        else:
            self._watched.clear()

    def note_hidden_state(self, row: RunningRequest, state: Tensor) -> None:
        """Keep the last hidden state [hidden] that a row's newest token was chosen from, for its next draft."""
        self._hidden_states[row.request_id] = state

    def forget(self, request_id: int) -> None:
        """Drop what is known about a request that finished or was evicted; an unknown one is ignored.

        A drafter that raises here fails no request: its drafts are still verified.
        """
        self._asked.discard(request_id)
        self._watched.forget(request_id)
        self._policy.forget(request_id)
        self._hidden_states.pop(request_id, None)
        self._tell_to_forget(request_id)

    def _begin(self) -> None:
        """Note that the next step has no drafts yet; what a failed one had is dropped."""
        self._asked.clear()
        self._has_drafts = False

    def _tell_to_forget(self, request_id: int) -> None:
        try:
            self._drafter.forget(request_id)
        except Exception as error:  # a drafter is user code, and requests are being released
            _LOG.warning("%s cannot forget request %d: %r", type(self._drafter).__name__, request_id, error)

    def _watch(self, rows: Sequence[RunningRequest]) -> None:
        """Learn from what the drafter would have proposed for rows that rest; while the next step runs, if it may."""
        for outcome in self._watched.ended(rows):
            self._policy.note(*outcome)
        asked = [row for row in rows if self._watched.num_tokens(row) == 0]
        if len(asked) > _MOST_SHADOW_DRAFTS:  # others' turn comes in the next steps
            self._turn = (self._turn + _MOST_SHADOW_DRAFTS) % len(asked)
            asked = [*asked[self._turn :], *asked[: self._turn]][:_MOST_SHADOW_DRAFTS]
        try:
            drafts = self._propose([DraftRequest(row, self._max_drafts) for row in asked]) if asked else []
        except Exception as error:  # a drafter is user code, and no step needs these drafts
            self._note_failed_watch(asked, error)
            return
        for row, draft in zip(asked, drafts, strict=True):
            if draft.tokens:
                self._watched.watch(row, draft.tokens)
        self._policy.reconsider(rows, [self._watched.num_tokens(row) for row in rows])

    def _note_failed_watch(self, asked: Sequence[RunningRequest], error: Exception) -> None:
        self._num_failed_watches += 1
        if self._num_failed_watches.bit_count() == 1:  # the first, second, fourth, ... time
            name = type(self._drafter).__name__
            _LOG.warning("%s failed %d times while its drafts were watched: %r", name, self._num_failed_watches, error)
        for row in asked:
            self._tell_to_forget(row.request_id)

    def _request(self, limit: DraftLimit) -> DraftRequest:
        return DraftRequest(limit.row, limit.limit, self._hidden_states.get(limit.row.request_id))

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self._drafter.propose(requests)
        if len(drafts) != len(requests):
            raise self._broken(f"{len(drafts)} drafts for {len(requests)} requests")
        for request, draft in zip(requests, drafts, strict=True):
            self._check(request, draft)
        return drafts

    def _check(self, request: DraftRequest, draft: Draft) -> None:
        whose = f"for request {request.row.request_id}"
        if len(draft.tokens) > request.num_tokens:
            raise self._broken(f"{len(draft.tokens)} tokens {whose}, at most {request.num_tokens} were requested")
        for token in draft.tokens:
            if not isinstance(token, (int, Integral)):  # int first: an abstract class is slow to ask
                raise self._broken(f"{type(token).__name__} {token!r} {whose} as a token, ids are ints")
            if not 0 <= token < self._vocab_size:
                raise self._broken(f"token {token} {whose}, ids are in [0, {self._vocab_size})")
        if draft.distributions is None:
            return
        needed, found = (len(draft.tokens), self._vocab_size), tuple(draft.distributions.shape)
        if found != needed:
            raise self._broken(f"distributions of shape {list(found)} {whose}, need {list(needed)}")
        if not draft.distributions.is_floating_point():
            raise self._broken(f"distributions of {draft.distributions.dtype} {whose}, need floating point")

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"drafter {type(self._drafter).__name__} returned {what}")


class NoDrafts:
    """Stands in for a `DraftPlanner` where nothing is drafted."""

    @property
    def max_drafts(self) -> int:
        """Always 0."""
        return 0

    @property
    def reads_hidden_states(self) -> bool:
        """Always False."""
        return False

    def warmup(self) -> None:
        """Compile nothing."""

    def capture_if_wanted(self, prepare: Callable[[], None]) -> None:
        """Capture nothing."""

    def check_weights(self) -> None:
        """Look at nothing."""

    def drop_graphs(self) -> None:
        """Drop nothing."""

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        """Return 0 for each row."""
        return [0] * len(rows)

    def foresee(self, rows: Sequence[RunningRequest]) -> None:
        """Decide nothing."""

    def rest(self, rows: Sequence[RunningRequest]) -> bool:
        """Return True."""
        return True

    def plan(self, limits: Sequence[DraftLimit]) -> list[Draft]:
        """Return an empty draft for each row."""
        return [Draft()] * len(limits)

    def note(self, row: RunningRequest, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""

    def note_step(self, rows: Sequence[RunningRequest]) -> None:
        """Count nothing."""

    def note_hidden_state(self, row: RunningRequest, state: Tensor) -> None:
        """Keep nothing."""

    def forget(self, request_id: int) -> None:
        """Forget nothing."""
