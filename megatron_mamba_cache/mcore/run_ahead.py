"""The next step, launched as soon as this one's tokens are read: the host's bookkeeping goes on beside the GPU's work.

A step may run ahead where nothing but the tokens was open: every row decodes on, one token without drafts, in the KV
block that it has, and nobody could join. So it is the step that would have been launched later, only sooner, and is
landed as any other: when the rows reach it they are compared with what was launched. Rows may leave in between (their
request is cancelled, or the engine suspends): what a row that is gone computes goes to blocks and a slot that were its
own, before anything that is launched later can use them.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import CacheIntegrityError
from ..policy.requests import RunningRequest
from ..state.padded_step import StepShape
from ..state.step_batch import StepBatch
from .captured_step import CapturedStep


class ReplayedGraph(Protocol):
    """A graph whose newest replay is launched."""

    shape: StepShape
    wanted_outputs: Tensor
    logits: Tensor
    outcome: Tensor

    def run_on(self, rows: Sequence[RunningRequest], tokens: Sequence[int]) -> "CapturedStep | None":
        """See `CapturedStep`."""


class LaunchedStep:
    """A step that is launched already, in the place of the captured one that computes it.

    Args:
        batch: The step as its readers see it, with all the rows that were launched.
    """

    def __init__(self, graph: ReplayedGraph, batch: StepBatch) -> None:
        self._graph = graph
        self._batch = batch
        self.shape = graph.shape
        self.wanted_outputs = graph.wanted_outputs

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Return the step of the rows that are still there.

        Raises:
            CacheIntegrityError: If others have joined them.
        """
        batch = self._batch
        place_of = {id(row): place for row, place in zip(batch.rows, batch.places, strict=True)}
        if draws_ratios or any(id(row) not in place_of or row.scheduled != 1 for row in rows):
            raise CacheIntegrityError("a row joined a step that runs already; admit requests by the engine")
        if len(rows) == len(batch.rows):
            return batch
        places, starts = tuple(place_of[id(row)] for row in rows), batch.logits.starts
        start_of = dict(zip(batch.places, starts, strict=False))
        return replace(
            batch,
            rows=tuple(rows),
            places=places,
            num_tokens=len(rows),
            num_decode_rows=len(rows),
            num_decode_tokens=len(rows),
            logits=replace(batch.logits, starts=(*(start_of[place] for place in places), starts[-1])),
        )

    def forward(self) -> Tensor:
        """Return the logits, which are on their way."""
        return self._graph.logits

    def verify_greedily(self) -> Tensor:
        """Return the outcome, which is on its way."""
        return self._graph.outcome

    def run_on(self, rows: Sequence[RunningRequest], tokens: Sequence[int]) -> CapturedStep | None:
        """See `CapturedStep`."""
        return self._graph.run_on(rows, tokens)


class RunAhead:
    """Whether the next step is launched before this one is booked, and that step.

    Args:
        is_wanted: Whether steps may run ahead at all.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self.step: CapturedStep | None = None
        self._launched_at = 0.0
        self._is_over = False
        self.is_alone = False
        """Whether nobody can join the next step; said by who admits requests, taken back by whatever may let one in."""

    @property
    def launched_at(self) -> float | None:
        """When the step was launched, by `time.perf_counter`; None if none is."""
        return None if self.step is None else self._launched_at

    def launch(self, captured: CapturedStep, rows: Sequence[RunningRequest], tokens: Sequence[int]) -> bool:
        """Launch the step behind a captured one, which gave all rows these tokens; return whether it could be."""
        if self._is_wanted and self.is_alone:
            self._launched_at, self._is_over = time.perf_counter(), False
            self.step = captured.run_on(rows, tokens)
        return self.step is not None

    def take(self) -> CapturedStep | None:
        """Return the step that is launched, which is landed now; None if there is none."""
        step, self.step = self.step, None
        return step

    def wait(self) -> None:
        """Wait for it, once, before other steps use its buffers or its memory goes; in a capture nobody may wait."""
        if self.step is not None and not self._is_over:
            torch.cuda.synchronize()
            self._is_over = True

    def drop(self) -> None:
        """Wait for it and forget it: none of its rows is left."""
        self.wait()
        self.step, self.is_alone = None, False


def tokens_of(sampled: Sequence[Sequence[int]]) -> list[int]:
    """Return the new token of each row, of the lines of an outcome, [2 + K]: one is accepted, then that one."""
    return np.asarray(sampled)[:, 1].tolist()
