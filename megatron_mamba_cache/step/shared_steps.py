"""Agreement of expert-parallel ranks on the shape of each step, and on overlapping it.

MoE layers exchange the same number of tokens on every rank, so all ranks compute a step in one shape: the smallest that
holds each rank's requests. A rank without requests computes padding. Ranks agree without waiting for the device, at one
of two times:

- While the device computes a step, each rank reports its number of requests, if it is sure that its next step only
  decodes. If all ranks are sure, the next shape is fixed. If it equals the current shape, each rank that can launch the
  next step early does so; the other ranks then owe this step, that is, they must compute it.
- Otherwise, ranks agree on the next shape when each rank knows its requests for that step.

A rank whose step fails still completes its part (`Part`), because other ranks wait for it.
"""

from collections.abc import Callable, Collection
from enum import Enum

from ..policy.running_requests import RunningRequests
from ..policy.scheduler import QueueState
from ..ranks.group import ExpertPeers
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from .shapes import StepShape, smallest_holding
from .step import Step

NO_REQUESTS = StepShape(0)


class Part(Enum):
    """Progress of this rank in a step that expert-parallel ranks compute together."""

    COMPLETE = "no step is in progress; the ranks may have agreed on the next one"
    BEGUN = "the ranks have not agreed on the shape"
    AGREED = "the shape is agreed"
    LAUNCHED = "the forward pass is launched"


class StepSharing:
    """Agreement of ranks on the next step. This base class is for a rank that has all experts and decides alone."""

    is_shared = False
    """True if the experts are split across ranks."""
    is_owed = False
    """True if every rank must compute the next step, because at least one rank launches it early."""

    @property
    def is_fixed(self) -> bool:
        """True if the ranks have agreed on the shape of the next step, so that no request can join it."""
        return False

    def begin(self) -> None:
        """Record that this rank starts a step, which it must complete because other ranks wait for it."""

    def next_shape(self) -> StepShape | None:
        """Return the shape agreed for the next step; None on a single rank. May capture graphs again."""
        return None

    def note_launched(self) -> None:
        """Record that this rank has launched its forward pass."""

    def may_launch(self, step: Step, queue: QueueState, *, wants: bool, knows_tokens: bool) -> bool:
        """Return whether this rank launches the next step early; `wants` is True if it would do so on its own."""
        return wants

    def forget(self) -> None:
        """Discard the agreement on the next step, because all ranks have computed it or none will."""


class SharedSteps(StepSharing):
    """`StepSharing` for expert-parallel ranks, which exchange tokens in every step.

    Args:
        shapes: Function that returns the shapes of this rank's graphs, which are equal on all ranks.
        capture: Function that captures graphs; all ranks call it together.

    Attributes:
        padding_is_launched: True if this rank, which has no requests, has launched its part of the next step.
        wants_capture: True if this rank's graphs have to be captured again.
        present: Shape of the current step.
        part: Progress of this rank in the current step.
    """

    is_shared = True

    def __init__(
        self,
        peers: ExpertPeers,
        requests: RunningRequests,
        planner: DraftPlanner | NoDrafts,
        shapes: Callable[[], Collection[StepShape]],
        capture: Callable[[], None],
    ) -> None:
        self._peers = peers
        self._requests = requests
        self._planner = planner
        self._shapes = shapes
        self._capture = capture
        self.present = NO_REQUESTS
        self._fixed: StepShape | None = None
        self.padding_is_launched = False
        self.wants_capture = False
        self.part = Part.COMPLETE

    @property
    def is_fixed(self) -> bool:
        return self._fixed is not None

    def begin(self) -> None:
        self.part = Part.BEGUN

    def next_shape(self) -> StepShape:
        """Agree with the other ranks on the next shape; make it the current shape and return it."""
        fixed, self._fixed, self.is_owed = self._fixed, None, False
        self.present = computed_shape(fixed or self._agreed(), self._shapes())
        self._planner.together.agree(self.present.num_decode_requests, self.present.width - 1)
        self.part = Part.AGREED
        return self.present

    def note_launched(self) -> None:
        self.part = Part.LAUNCHED

    def _agreed(self) -> StepShape:
        """Return a shape into which each rank's requests fit; capture graphs first if any rank needs them."""
        decoding = self._requests.decoding
        prompt_tokens = [request.scheduled for request in self._requests.prefilling if request.scheduled]
        width = 1 if self._planner.stays_paused(decoding) else 1 + self._planner.max_drafts
        mine = (len(decoding), width, len(prompt_tokens), sum(prompt_tokens))
        captures, num_requests, width, *prefill = self._peers.greatest([int(self.wants_capture), *mine])
        if captures:
            self.wants_capture = False
            self._capture()
        return StepShape(num_requests, 1 if prefill[0] else width, *prefill)

    def may_launch(self, step: Step, queue: QueueState, *, wants: bool, knows_tokens: bool) -> bool:
        """Return whether this rank launches the next step; the ranks agree on it before tokens are read."""
        if knows_tokens:
            return False
        stays_paused = (
            not any(step.num_drafts)
            and len(step.requests) == len(self._requests)
            and self._planner.stays_paused(step.requests)
        )
        next_requests = StepShape(len(self._requests), 1 if stays_paused else 1 + self._planner.max_drafts)
        return self.agree_on_next(next_requests, queue, wants_overlap=wants) and wants

    def agree_on_next(self, next_requests: StepShape, queue: QueueState, *, wants_overlap: bool) -> bool:
        """Try to agree on the next step's shape; return whether every rank now must compute that step.

        Args:
            next_requests: Smallest shape that this rank's current requests fit in the next step.
            wants_overlap: True if this rank can launch the next step early.
        """
        ends_prefill = all(
            request.computed + request.scheduled >= request.spec.prompt_len for request in self._requests.prefilling
        )
        is_sure = queue.is_settled and not queue.has_waiting and not self.wants_capture and ends_prefill
        numbers = [not is_sure, wants_overlap, next_requests.num_decode_requests, next_requests.width]
        unsure, early, num_requests, width = self._peers.greatest([int(number) for number in numbers])
        self.part = Part.COMPLETE
        shapes = self._shapes()
        self._fixed = None if unsure else computed_shape(StepShape(num_requests, width), shapes)
        drafts_together = width > 1 and self._planner.together.exchanges_tokens  # after they have read their tokens
        self.is_owed = bool(early) and self._fixed == self.present and self.present in shapes and not drafts_together
        return self.is_owed

    def forget(self) -> None:
        self._fixed, self.is_owed, self.padding_is_launched = None, False, False
        self.part = Part.COMPLETE


def computed_shape(step: StepShape, shapes: Collection[StepShape]) -> StepShape:
    """Return the smallest of `shapes` that a step fits; if none fits, the step's shape, or one token if it is empty."""
    return smallest_holding(step, shapes) or (step if step.num_tokens else StepShape(1))
