"""A step that is launched before its rows reach it; see `run_ahead`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ..errors import CacheIntegrityError
from ..policy.requests import RunningRequest
from .batch import StepBatch
from .captured_step import EarlyStep
from .decode_steps import RowEnds
from .host_copy import stream_of
from .logits import Draws
from .shapes import StepShape


class ReplayedGraph(Protocol):
    """A graph whose latest replay has been launched."""

    shape: StepShape
    wanted_outputs: Tensor
    logits: Tensor
    outcome: Tensor

    def verify(self, draws: Draws) -> Tensor:
        """See `CapturedStep`."""

    def adopt(self, outcome: Tensor) -> None:
        """See `CapturedStep`."""

    def can_launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """See `CapturedStep`."""

    def launch_next(self, rows: Sequence[RunningRequest]) -> "EarlyStep":
        """See `CapturedStep`."""


class LaunchedStep:
    """A step that is already launched; it stands in for the captured step that computes it.

    Args:
        batch: The step as its readers see it, with all the rows that were launched, which have its drafts now.
        ends: What ends each of them; None if the host already knew the tokens that the rows were fed.
        is_verified: Whether the outcome is launched already. If not, it is launched when the step lands, after tokens
            are barred; where logits are changed otherwise, the runner computes it.
        draft_distributions: See `Step`.
    """

    def __init__(
        self,
        graph: ReplayedGraph,
        batch: StepBatch,
        ends: RowEnds | None,
        *,
        is_verified: bool,
        draft_distributions: Sequence[Tensor | None] = (),
    ) -> None:
        self._ends = ends
        self._is_verified = is_verified
        self._drafts = [row.drafts for row in batch.rows]
        self._draft_distributions = draft_distributions
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
            self._batch = self._batch.with_own_verification()
        self._graph = None

    def leave_buffers(self) -> None:
        """Let the outcome be computed without the graph, which reads the buffers, if it is not launched yet."""
        if not self._is_verified and self._graph is not None:
            self.leave_graph()

    def is_of(self, rows: Sequence[RunningRequest]) -> bool:
        """Return whether these rows are exactly those that were launched."""
        return tuple(rows) == self._batch.rows

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any of the tokens that its rows were fed, [rows], may end its row."""
        return self._ends is not None and self._ends.any_ends(tokens)

    def schedule(self, rows: Sequence[RunningRequest]) -> list[Tensor | None]:
        """Schedule what was launched for each of the rows that are left; see `EarlyStep`."""
        launched, left = self._batch.rows, set(map(id, rows))
        for row, drafts in zip(launched, self._drafts, strict=True):
            if id(row) in left:
                row.schedule(1 + len(drafts), drafts)
        return [drawn for row, drawn in zip(launched, self._draft_distributions, strict=False) if id(row) in left]

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Return the step with only the rows that are left.

        Raises:
            CacheIntegrityError: If another row has joined them.
        """
        batch = self._batch
        if self.is_of(rows):
            return batch
        place_of = {id(row): place for row, place in zip(batch.rows, batch.places, strict=True)}
        if any(id(row) not in place_of for row in rows):
            raise CacheIntegrityError("a row joined a step that runs already; admit requests by the engine")
        places, starts = tuple(place_of[id(row)] for row in rows), batch.logits.starts
        if not self._is_verified:
            self._wait_for_launch()
            batch.forget_boundaries(set(batch.places).difference(places))
        start_of = dict(zip(batch.places, starts, strict=False))
        num_tokens = sum(row.scheduled for row in rows)
        return replace(
            batch,
            rows=tuple(rows),
            request_ids=tuple(row.request_id for row in rows),
            places=places,
            num_tokens=num_tokens,
            num_decode_rows=len(rows),
            num_decode_tokens=num_tokens,
            logits=replace(batch.logits, starts=(*(start_of[place] for place in places), starts[-1])),
        )

    def forward(self) -> Tensor:
        """Return the logits, which may still be computed; a stream other than the launching one waits for them."""
        self._wait_for_launch()
        return self._logits

    def _wait_for_launch(self) -> None:
        if self._stream is not None and (stream := stream_of(self._outcome)) != self._stream:
            stream.wait_stream(self._stream)

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

    def adopt(self, outcome: Tensor) -> None:
        """See `CapturedStep`."""
        if self._graph is not None:
            self._graph.adopt(outcome)

    def can_launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """See `CapturedStep`; False once the graph is freed."""
        return self._graph is not None and self._graph.can_launch_next(rows, tokens)

    def launch_next(self, rows: Sequence[RunningRequest]) -> EarlyStep:
        """See `CapturedStep`."""
        if self._graph is None:
            raise CacheIntegrityError("the graph that computed this step is freed; ask can_launch_next()")
        return self._graph.launch_next(rows)
