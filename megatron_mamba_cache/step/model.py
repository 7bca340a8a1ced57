"""What a step needs of the model that computes it."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from .weight_places import WeightPlaces


class StepModel(Protocol):
    """A model, or one pipeline stage of it, that reads from its context the step that the runner shows."""

    def compute_step(self) -> Tensor:
        """Return the last stage's logits, [1, n, vocab]; on another, the hidden states [tokens, 1, hidden] it sent."""

    def compute_part(self) -> Tensor:
        """Do as `compute_step`, without transfers from and to other stages: `receive` and `send` make them."""

    def receive(self, num_tokens: int) -> None:
        """Write the previous stage's hidden states to where `compute_part` reads; do nothing on the first stage."""

    def send(self, output: Tensor) -> None:
        """Send what `compute_part` returned to the next stage; do nothing on the last one."""

    def logits_of(self, hidden_states: Tensor) -> Tensor:
        """Return the logits, [n, vocab], of the last layer's outputs, [n, hidden]; on the last stage only."""

    def resuming_exchanges(self) -> AbstractContextManager[bool]:
        """Let an eager forward in the block skip the exchanges with other ranks' experts that a failed one made.

        The block gets whether there are any.
        """

    def weight_places(self) -> WeightPlaces:
        """Return where the weights are now, without waiting for the device."""

    def tables_read(self) -> AbstractContextManager[list[Tensor]]:
        """Collect the tensors beside weights that forwards in the block read, to keep them from being freed."""
