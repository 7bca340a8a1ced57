"""Interface of steps computed by CUDA graphs, and overlapped steps, launched before their requests are updated."""

from collections.abc import Callable, Collection, Sequence
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
        """Copy a step that fits the shape to the device, start to compute it, and return its batch without padding.

        The device may write states from now on: if the step is not completed, its requests must be dropped.
        """

    def forward(self) -> Tensor:
        """Compute the logits of the step that was laid out last; logits of padding are meaningless."""

    @property
    def can_verify(self) -> bool:
        """True until the graph is freed; afterwards, the caller must compute the outcome from the logits."""

    def verify(self, draws: Draws) -> Tensor:
        """Sample tokens, verify drafts, and copy the states at reached boundaries; return the outcome.

        Call this after `forward`. The caller may mask tokens in `logits` first. The outcome is that of `verify_step`,
        [requests, 2 + max drafts].

        Args:
            draws: Sampling method that can sample for all requests.
        """

    def adopt(self, outcome: Tensor) -> None:
        """Store an outcome, [requests, 2 + max drafts], that was computed without `verify`."""

    def can_launch_next(self, requests: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """Return whether the device alone can derive the next step from this step's sampled tokens.

        This is False if the current step has drafts.

        Args:
            tokens: [requests] the new tokens; None while they are unknown. With None, a request that has ended is
                computed once more, and the result is discarded.
        """

    def launch_next(self, requests: Sequence[RunningRequest]) -> "OverlappedStep":
        """Launch the next step, whose input tokens are copied on the device; return it. The caller must let it land."""

    def can_follow(self, requests: Sequence[RunningRequest]) -> bool:
        """Return whether the device can derive the next step, with as many drafts, from this step's outcome."""

    def launch_followed(self, requests: Sequence[RunningRequest], follow: Callable[[], None]) -> "OverlappedStep":
        """Launch the next step before the outcome is read; return it. The caller must let it land.

        Args:
            follow: Launches the drafts that follow this step's outcome, and `follow_step`.
        """


class OverlapState(Enum):
    """Progress of an overlapped step."""

    FORWARD = "the forward pass is launched; the graph computes the outcome when the step lands"
    OUTCOME = "the forward pass and the outcome are launched"
    COMPLETE = "logits and outcome are computed and in the graph's tensors"
    COPIED_LOGITS = "the logits are computed and copied; the runner computes the outcome when the step lands"
    COPIED_OUTCOME = "logits and outcome are computed and copied"


class OverlappedStep:
    """A step launched before its requests are updated. It lands when the host updates its requests with its tokens.

    While it lands, it is used instead of its `CapturedStep`, with the same interface; `schedule` and `lay_out` then get
    only the requests that have not ended.

    Args:
        batch: Batch of the step with all requests that were launched; their drafts are still scheduled.
        ends: End conditions of the requests; None if the host knew the input tokens at the launch.
        state: FORWARD if only the forward pass is launched: when the step lands, the graph computes the outcome from
            the logits, or the runner does if a request changes them other than by a mask. OUTCOME if both are launched.
        draft_distributions: As in `Step`.
        has_device_drafts: True if only the device knows the drafts; their tokens are 0 on the host.
    """

    def __init__(
        self,
        graph: CapturedStep,
        batch: StepBatch,
        ends: RequestEnds | None,
        state: OverlapState,
        draft_distributions: Sequence[Tensor | None] = (),
        *,
        has_device_drafts: bool = False,
    ) -> None:
        self.state = state
        self.has_device_drafts = has_device_drafts
        self._graph: CapturedStep | None = graph
        self._batch = batch
        self._ends = ends
        self._fed: Sequence[int] = ()
        self._drafts = [request.drafts for request in batch.requests]
        if has_device_drafts:
            zeros = [(0,) * number for number in range(1 + graph.shape.width)]
            self._drafts = [zeros[len(drafts)] for drafts in self._drafts]
        self._draft_distributions = draft_distributions
        self._stream = stream_of(graph.outcome) if graph.outcome.is_cuda else None
        self.shape = graph.shape
        self.wanted_outputs, self.logits, self.outcome = graph.wanted_outputs, graph.logits, graph.outcome

    # The methods up to `leave_graph` are called before the step lands.

    def note_fed(self, tokens: Sequence[int]) -> None:
        """Store the input tokens, [requests], which were copied on the device and which the host has now read."""
        self._fed = tokens

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any input token, [requests], may have ended its request."""
        return self._ends is not None and self._ends.any_ends(tokens)

    def check_inputs(self, tokens: Sequence[int]) -> None:
        """Raise `CacheIntegrityError` unless `tokens` equal the input tokens that were copied on the device."""
        if [*tokens] != [*self._fed]:
            raise CacheIntegrityError("the input tokens of the running step differ from the tokens its requests kept")

    def wait(self) -> None:
        """Wait for the device, so that buffers or memory can be reused; later calls do not wait again.

        The graph would read the step buffers to verify drafts, so after this call the runner verifies with copies.
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
        """Wait for the step, and copy its results so that the graph can be freed."""
        self.wait()
        if self.state is OverlapState.COMPLETE:
            self._copy_results()
            self.state = OverlapState.COPIED_OUTCOME

    def _copy_results(self) -> None:
        self.logits, self.outcome = self.logits.clone(), self.outcome.clone()
        self.wanted_outputs = self.wanted_outputs.clone()
        self._graph = None

    # The methods below implement `CapturedStep`, and are called while the step lands.

    def schedule(self, requests: Sequence[RunningRequest]) -> list[Tensor | None]:
        """Schedule the launched tokens for the remaining requests; return the draft distributions."""
        launched = self._batch.requests
        left = set(map(id, requests)) if len(requests) < len(launched) else None
        for request, drafts in zip(launched, self._drafts, strict=True):
            if left is None or id(request) in left:
                request.schedule(1 + len(drafts), drafts)
        return [
            sampled
            for request, sampled in zip(launched, self._draft_distributions, strict=False)
            if left is None or id(request) in left
        ]

    def lay_out(self, requests: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Return the batch for the remaining requests; raise `CacheIntegrityError` if one was not launched."""
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
        """Return the logits, which may still be computing; the current stream waits if another one launched them."""
        self._wait_for_launch()
        return self.logits

    @property
    def can_verify(self) -> bool:
        return self.state is not OverlapState.COPIED_LOGITS

    def verify(self, draws: Draws) -> Tensor:
        """Return the outcome, which the device may still be computing; launch its computation if that is pending."""
        if self.state is OverlapState.COPIED_LOGITS:
            raise CacheIntegrityError("the graph that computed this step was freed; check can_verify before verify()")
        if self.state is OverlapState.FORWARD and self._graph is not None:
            self.outcome = self._graph.verify(draws)
            self.state = OverlapState.OUTCOME
        return self.outcome

    def adopt(self, outcome: Tensor) -> None:
        if self._graph is not None:
            self._graph.adopt(outcome)

    def can_launch_next(self, requests: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """Return whether the graph can launch the next step; False after the graph is freed."""
        return self._graph is not None and self._graph.can_launch_next(requests, tokens)

    def launch_next(self, requests: Sequence[RunningRequest]) -> "OverlappedStep":
        if self._graph is None:
            raise CacheIntegrityError("the graph of this step was freed; check can_launch_next() before launch_next()")
        return self._graph.launch_next(requests)

    def can_follow(self, requests: Sequence[RunningRequest]) -> bool:
        return self._graph is not None and self._graph.can_follow(requests)

    def launch_followed(self, requests: Sequence[RunningRequest], follow: Callable[[], None]) -> "OverlappedStep":
        if self._graph is None:
            raise CacheIntegrityError("the graph of this step was freed; check can_follow() before launch_followed()")
        return self._graph.launch_followed(requests, follow)

    @property
    def captured(self) -> CapturedStep | None:
        """The graph that computes the step; None after it is freed."""
        return self._graph

    def _wait_for_launch(self) -> None:
        if self._stream is not None and (stream := stream_of(self.outcome)) != self._stream:
            stream.wait_stream(self._stream)


@dataclass(frozen=True, slots=True)
class Capture:
    """Number of captured graphs, the seconds that the capture took, and the graphs' device memory in bytes."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class GraphsByShape(Protocol):
    """Interface of the captured graphs over one cache memory and one set of weight addresses."""

    capture: Capture
    weights: WeightAddresses

    @property
    def shapes(self) -> Collection[StepShape]:
        """Shapes of the captured graphs."""

    @property
    def with_drafts(self) -> Collection[CapturedStep]:
        """Graphs of steps with drafts."""

    def hold(self, step: StepShape) -> bool:
        """Return whether any graph can run a step of this shape, and so every smaller step."""

    def launch(
        self, requests: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> OverlappedStep:
        """Launch the forward pass of the scheduled requests with the smallest graph that fits; return the step.

        The caller must let the step land.

        Args:
            draft_distributions: As in `Step`.
        """

    def fitting(self, requests: Sequence[RunningRequest], shape: StepShape | None = None) -> CapturedStep | None:
        """Return the graph with this `shape`, or by default the smallest that fits the requests; None if none fits."""
