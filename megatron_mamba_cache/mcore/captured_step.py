"""What a context asks of captured steps."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..policy.requests import RunningRequest
from ..state.padded_step import StepShape
from ..state.step_batch import StepBatch


class CapturedStep(Protocol):
    """A step of a fixed shape that is computed by replaying it."""

    shape: StepShape
    logits: Tensor
    wanted_outputs: Tensor

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Send the rows of a step that the shape holds; return it as its readers see it."""

    def forward(self) -> Tensor:
        """Compute the logits of the step that was laid out last; those of padding mean nothing."""

    def verify_greedily(self) -> Tensor:
        """Behind `forward`, verify against the best tokens and copy the states of reached boundaries; [rows, 2 + K]."""


class GraphsByShape(Protocol):
    """The captured steps over one memory."""

    def fitting(self, rows: Sequence[RunningRequest]) -> CapturedStep | None:
        """Return the smallest that holds the rows of a step, None if there is none."""
