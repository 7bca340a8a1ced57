"""Launch the next step before the host has processed this one, so that the GPU computes while the host works.

The next step can be launched at three points (see `docs/overlapped-steps.md` for the rules):

- `may_overlap`: before or after the host reads this step's tokens, which the GPU copies to the next step's inputs.
  Every request decodes one more token without drafts, and no request can join. If the host masks or changes a request's
  logits, only the forward pass is launched; when the step lands, tokens are sampled and boundary states are copied.
- `may_follow`: before the host reads this step's outcome, if a drafter can draft from it on the device. Every request
  has as many drafts as in this step, and no request can join.
- `may_launch_drafts`: after this step has landed, before it is reported. No request has ended, and none can join.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ..policy.prefix_cache import PrefixCache
from ..policy.requests import RunningRequest
from ..policy.running_requests import RunningRequests
from ..policy.scheduler import QueueState
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from .logits import any_masked
from .overlapped_step import CapturedStep, GraphsByShape, OverlappedStep
from .shapes import StepShape
from .shared_steps import StepSharing
from .step import Step


def may_overlap(
    step: Step,
    graph: CapturedStep | None,
    num_running: int,
    queue: QueueState,
    planner: DraftPlanner | NoDrafts,
    tokens: Sequence[int] | None,
    cache: PrefixCache,
    *,
    is_wanted: bool,
) -> bool:
    """Return whether the next step may be launched now, without drafts.

    Args:
        graph: The step's graph if its outcome can feed the next step, otherwise None; see `Step.feeding_graph`.
        num_running: Number of running requests, including paused requests.
        is_wanted: True if the configuration enables overlapped steps.
        tokens: [requests] the step's tokens; None until they are read. With None, a request that waits for memory
            prevents the launch, because it could join only one step later.
    """
    return (
        is_wanted
        and graph is not None
        and queue.is_settled
        and (tokens is not None or not queue.has_waiting)
        and len(step.requests) == num_running
        and planner.stays_paused(step.requests)
        and graph.can_launch_next(step.requests, tokens)
        and _may_cross(step.requests, queue, cache)
    )


def _may_cross(requests: Sequence[RunningRequest], queue: QueueState, cache: PrefixCache) -> bool:
    """Return whether blocks that requests start or complete in the next step may be assigned before this step lands.

    This is True if there are no such blocks. Otherwise it is False while a request waits, because a published block
    could make room for it. It is also False if the block size is 1, or if too few blocks are available.
    """
    edges = cache.at_edges(requests)
    return not edges or not (queue.has_waiting or cache.block_size == 1 or len(edges) > cache.kv.num_available)


def may_launch_drafts(
    step: Step,
    running: Sequence[RunningRequest],
    queue: QueueState,
    planner: DraftPlanner | NoDrafts,
    block_size: int,
    *,
    is_wanted: bool,
) -> bool:
    """Return whether the next step may be launched with drafts after this step has landed.

    While a request waits, no running request may reach a boundary in this step or the next, because blocks published
    there may make room for the waiting request.

    Args:
        running: Running requests, including paused requests.
        is_wanted: True if the configuration enables overlapped steps.
    """
    most = 1 + planner.max_drafts

    def is_near_boundary(request: RunningRequest) -> bool:
        offset = request.computed % block_size
        return offset < request.cursor.accepted or offset + most >= block_size

    return (
        is_wanted
        and most > 1
        and step.graph is not None
        and not step.num_prefill_requests
        and queue.is_settled
        and step.requests == tuple(running)
        and not any(request.is_paused or (queue.has_waiting and is_near_boundary(request)) for request in step.requests)
    )


def may_follow(
    step: Step, graph: CapturedStep, num_running: int, queue: QueueState, cache: PrefixCache, *, is_wanted: bool
) -> bool:
    """Return whether the next step may be launched with drafts before the outcome of this step is read.

    No request may join or be known to end, and the host must not change, mask or score any logits.

    Args:
        graph: The step's graph, whose outcome can feed the next step; see `Step.feeding_graph`.
        num_running, is_wanted: As in `may_overlap`.
    """
    requests, logits = step.requests, step.batch.logits
    return (
        is_wanted
        and not step.has_one_token_each
        and queue.is_settled
        and not queue.has_waiting
        and len(requests) == num_running
        and graph.can_follow(requests)
        and not (logits.any_changed or logits.any_scored or any_masked(requests))
        and cache.can_follow(requests)
    )


class OverlappedSteps:
    """Launches the next step early if the configuration and the rules allow it; holds it until its tokens are read."""

    def __init__(
        self,
        requests: RunningRequests,
        planner: DraftPlanner | NoDrafts,
        queue: QueueState,
        sharing: StepSharing,
        *,
        is_wanted: bool,
    ) -> None:
        self._requests = requests
        self._planner = planner
        self._queue = queue
        self._sharing = sharing
        self._is_wanted = is_wanted
        self.launched: OverlappedStep | None = None
        """The overlapped step that has not landed, if there is one."""

    def launch_next(self, step: Step, tokens: Sequence[int] | None = None) -> None:
        """Launch the step after this captured step if `may_overlap` allows it and it is not launched yet.

        Args:
            tokens: [requests] new tokens of the step; None until they are read.
        """
        if self.launched is not None or (tokens is None and self._follow(step)):
            return
        graph, queue, requests, is_wanted = step.feeding_graph, self._queue, self._requests, self._is_wanted
        wants = may_overlap(
            step, graph, len(requests), queue, self._planner, tokens, requests.cache, is_wanted=is_wanted
        )
        if self._sharing.may_launch(step, queue, wants=wants, knows_tokens=tokens is not None) and graph is not None:
            self.launch(graph, step.requests)

    def _follow(self, step: Step) -> bool:
        """Launch the step after this captured step with drafts, if `may_follow` allows it; return whether it did."""
        graph, requests, cache = step.feeding_graph, step.requests, self._requests.cache
        is_wanted = self._is_wanted and not self._sharing.is_shared
        if graph is None or not may_follow(step, graph, len(self._requests), self._queue, cache, is_wanted=is_wanted):
            return False
        captured = graph.captured if isinstance(graph, OverlappedStep) else graph
        drafter = self._planner.follower(requests)
        if drafter is None or not drafter.can_follow(captured):
            return False
        cache.reserve_followed(requests)
        self.launched = graph.launch_followed(requests, partial(drafter.follow, captured, requests))
        return True

    def may_launch_drafts(self, step: Step, graphs: GraphsByShape | None) -> bool:
        """Return whether `launch_drafts` may be called after this step; see the function `may_launch_drafts`."""
        running, planner, block_size = self._requests.oldest_first, self._planner, self._requests.cache.block_size
        is_wanted = self._is_wanted and self.launched is None and not self._sharing.is_shared
        if not may_launch_drafts(step, running, self._queue, planner, block_size, is_wanted=is_wanted):
            return False
        return graphs is not None and graphs.hold(StepShape(len(running), 1 + planner.max_drafts))

    def launch(self, graph: CapturedStep, requests: Sequence[RunningRequest]) -> None:
        """Reserve KV blocks and state slots for the next step of these requests, and launch it with the same graph."""
        self._requests.cache.reserve_ahead(requests)
        self.launched = graph.launch_next(requests)

    def launch_drafts(
        self, graphs: GraphsByShape, requests: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> None:
        """Launch a step with drafts for scheduled requests, and clear their schedule until the step lands."""
        self.launched = graphs.launch(requests, draft_distributions)
        for request in requests:
            request.schedule(0)

    def take(self) -> OverlappedStep | None:
        """Remove and return the overlapped step, so that it can land; None if there is none."""
        step, self.launched = self.launched, None
        return step

    def refuse_requests(self) -> None:
        """Raise `RuntimeError` if a step has been launched, because no request can join it any more."""
        if self.launched is not None:
            raise RuntimeError(
                "the next step is already running, and no request can join it; admit requests through the engine, or "
                "set CacheConfig(run_ahead=False)"
            )

    def leave_graph(self) -> None:
        """Copy the overlapped step's results, so that its graph can be freed."""
        if self.launched is not None:
            self.launched.leave_graph()

    def wait(self) -> None:
        """Wait for the overlapped step, so that its buffers or memory can be reused."""
        if self.launched is not None:
            self.launched.wait()

    def drop(self) -> None:
        """Wait for the overlapped step and discard it, because all its requests have left."""
        self.wait()
        self.launched = None
