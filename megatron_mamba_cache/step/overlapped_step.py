"""Steps computed by a CUDA graph, and the overlapped step, which is launched before its requests are updated."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CacheIntegrityError
from ..policy.requests import RunningRequest
from .batch import StepBatch
from .buffers import stream_of
from .decode_steps import RequestEnds
from .logits import Draws
from .model import WeightAddresses
from .shapes import StepShape


class CapturedStep(Protocol):
    """Step of a fixed shape computed by a graph replay, which writes `logits` and `outcome`."""

    shape: StepShape
    wanted_outputs: Tensor
    logits: Tensor
    outcome: Tensor

    def lay_out(self, requests: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Send the requests of a step that fits the shape, and begin to compute it; return it as its readers see it.

        States may be written from now on: compute the step next, or drop its requests.
        """

    def forward(self) -> Tensor:
        """Compute the logits of the step that was laid out last; logits of padding are meaningless."""

    @property
    def can_verify(self) -> bool:
        """False if the graph has been freed, so the caller must compute the outcome from the logits."""

    def verify(self, draws: Draws) -> Tensor:
        """After `forward`, sample tokens, verify, and copy reached boundary states; return [requests, 2 + K].

        The caller may mask tokens in the logits before.

        Args:
            draws: A way that draws for all requests.
        """

    def adopt(self, outcome: Tensor) -> None:
        """Store an outcome, [requests, 2 + K], that `verify` did not compute."""

    def can_launch_next(self, requests: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """Return whether the next step depends only on the tokens of the step that was laid out last.

        False if requests of that one have drafts.

        Args:
            tokens: [requests] the new tokens; None while they are unknown, so that requests which end are computed too.
        """

    def launch_next(self, requests: Sequence[RunningRequest]) -> "OverlappedStep":
        """Launch the next step, with the tokens fed on the device; return it. It must land."""


class OverlapState(Enum):
    """Progress of an overlapped step."""

    FORWARD = "the forward is launched; the graph computes the outcome when the step lands"
    OUTCOME = "the outcome is launched too"
    COMPLETE = "both are computed, in the graph's own tensors"
    COPIED_LOGITS = "the logits are computed and copied; the runner computes the outcome when the step lands"
    COPIED_OUTCOME = "both are computed and copied"


class OverlappedStep:
    """Step that is launched before its requests are updated; used in place of the captured step that computes it.

    It lands like any other step: `schedule` and `lay_out` receive the requests that remain.

    Args:
        batch: The step as its readers see it, with all the requests that were launched, which have its drafts now.
        ends: What ends each of them; None if the host already knew the tokens that the requests were fed.
        state: FORWARD or OUTCOME. A FORWARD step's outcome is launched when it lands, after tokens are masked; where
            logits are changed otherwise, the runner computes it.
        draft_distributions: As in `Step`.
    """

    def __init__(
        self,
        graph: CapturedStep,
        batch: StepBatch,
        ends: RequestEnds | None,
        state: OverlapState,
        draft_distributions: Sequence[Tensor | None] = (),
    ) -> None:
        self.state = state
        self._graph: CapturedStep | None = graph
        self._batch = batch
        self._ends = ends
        self._fed: Sequence[int] = ()
        self._drafts = [request.drafts for request in batch.requests]
        self._draft_distributions = draft_distributions
        self._stream = stream_of(graph.outcome) if graph.outcome.is_cuda else None
        self.shape = graph.shape
        self.wanted_outputs, self.logits, self.outcome = graph.wanted_outputs, graph.logits, graph.outcome

    # Before it lands.

    def note_fed(self, tokens: Sequence[int]) -> None:
        """Store the tokens, [requests], that were fed on the device, after they have been read."""
        self._fed = tokens

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any fed token, [requests], may end its request."""
        return self._ends is not None and self._ends.any_ends(tokens)

    def check_inputs(self, tokens: Sequence[int]) -> None:
        """Raise `CacheIntegrityError` unless the requests keep the tokens that were fed."""
        if [*tokens] != [*self._fed]:
            raise CacheIntegrityError("the running step was given other tokens than its requests kept")

    def wait(self) -> None:
        """Wait for the device before buffers or memory are reused; only once, since a capture must not wait.

        The graph would read the buffers to verify; from now on the runner verifies from copies.
        """
        if self.state is OverlapState.FORWARD:
            torch.cuda.synchronize()
            self._copy_results()
            self._batch = self._batch.with_own_verification()
            self.state = OverlapState.COPIED_LOGITS
        elif self.state is OverlapState.OUTCOME:
            torch.cuda.synchronize()
            self.state = OverlapState.COMPLETE

    def leave_graph(self) -> None:
        """Wait, and copy the results before the graph is freed."""
        self.wait()
        if self.state is OverlapState.COMPLETE:
            self._copy_results()
            self.state = OverlapState.COPIED_OUTCOME

    def _copy_results(self) -> None:
        self.logits, self.outcome = self.logits.clone(), self.outcome.clone()
        self.wanted_outputs = self.wanted_outputs.clone()
        self._graph = None

    # The interface of `CapturedStep`, used while the step lands.

    def schedule(self, requests: Sequence[RunningRequest]) -> list[Tensor | None]:
        """Schedule the launched tokens for each remaining request; return the draft distributions."""
        launched, left = self._batch.requests, set(map(id, requests))
        for request, drafts in zip(launched, self._drafts, strict=True):
            if id(request) in left:
                request.schedule(1 + len(drafts), drafts)
        return [
            sampled
            for request, sampled in zip(launched, self._draft_distributions, strict=False)
            if id(request) in left
        ]

    def lay_out(self, requests: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Return the batch of the remaining requests; raise `CacheIntegrityError` if another request joined."""
        batch = self._batch
        if tuple(requests) == batch.requests:
            return batch
        row_of = {id(request): row for request, row in zip(batch.requests, batch.row_indices, strict=True)}
        if any(id(request) not in row_of for request in requests):
            raise CacheIntegrityError(
                "a request joined a step that is already running; admit requests through the engine"
            )
        row_indices, starts = tuple(row_of[id(request)] for request in requests), batch.logits.starts
        if self.state in (OverlapState.FORWARD, OverlapState.COPIED_LOGITS):
            self._wait_for_launch()
            batch.forget_boundaries(set(batch.row_indices).difference(row_indices))
        start_of = dict(zip(batch.row_indices, starts, strict=False))
        num_tokens = sum(request.scheduled for request in requests)
        return replace(
            batch,
            requests=tuple(requests),
            request_ids=tuple(request.request_id for request in requests),
            row_indices=row_indices,
            num_tokens=num_tokens,
            num_decode_requests=len(requests),
            num_decode_tokens=num_tokens,
            logits=replace(batch.logits, starts=(*(start_of[row] for row in row_indices), starts[-1])),
        )

    def forward(self) -> Tensor:
        """Return the logits, which may still be pending; the current stream waits if it is not the launching stream."""
        self._wait_for_launch()
        return self.logits

    @property
    def can_verify(self) -> bool:
        return self.state is not OverlapState.COPIED_LOGITS

    def verify(self, draws: Draws) -> Tensor:
        """Return the outcome, which may still be pending."""
        if self.state is OverlapState.COPIED_LOGITS:
            raise CacheIntegrityError("the graph that computed this step was freed; check can_verify")
        if self.state is OverlapState.FORWARD and self._graph is not None:
            self.outcome = self._graph.verify(draws)
            self.state = OverlapState.OUTCOME
        return self.outcome

    def adopt(self, outcome: Tensor) -> None:
        if self._graph is not None:
            self._graph.adopt(outcome)

    def can_launch_next(self, requests: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """Return True if the graph can launch the next step; False once it is freed."""
        return self._graph is not None and self._graph.can_launch_next(requests, tokens)

    def launch_next(self, requests: Sequence[RunningRequest]) -> "OverlappedStep":
        if self._graph is None:
            raise CacheIntegrityError("the graph that computed this step was freed; check can_launch_next()")
        return self._graph.launch_next(requests)

    def _wait_for_launch(self) -> None:
        if self._stream is not None and (stream := stream_of(self.outcome)) != self._stream:
            stream.wait_stream(self._stream)


@dataclass(frozen=True, slots=True)
class Capture:
    """Result of capturing graphs; `num_bytes` is their device memory."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class GraphsByShape(Protocol):
    """The captured steps over one memory and one set of weight addresses."""

    capture: Capture
    weights: WeightAddresses

    @property
    def shapes(self) -> Collection[StepShape]:
        """The shapes of the captured steps."""

    def hold(self, step: StepShape) -> bool:
        """Return whether some captured step fits every step that this shape fits."""

    def launch(
        self, requests: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> OverlappedStep:
        """Send the scheduled requests and launch the forward pass; return the step, which must land.

        Args:
            draft_distributions: As in `Step`.
        """

    def fitting(self, requests: Sequence[RunningRequest], shape: StepShape | None = None) -> CapturedStep | None:
        """Return the captured step of `shape`, or the smallest that fits the requests; None if there is none."""
