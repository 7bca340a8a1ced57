"""Links between the cached states of each text, keyed by KV block; eviction priorities depend on them."""

from collections.abc import Container, Sequence

from .eviction import CachedEntry
from .identifiers import BlockId

_ROOT = BlockId(-1)


class StateLineage:
    """For each cached state: its previous state, its branch hits and continuations, and if it ends a prompt.

    The record of a dropped state still links the states after it to those before it: a block's ancestors stay
    registered as long as the block, so their numbers are not reused. If a state is published between two others, the
    later one is linked to it only by `relink`; until then, the cost of losing the later state is overestimated.
    """

    def __init__(self) -> None:
        self._num_tokens: list[int] = []
        self._anchors: list[BlockId] = []  # block of the previous state, which may have been dropped
        self._num_branch_hits: list[int] = []
        self._num_continuations: list[int] = []
        self._ends_prompt: list[bool] = []

    def add(self, block: BlockId, num_tokens: int, anchor: BlockId | None, num_continuations: int) -> None:
        """Record a state at the end of a block.

        Args:
            num_tokens: Number of tokens from the start of the text to the end of the block.
            anchor: Block of the previous state; None if there is none.
            num_continuations: Number of texts that are known to continue after the state.
        """
        self._make_room(block)
        self._num_tokens[block] = num_tokens
        self._anchors[block] = _ROOT if anchor is None else anchor
        self._num_branch_hits[block] = 0
        self._num_continuations[block] = num_continuations
        self._ends_prompt[block] = False
        if anchor is not None:
            self._num_continuations[anchor] += 1

    def mark_prompt_end(self, path: Sequence[BlockId], prompt_len: int) -> None:
        """Mark the last state within the newest prompt as the prompt's end.

        Args:
            path: Blocks of the text that have a state, in order.
        """
        last = None
        for block in path:
            self._ends_prompt[block] = False
            if self._num_tokens[block] <= prompt_len:
                last = block
        if last is not None:
            self._ends_prompt[last] = True

    def pass_prompt_end_on(self, block: BlockId, cached: Container[BlockId]) -> BlockId | None:
        """If a dropped state was marked as a prompt's end, mark the previous state and return its block; else None."""
        if not self._ends_prompt[block]:
            return None
        self._ends_prompt[block] = False
        self._tokens_before(block, cached)  # updates the anchor
        anchor = self._anchors[block]
        if anchor not in cached:
            return None
        self._ends_prompt[anchor] = True
        return anchor

    def count_branch_hit(self, block: BlockId) -> None:
        """Count a request that resumes from this block's state and diverges from the cached text after it."""
        self._num_branch_hits[block] += 1

    def relink(self, block: BlockId, anchor: BlockId) -> None:
        """Link the block's state to its previous state, at the end of the block `anchor`."""
        self._anchors[block] = anchor

    def num_tokens(self, block: BlockId) -> int:
        """Return the number of tokens from the start of the text to the end of the block."""
        return self._num_tokens[block]

    def is_anchor_kept(self, block: int, cached: Container[BlockId]) -> bool:
        """Return False if the previous state has been dropped, so that losing this state costs more than before."""
        anchor = self._anchors[block]
        return anchor == _ROOT or anchor in cached

    def entry(self, block: BlockId, cached: Container[BlockId], *, is_end: bool) -> CachedEntry:
        """Return the properties from which the weight of the block's state is computed.

        Args:
            cached: Blocks that have a state.
            is_end: True if no block is cached after this one.
        """
        num_tokens = self._num_tokens[block]
        num_before = 0 if self._anchors[block] == _ROOT else self._tokens_before(block, cached)
        return CachedEntry(
            num_tokens,
            num_tokens - num_before,
            self._num_branch_hits[block],
            self._num_continuations[block],
            is_end,
            self._ends_prompt[block],
        )

    def clear(self) -> None:
        """Forget all states."""
        self._num_tokens.clear()
        self._anchors.clear()
        self._num_branch_hits.clear()
        self._num_continuations.clear()
        self._ends_prompt.clear()

    def _tokens_before(self, block: BlockId, cached: Container[BlockId]) -> int:
        """Return the number of tokens up to the nearest earlier cached state, and link the block directly to it."""
        anchor, end = self._anchors[block], self._num_tokens[block]
        # Positions must decrease along the path, so the loop ends even if states were linked in another order.
        while anchor != _ROOT and anchor not in cached and self._num_tokens[anchor] < end:
            anchor, end = self._anchors[anchor], self._num_tokens[anchor]
        self._anchors[block] = anchor
        return 0 if anchor == _ROOT else min(self._num_tokens[anchor], self._num_tokens[block])

    def _make_room(self, block: BlockId) -> None:
        missing = block + 1 - len(self._num_tokens)
        if missing > 0:
            self._num_tokens += [0] * missing
            self._anchors += [_ROOT] * missing
            self._num_branch_hits += [0] * missing
            self._num_continuations += [0] * missing
            self._ends_prompt += [False] * missing
