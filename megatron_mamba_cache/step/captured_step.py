"""Steps that a CUDA graph computes, as contexts and runners see them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..policy.requests import RunningRequest
from .batch import StepBatch
from .logits import Draws
from .shapes import StepShape


class CapturedStep(Protocol):
    """A step of a fixed shape that a replay computes."""

    shape: StepShape
    wanted_outputs: Tensor

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Send the rows of a step that fits the shape, and begin to compute it; return it as its readers see it.

        Its states may be written from now on: the step is computed next, or its rows are dropped.
        """

    def forward(self) -> Tensor:
        """Compute the logits of the step that was laid out last; those of padding are meaningless."""

    @property
    def can_verify(self) -> bool:
        """False once the graph is freed, unless the outcome is known; the caller then computes it from the logits."""

    def verify(self, draws: Draws) -> Tensor:
        """After `forward`, draw tokens, verify, and copy reached boundary states; return [rows, 2 + K].

        The caller may bar tokens in the logits before.

        Args:
            draws: A way that draws for all rows.
        """

    def adopt(self, outcome: Tensor) -> None:
        """Take the outcome of the step that was laid out last, [rows, 2 + K], which `verify` did not compute."""

    def can_launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """Return whether the step after the one laid out last depends on nothing but the tokens of that one.

        False if rows of that one have drafts.

        Args:
            tokens: [rows] the new tokens; None while they are unknown, so that rows which end are computed too.
        """

    def launch_next(self, rows: Sequence[RunningRequest]) -> "EarlyStep":
        """Launch that step, fed with the tokens on the device; return it, which has to land."""


class EarlyStep(CapturedStep, Protocol):
    """A step launched before its rows reach it; `schedule` and `lay_out` are given those of them that are left."""

    def schedule(self, rows: Sequence[RunningRequest]) -> list[Tensor | None]:
        """Schedule what was launched for each row; return what its drafts were drawn from, see `Step`."""

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any of the tokens that its rows were fed, [rows], may end its row."""

    def is_of(self, rows: Sequence[RunningRequest]) -> bool:
        """Return whether these rows are exactly those that were launched."""

    def leave_graph(self) -> None:
        """Copy the results, which are complete, before the graph is freed."""

    def leave_buffers(self) -> None:
        """Copy what its outcome depends on, if that is not launched, before its buffers are written again."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What a capture produced; `num_bytes` is the device memory that the graphs hold."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class CapturedWeights(Protocol):
    """The addresses at which graphs read the model's weights."""

    def first_change(self, now: Any) -> str | None:
        """Return the first weight that is no longer where the graphs read it, None if all are in place."""


class GraphsByShape(Protocol):
    """The captured steps over one memory and one set of weight addresses."""

    @property
    def capture(self) -> Capture:
        """What the capture produced."""

    @property
    def weights(self) -> CapturedWeights:
        """The addresses at which the graphs read the weights."""

    @property
    def shapes(self) -> Collection[StepShape]:
        """The shapes of the captured steps."""

    def hold(self, step: StepShape) -> bool:
        """Return whether there is a captured step for every step that another shape holds."""

    def launch(self, rows: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]) -> EarlyStep:
        """Send the scheduled rows of a step, see `hold`, and launch its forward; return it, which has to land.

        Args:
            draft_distributions: See `Step`.
        """

    def fitting(self, rows: Sequence[RunningRequest], shape: StepShape | None = None) -> CapturedStep | None:
        """Return the captured step of a shape, by default the smallest that holds a step's rows; None if none does."""


def draft_budget(
    rows: Sequence[RunningRequest], budget: int, graphs: GraphsByShape | None, shape: StepShape | None
) -> int:
    """Return how many drafts the rows of a step may have in all, before any is scheduled.

    Beside prompts, a captured step has no room for drafts. What they would gain is less than what the step would lose:
    the host launches it in two to eight times the time of the GPU.

    Args:
        budget: What the step has room for.
        shape: That ranks agreed on; None if this one steps by itself.
    """
    step = StepShape.of(rows)
    has_graph = step.num_prefill_rows > 0 and graphs is not None and graphs.hold(step)
    return 0 if has_graph or (shape is not None and shape.width == 1) else budget
