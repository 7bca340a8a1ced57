"""How many tokens of a prompt a step computes beside rows that decode: as many as take a certain time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CHUNKS_A_STATE = 16


def _any_number(num_decoding: int) -> Sequence[int]:
    return ()


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The most prompt tokens of a step in which rows decode, which are the fewer the longer the history before them.

    A token's attention reads all tokens before it, so that the same number of tokens takes longer at the end of a long
    prompt than at its beginning. Rows beside it are to wait equally long, so tokens count for more there.

    Args:
        most_tokens: Most of them without a history.
        attention_share: What attention to one token of history costs a token, over the cost of everything else.
        filling: Returns for a number of decode rows which numbers of prompt tokens fill a captured step, ascending.
    """

    most_tokens: int
    attention_share: float = 0.0
    filling: Callable[[int], Sequence[int]] = _any_number

    def cost(self, start: int, num_tokens: int) -> float:
        """Return how many tokens without a history cost as much as some that begin at a position."""
        return num_tokens * (1.0 + start * self.attention_share)

    def keeps_state(self, start: int, num_tokens: int) -> bool:
        """Return whether a chunk is to end on a boundary, so that its end state can be cached, as one in so many is."""
        apart = _CHUNKS_A_STATE * self.most_tokens
        return start // apart < (start + num_tokens) // apart

    def chunk(self, start: int, remaining: int, left: float, *, num_decoding: int, num_before: int) -> int:
        """Return how many tokens of a prompt a step takes, at least one.

        They fill a captured step if that takes at least half as many as fit: padding takes time as well.

        Args:
            start: Where they begin.
            remaining: Tokens of the prompt from there on.
            left: What they may cost, as `cost` counts it; at least 1.
            num_decoding: Rows that decode in the step.
            num_before: Tokens of other prompts in the step.
        """
        fitting = max(1, int(left / self.cost(start, 1)))
        if remaining <= fitting:
            return remaining
        full = max((size for size in self.filling(num_decoding) if size <= num_before + fitting), default=0)
        filling = full - num_before
        return filling if 2 * filling >= fitting else fitting
