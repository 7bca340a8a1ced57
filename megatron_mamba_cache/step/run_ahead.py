"""The next step, launched before this step's tokens are read: the GPU feeds itself while the host works.

`may_run_ahead` decides when. A step may run ahead if only its tokens are unknown: every row decodes one more token
without drafts, in the KV block that it has, and no request can join. It is then the step that would have been launched
later, and it lands like any other: when the rows reach it, they are compared with those that were launched. Rows may
leave in between (a token ends one, a request is cancelled, the engine suspends). What is computed for such a row goes
to the blocks and the slot that it had, before anything launched later can use them. A queued request never waits an
extra step: while one is queued, tokens are read first, unless a copy has to bring its prefix before it can join.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CacheIntegrityError
from ..policy.requests import RunningRequest
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from .batch import StepBatch
from .captured_step import CapturedStep, EarlyStep
from .decode_steps import RowEnds
from .host_copy import stream_of
from .logits import Draws
from .shapes import StepShape
from .step import Step


class ReplayedGraph(Protocol):
    """A graph whose latest replay has been launched."""

    shape: StepShape
    wanted_outputs: Tensor
    logits: Tensor
    outcome: Tensor

    def verify(self, draws: Draws) -> Tensor:
        """See `CapturedStep`."""

    def can_launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """See `CapturedStep`."""

    def launch_next(self, rows: Sequence[RunningRequest]) -> "EarlyStep":
        """See `CapturedStep`."""


class LaunchedStep:
    """A step that is already launched; it stands in for the captured step that computes it.

    Args:
        batch: The step as its readers see it, with all the rows that were launched.
        ends: What ends each of them.
        is_verified: Whether the outcome is launched too; else a row's grammar may bar tokens first.
    """

    def __init__(self, graph: ReplayedGraph, batch: StepBatch, ends: RowEnds, *, is_verified: bool = True) -> None:
        self._ends = ends
        self._is_verified = is_verified
        self._graph: ReplayedGraph | None = graph
        self._batch = batch
        self._logits, self._outcome = graph.logits, graph.outcome
        self._stream = stream_of(graph.outcome) if graph.outcome.is_cuda else None
        self.shape = graph.shape
        self.wanted_outputs = graph.wanted_outputs

    def leave_graph(self) -> None:
        """Copy the results, which are complete, before the graph is freed."""
        self._logits, self._outcome = self._logits.clone(), self._outcome.clone()
        self.wanted_outputs = self.wanted_outputs.clone()
        if not self._is_verified:
            self._batch = replace(self._batch, logits=self._batch.logits.clone())
        self._graph = None

    def leave_buffers(self) -> None:
        """Let the outcome be computed without the graph, which reads the buffers, if it is not launched yet."""
        if not self._is_verified and self._graph is not None:
            self.leave_graph()

    def is_of(self, rows: Sequence[RunningRequest]) -> bool:
        """Return whether these rows are exactly those that were launched."""
        return tuple(rows) == self._batch.rows

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any of the tokens that its rows were fed, [rows], ends its row."""
        return self._ends.any_ends(tokens)

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Return the step with only the rows that are left.

        Raises:
            CacheIntegrityError: If another row has joined them.
        """
        batch = self._batch
        if self.is_of(rows) and not draws_ratios:
            return batch
        place_of = {id(row): place for row, place in zip(batch.rows, batch.places, strict=True)}
        if draws_ratios or any(id(row) not in place_of or row.scheduled != 1 for row in rows):
            raise CacheIntegrityError("a row joined a step that runs already; admit requests by the engine")
        places, starts = tuple(place_of[id(row)] for row in rows), batch.logits.starts
        start_of = dict(zip(batch.places, starts, strict=False))
        return replace(
            batch,
            rows=tuple(rows),
            request_ids=tuple(row.request_id for row in rows),
            places=places,
            num_tokens=len(rows),
            num_decode_rows=len(rows),
            num_decode_tokens=len(rows),
            logits=replace(batch.logits, starts=(*(start_of[place] for place in places), starts[-1])),
        )

    def forward(self) -> Tensor:
        """Return the logits, which may still be computed; a stream other than the launching one waits for them."""
        if self._stream is not None and (stream := stream_of(self._outcome)) != self._stream:
            stream.wait_stream(self._stream)
        return self._logits

    @property
    def can_verify(self) -> bool:
        """See `CapturedStep`."""
        return self._is_verified or self._graph is not None

    def verify(self, draws: Draws) -> Tensor:
        """Return the outcome, which may still be computed."""
        if not self._is_verified:
            if self._graph is None:
                raise CacheIntegrityError("the graph that computed this step is freed; ask can_verify")
            self._outcome, self._is_verified = self._graph.verify(draws), True
        return self._outcome

    def can_launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """See `CapturedStep`; False once the graph is freed."""
        return self._graph is not None and self._graph.can_launch_next(rows, tokens)

    def launch_next(self, rows: Sequence[RunningRequest]) -> EarlyStep:
        """See `CapturedStep`."""
        if self._graph is None:
            raise CacheIntegrityError("the graph that computed this step is freed; ask can_launch_next()")
        return self._graph.launch_next(rows)


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue as the scheduler last saw it, and whether that still holds.

    Args:
        has_waiting: True when a request waits for a row to end, and not for a copy.
        is_settled: True when the scheduler found no request that can join the next step and nothing has changed since.
    """

    has_waiting: bool = False
    is_settled: bool = False


