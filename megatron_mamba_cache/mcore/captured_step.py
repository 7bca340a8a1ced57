"""What a context asks of captured steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..policy.requests import RunningRequest
from ..step.batch import StepBatch
from ..step.shapes import StepShape
from .weight_places import WeightPlaces


class CapturedStep(Protocol):
    """A step of a fixed shape that is computed by replaying it."""

    shape: StepShape
    wanted_outputs: Tensor

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Send the rows of a step that the shape holds; return it as its readers see it."""

    def forward(self) -> Tensor:
        """Compute the logits of the step that was laid out last; those of padding mean nothing."""

    def verify_greedily(self) -> Tensor:
        """Behind `forward`, verify against the best tokens and copy the states of reached boundaries; [rows, 2 + K]."""

    def launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> "EarlyStep | None":
        """Launch the step behind the one laid out last, fed what that one finds.

        Args:
            tokens: [rows] what it found; None if that is not known yet, so that rows which end are computed on.

        Returns:
            That step, to be landed; None, with nothing launched, if more than its tokens is open.
        """


class EarlyStep(CapturedStep, Protocol):
    """One that is launched before its rows have come to it: laying it out says which of them are left."""

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Whether one of the tokens that its rows were fed, [rows], ends its row."""

    def is_of(self, rows: Sequence[RunningRequest]) -> bool:
        """Whether these rows are those that were launched, all of them and no other."""

    def leave_graph(self) -> None:
        """Keep the results, which are there, when the graph goes."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What capturing took; bytes are the device's that the graphs hold."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class GraphsByShape(Protocol):
    """The captured steps over one memory and one place of the weights."""

    capture: Capture
    weights: WeightPlaces

    def fitting(self, rows: Sequence[RunningRequest]) -> CapturedStep | None:
        """Return the smallest that holds the rows of a step, None if there is none."""
