"""Choose the prompt positions at which states are cached, and the end of each prefill chunk.

All positions are absolute token positions, counted from the start of the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """Rule for the boundaries at which prefill caches a state.

    Args:
        block_size: Number of tokens per KV block; every boundary is a multiple of it.
        stride: Distance in blocks between additional boundaries; None for no additional boundaries.
    """

    block_size: int
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, found {self.block_size}")
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"stride must be at least 1 block, found {self.stride}; use None for no stride")


def select_boundaries(
    rule: BoundaryRule, *, prompt_len: int, start: int, end: int, kv_match_end: int, branches: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the boundaries at which the prefill chunk from `start` to `end` caches a state, in ascending order.

    Args:
        kv_match_end: End position of the prompt's leading cached KV blocks; 0 if there are none.
        branches: Boundaries at which other prompts diverge from this prompt.

    Raises:
        ValueError: If the positions are out of order, or `kv_match_end` is not a boundary.
    """
    _check_positions(rule, prompt_len, start, end, kv_match_end)
    block = rule.block_size
    last = prompt_len // block * block
    candidates = {kv_match_end, last, *branches}
    if last == prompt_len:
        # A repeated prompt must compute at least one token, so it starts from the boundary one block earlier.
        candidates.add(prompt_len - block)
    if end < prompt_len:
        candidates.add(end)
    if rule.stride is not None:
        step = rule.stride * block
        candidates.update(range(start // step * step + step, end + 1, step))
    return tuple(sorted(p for p in candidates if start < p <= end and p % block == 0))


def prefill_chunk_end(*, start: int, prompt_len: int, budget: int, block_size: int, align: bool) -> int:
    """Return the position where a prefill chunk that starts at `start` ends.

    Args:
        budget: Number of tokens that this step may still compute.
        align: True to end at the last boundary within the budget, so that the chunk's end state can be cached.

    Raises:
        ValueError: If no prompt tokens remain to be computed, or the budget is below 1.
    """
    if not 0 <= start < prompt_len:
        raise ValueError(f"start must be between 0 and {prompt_len - 1}, found {start}")
    if budget < 1 or block_size < 1:
        raise ValueError(f"budget and block_size must be at least 1 token, found {budget} and {block_size}")
    end = min(start + budget, prompt_len)
    if end == prompt_len or not align:
        return end
    boundary = end // block_size * block_size
    return boundary if boundary > start else end


def _check_positions(rule: BoundaryRule, prompt_len: int, start: int, end: int, kv_match_end: int) -> None:
    if not 0 <= start <= end <= prompt_len:
        raise ValueError(f"positions must satisfy 0 <= start <= end <= prompt_len, found {start}, {end}, {prompt_len}")
    if not 0 <= kv_match_end <= prompt_len or kv_match_end % rule.block_size:
        raise ValueError(
            f"kv_match_end must be a multiple of {rule.block_size} and at most {prompt_len}, found {kv_match_end}"
        )