def may_run_ahead(
    step: Step,
    num_running: int,
    queue: QueueState,
    planner: DraftPlanner | NoDrafts,
    tokens: Sequence[int] | None,
    *,
    is_wanted: bool,
) -> bool:
    """Return whether the step after this one may be launched now; changes nothing.

    Args:
        num_running: Requests that have a row, paused ones included.
        is_wanted: Whether the settings ask for it.
        tokens: [rows] the step's tokens; None until they are read. Until then nothing is launched while a request
            waits for a row to end: it would be admitted a step later.
    """
    return (
        is_wanted
        and step.graph is not None
        and queue.is_settled
        and (tokens is not None or not queue.has_waiting)
        and len(step.rows) == num_running
        and planner.rest(step.rows)
        and step.graph.can_launch_next(step.rows, tokens)
    )


class EarlySteps:
    """Holds the early step, if there is one."""

    def __init__(self) -> None:
        self._launched: EarlyStep | None = None
        self._is_complete = False
        self._fed: Sequence[int] = ()

    @property
    def launched(self) -> EarlyStep | None:
        """The launched step that has not landed, if there is one."""
        return self._launched

    def launch(self, graph: CapturedStep, rows: Sequence[RunningRequest]) -> None:
        """Launch the step after a captured one."""
        self._is_complete = False
        self._launched = graph.launch_next(rows)

    def note_fed(self, tokens: Sequence[int]) -> None:
        """Note the tokens, [rows], that the launched step was fed, now that they are read."""
        self._fed = tokens

    def take(self) -> EarlyStep | None:
        """Return the launched step, which now lands; None if there is none."""
        step, self._launched = self._launched, None
        return step

    def check_inputs(self, tokens: Sequence[int]) -> None:
        """Raise `CacheIntegrityError` unless rows keep the tokens that the launched step was fed."""
        if [*tokens] != [*self._fed]:
            raise CacheIntegrityError("the step that runs already was fed other tokens than its rows keep")

    def refuse_rows(self) -> None:
        """Raise `RuntimeError` if a step is launched: no row can join it."""
        if self._launched is not None:
            raise RuntimeError(
                "the next step runs already, and no row can join it; admit rows by the engine, or set "
                "CacheConfig(run_ahead=False)"
            )

    def leave_graph(self) -> None:
        """Wait for the launched step and copy its results, before the graph that computed it is freed."""
        self.wait()
        if self._launched is not None:
            self._launched.leave_graph()

    def wait(self) -> None:
        """Wait once for the launched step, before its buffers or memory are reused; a capture must not wait again."""
        if self._launched is not None and not self._is_complete:
            torch.cuda.synchronize()
            self._is_complete = True
            self._launched.leave_buffers()

    def drop(self) -> None:
        """Wait for the launched step and forget it: none of its rows is left."""
        self.wait()
        self._launched = None
