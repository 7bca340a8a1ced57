"""Agreement of ranks that share experts on a step: its shape, and whether it is overlapped.

Their layers exchange the same number of tokens on every rank, so all compute each step in one shape: the smallest that
holds each rank's requests. A rank without requests computes padding. There are two rounds, which never wait for the
device:

- While the device computes a step, ranks agree on the next. A rank that is sure to decode only reports its number of
  requests. If all do, the next shape is fixed. If it is the present one, ranks that can launch the next step do so, and
  every rank owes it: it computes the next step before it waits.
- Otherwise ranks agree on the shape of the next step when each knows its requests.

A rank whose step fails still does what is left of its part (`Part`), or the others would wait for it.
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
    """Progress of a rank in a step that expert-parallel ranks compute together."""

    COMPLETE = "it has looked ahead"
    BEGUN = "nothing is agreed"
    AGREED = "the shape is agreed"
    LAUNCHED = "the forward is launched"


class StepSharing:
    """Agreement of ranks on the next step. In this base class the rank has all experts and decides alone."""

    is_shared = False
    """True if ranks share experts."""
    is_owed = False
    """True when ranks may have launched the next step already."""

    @property
    def is_fixed(self) -> bool:
        """True when the shape of the next step is agreed already: no request can join this rank's requests."""
        return False

    def begin(self) -> None:
        """Note that this rank starts a step and owes its part to the other ranks."""

    def next_shape(self) -> StepShape | None:
        """Return the shape in which all ranks compute the next step, None if there are no others; graphs may change."""
        return None

    def note_launched(self) -> None:
        """Note that this rank has launched its forward pass."""

    def may_launch(self, step: Step, queue: QueueState, *, wants: bool, knows_tokens: bool) -> bool:
        """Return whether this rank launches the step after this one; `wants` is what it would do alone."""
        return wants

    def forget(self) -> None:
        """Forget the next step, because all ranks have computed it or none will."""


class SharedSteps(StepSharing):
    """`StepSharing` of expert-parallel ranks.

    Args:
        shapes: Returns those of this rank's graphs, which are the other ranks' too.
        capture: Captures graphs, which all ranks do together.

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
        """Agree on the next shape, which becomes the current shape."""
        fixed, self._fixed, self.is_owed = self._fixed, None, False
        self.present = computed_shape(fixed or self._agreed(), self._shapes())
        self.part = Part.AGREED
        return self.present

    def note_launched(self) -> None:
        self.part = Part.LAUNCHED

    def _agreed(self) -> StepShape:
        """Return a shape that fits the requests of all ranks; capture graphs first if any rank wants to."""
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
        """Return True if all ranks launch the next step, on which they agree before tokens are read."""
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
        """Agree on the next step as far as possible; return whether it is owed.

        Args:
            next_requests: Shape that fits this rank's current requests in its next step.
            wants_overlap: True if this rank launches the next step if it is owed.
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
        self.is_owed = bool(early) and self._fixed == self.present and self.present in shapes
        return self.is_owed

    def forget(self) -> None:
        self._fixed, self.is_owed, self.padding_is_launched = None, False, False
        self.part = Part.COMPLETE


def computed_shape(step: StepShape, shapes: Collection[StepShape]) -> StepShape:
    """Return the smallest graph shape that fits a step, else the step's own shape, but never an empty one."""
    return smallest_holding(step, shapes) or (step if step.num_tokens else StepShape(1))
