"""One memory for the outputs of graphs, which are replayed one after another."""

from collections.abc import Sequence

from torch import Tensor

from .shapes import StepShape


class OutputMemory:
    """What the forward of the latest graph computed: logits, or on a stage but the last hidden states.

    Logits of 259 tokens of 131,072 take 65 MiB, which each graph would keep for itself otherwise; copying them takes
    less than a thousandth of a step.

    Args:
        shapes: The shapes of all graphs.
    """

    def __init__(self, shapes: Sequence[StepShape]) -> None:
        self._memory: Tensor | None = None
        self._most_logits = max((shape.num_logits for shape in shapes), default=0)
        self._most_tokens = max((shape.num_tokens for shape in shapes), default=0)

    def keep(self, output: Tensor, shape: StepShape) -> Tensor:
        """Return a copy of what the graph of a shape computed, at the same address each time.

        The first shape has the most tokens, so that if all of its tokens have logits, no other has more of either.

        Args:
            output: One row for each token whose logits are computed, or for each token.
        """
        if self._memory is None:
            has_all = output.numel() // output.shape[-1] != shape.num_logits
            most = self._most_tokens if has_all else self._most_logits
            self._memory = output.new_empty(most * output.shape[-1])
        kept = self._memory[: output.numel()].view(output.shape)
        return kept.copy_(output)

    @property
    def num_bytes(self) -> int:
        """Device memory that it takes."""
        return 0 if self._memory is None else self._memory.nbytes
