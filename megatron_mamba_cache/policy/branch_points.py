"""Find where waiting requests part from one that is about to be admitted: a state there serves all of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nlargest

from .admission import PromptView
from .identifiers import BlockKey

LOOK_AHEAD = 32
"""How many requests after one in the queue are compared with it."""
MOST_BRANCH_POINTS = 4
"""States that one prompt keeps for waiting requests, besides those for itself."""


def branch_points(prompt: PromptView, others: Iterable[PromptView], block_size: int) -> tuple[int, ...]:
    """Return the boundaries of a prompt, ascending, from which others can start once their states are cached.

    Of more than `MOST_BRANCH_POINTS`, those that the most requests share are taken, the deepest first.
    """
    num_sharing: Counter[int] = Counter()
    for other in others:
        num_shared = num_common(prompt.keys, other.keys) if other.may_skip else 0
        if num_blocks := min(num_shared, (other.prompt_len - 1) // block_size):
            num_sharing[num_blocks * block_size] += 1
    most_shared = nlargest(MOST_BRANCH_POINTS, num_sharing, key=lambda position: (num_sharing[position], position))
    return tuple(sorted(most_shared))


def num_common(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Return how many leading blocks two prompts share; since keys are chained, one equal key means equal prefixes."""
    low, high = 0, min(len(keys), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
