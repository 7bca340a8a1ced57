"""The next step, launched before this one's tokens are read: the GPU feeds itself, the host works beside it.

A step may run ahead where nothing but the tokens was open: every row decodes on, one token without drafts, in the KV
block that it has, and nobody could join. So it is the step that would have been launched later, only sooner, and is
landed as any other: when the rows reach it they are compared with what was launched. Rows may leave in between (a token
ends one, a request is cancelled, the engine suspends): what a row that is gone computes goes to blocks and a slot that
were its own, before anything that is launched later can use them. Who waits for a row to end is not kept waiting by a
step more: then the tokens are read first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CacheIntegrityError
from ..policy.requests import RunningRequest
from ..step.batch import StepBatch
from ..step.host_copy import stream_of
from ..step.one_token_steps import RowEnds
from ..step.shapes import StepShape
from .captured_step import CapturedStep, EarlyStep


class ReplayedGraph(Protocol):
    """A graph whose newest replay is launched."""

    shape: StepShape
    wanted_outputs: Tensor
    logits: Tensor
    outcome: Tensor

    def launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> "EarlyStep | None":
        """See `CapturedStep`."""


class LaunchedStep:
    """A step that is launched already, in the place of the captured one that computes it.

    Args:
        batch: The step as its readers see it, with all the rows that were launched.
        ends: What ends each of them.
    """

    def __init__(self, graph: ReplayedGraph, batch: StepBatch, ends: RowEnds) -> None:
        self._ends = ends
        self._graph: ReplayedGraph | None = graph
        self._batch = batch
        self._logits, self._outcome = graph.logits, graph.outcome
        self._stream = stream_of(graph.outcome) if graph.outcome.is_cuda else None
        self.shape = graph.shape
        self.wanted_outputs = graph.wanted_outputs

    def leave_graph(self) -> None:
        """Keep the results, which are there, when the graph goes."""
        self._logits, self._outcome = self._logits.clone(), self._outcome.clone()
        self.wanted_outputs = self.wanted_outputs.clone()
        self._graph = None

    def is_of(self, rows: Sequence[RunningRequest]) -> bool:
        """Whether these rows are those that were launched, all of them and no other."""
        return tuple(rows) == self._batch.rows

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Whether one of the tokens that its rows were fed, [rows], ends its row."""
        return self._ends.any_ends(tokens)

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Return the step of the rows that are still there.

        Raises:
            CacheIntegrityError: If others have joined them.
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
        """Return the logits, which are on their way; who reads them on another stream than launched them waits."""
        if self._stream is not None and (stream := stream_of(self._outcome)) != self._stream:
            stream.wait_stream(self._stream)
        return self._logits

    def verify_greedily(self) -> Tensor:
        """Return the outcome, which is on its way."""
        return self._outcome

    def launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> EarlyStep | None:
        """See `CapturedStep`."""
        return None if self._graph is None else self._graph.launch_next(rows, tokens)


class RunAhead:
    """Whether the next step is launched before this one is booked, and that step.

    Args:
        is_wanted: Whether steps may run ahead at all.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self.step: EarlyStep | None = None
        self._is_over = False
        self.is_alone = False
        """Whether nobody can join the next step; said by who admits requests, taken back by whatever may let one in."""
        self.has_queue = False
        """Whether somebody waits for a row to end; said by who admits requests."""
        self.fed: Sequence[int] = ()
        """The tokens, [rows], that the launched step was fed; said by who reads them."""

    def launch(
        self, captured: CapturedStep, rows: Sequence[RunningRequest], tokens: Sequence[int] | None = None
    ) -> None:
        """Launch the step behind a captured one, if it is not launched, and can be, and nobody minds.

        Args:
            tokens: [rows] what that one found; None if that is not known yet. Who waits minds that: a row that ends
                would make room for him a step later.
        """
        is_open = self._is_wanted and self.is_alone and self.step is None
        if is_open and not (tokens is None and self.has_queue):
            self._is_over = False
            self.step = captured.launch_next(rows, tokens)

    def take(self) -> CapturedStep | None:
        """Return the step that is launched, which is landed now; None if there is none."""
        step, self.step = self.step, None
        return step

    def check_inputs(self, tokens: Sequence[int]) -> None:
        """Raise `CacheIntegrityError` unless rows go on with the tokens that the launched step was fed."""
        if [*tokens] != [*self.fed]:
            raise CacheIntegrityError("the step that runs already was fed other tokens than its rows keep")

    def refuse_rows(self) -> None:
        """Raise `RuntimeError` if a step is launched, which no row can join any more."""
        if self.step is not None:
            raise RuntimeError(
                "the next step runs already, and no row can join it; admit rows by the engine, or set "
                "CacheConfig(run_ahead=False)"
            )

    def leave_graph(self) -> None:
        """Wait for it and keep its results: the graph that computed it goes."""
        self.wait()
        if self.step is not None:
            self.step.leave_graph()

    def wait(self) -> None:
        """Wait for it, once, before other steps use its buffers or its memory goes; in a capture nobody may wait."""
        if self.step is not None and not self._is_over:
            torch.cuda.synchronize()
            self._is_over = True

    def drop(self) -> None:
        """Wait for it and forget it: none of its rows is left."""
        self.wait()
        self.step, self.is_alone = None, False
