from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_mamba_cache.policy.eviction import CachedEntry
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.state_lineage import StateLineage


def lost(lineage: StateLineage, block: int, *cached: int) -> int:
    return lineage.entry(BlockId(block), {BlockId(other) for other in cached}, is_end=True).lost_tokens


def chain(*num_tokens: int) -> StateLineage:
    """Return states at blocks 0, 1, ..., each after the one before it."""
    lineage = StateLineage()
    for block, tokens in enumerate(num_tokens):
        lineage.add(BlockId(block), tokens, BlockId(block - 1) if block else None, 0)
    return lineage


def test_dropping_the_only_state_loses_all_its_tokens() -> None:
    assert lost(chain(40), 0, 0) == 40


def test_lost_tokens_are_counted_from_the_nearest_earlier_state() -> None:
    lineage = chain(10, 25, 60)
    assert [lost(lineage, 2, *cached) for cached in [(0, 1, 2), (0, 2), (2,)]] == [35, 50, 60]


def test_state_cached_between_two_others_reduces_lost_tokens_once_linked() -> None:
    lineage = chain(10, 60)
    lineage.add(BlockId(7), 40, BlockId(0), 1)
    assert lost(lineage, 1, 0, 1, 7) == 50
    lineage.relink(BlockId(1), BlockId(7))
    assert lost(lineage, 1, 0, 1, 7) == 20


def test_state_entry_counts_continuations_and_branch_hits() -> None:
    lineage = chain(10)
    for block in (1, 2):
        lineage.add(BlockId(block), 20, BlockId(0), 0)
    lineage.count_branch_hit(BlockId(0))
    entry = lineage.entry(BlockId(0), {BlockId(0)}, is_end=False)
    assert entry == CachedEntry(num_tokens=10, lost_tokens=10, num_branch_hits=1, num_continuations=2, is_end=False)


def test_state_cached_again_on_a_block_starts_without_hits() -> None:
    lineage = chain(10)
    lineage.count_branch_hit(BlockId(0))
    lineage.add(BlockId(0), 10, None, 0)
    assert lineage.entry(BlockId(0), set(), is_end=True).num_branch_hits == 0


def prompt_ends(lineage: StateLineage, *cached: int) -> list[int]:
    """Return the cached states that end a prompt."""
    return [
        block
        for block in cached
        if lineage.entry(BlockId(block), {BlockId(other) for other in cached}, is_end=False).ends_prompt
    ]


def test_only_the_newest_prompt_of_a_text_marks_a_prompt_end() -> None:
    lineage, path = chain(10, 25, 60, 80), [BlockId(block) for block in range(4)]
    for prompt_len, end in ((9, []), (25, [1]), (79, [2]), (100, [3]), (30, [1])):
        lineage.mark_prompt_end(path, prompt_len)
        assert prompt_ends(lineage, *path) == end


def test_dropped_prompt_end_passes_its_mark_to_the_state_before_it() -> None:
    lineage = chain(10, 25, 60)
    lineage.mark_prompt_end([BlockId(0), BlockId(1), BlockId(2)], 60)
    assert lineage.pass_prompt_end_on(BlockId(1), {BlockId(0), BlockId(2)}) is None  # it ends no prompt
    assert lineage.pass_prompt_end_on(BlockId(2), {BlockId(0)}) == 0
    assert prompt_ends(lineage, 0) == [0]
    assert lineage.pass_prompt_end_on(BlockId(0), set()) is None


def test_state_cached_again_on_a_block_is_not_a_prompt_end() -> None:
    lineage = chain(10)
    lineage.mark_prompt_end([BlockId(0)], 10)
    lineage.add(BlockId(0), 10, None, 0)
    assert prompt_ends(lineage, 0) == []


class LineageMachine(RuleBasedStateMachine):
    """States are added and dropped at the blocks of a tree; the model searches all ancestors for the nearest state."""

    numbers = st.integers(0, 30)

    def __init__(self) -> None:
        super().__init__()
        self.lineage = StateLineage()
        self.parents: list[int | None] = []
        self.cached: set[BlockId] = set()

    def _path(self, block: int) -> list[BlockId]:
        path, at = [], block
        while at is not None:
            path.append(BlockId(at))
            at = self.parents[at]
        return path[::-1]

    def _before(self, block: int) -> BlockId | None:
        states = [other for other in self._path(block)[:-1] if other in self.cached]
        return states[-1] if states else None

    def _true_loss(self, block: int) -> int:
        before = self._before(block)
        return 10 * (len(self._path(block)) - (0 if before is None else len(self._path(before))))

    @rule(number=numbers)
    def grow(self, number: int) -> None:
        self.parents.append(number % len(self.parents) if self.parents and number % 5 else None)

    @precondition(lambda self: len(self.cached) < len(self.parents))
    @rule(number=numbers)
    def publish(self, number: int) -> None:
        absent = [block for block in range(len(self.parents)) if block not in self.cached]
        block = BlockId(absent[number % len(absent)])
        self.lineage.add(block, 10 * len(self._path(block)), self._before(block), 0)
        self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(number=numbers)
    def evict(self, number: int) -> None:
        block = sorted(self.cached)[number % len(self.cached)]
        ended_prompt = block in prompt_ends(self.lineage, *self.cached)
        self.cached.remove(block)
        heir = self.lineage.pass_prompt_end_on(block, self.cached)
        assert heir is None or heir in self._path(block)[:-1]
        assert (heir in prompt_ends(self.lineage, *self.cached)) == (ended_prompt and heir is not None)

    @precondition(lambda self: self.parents)
    @rule(number=numbers)
    def walk(self, number: int) -> None:
        states = [block for block in self._path(number % len(self.parents)) if block in self.cached]
        for before, block in pairwise(states):
            self.lineage.relink(block, before)
        self.lineage.mark_prompt_end(states, 10 * number)
        assert (
            prompt_ends(self.lineage, *states)
            == [block for block in states if 10 * len(self._path(block)) <= 10 * number][-1:]
        )
        for block in states:
            assert lost(self.lineage, block, *self.cached) == self._true_loss(block)

    @invariant()
    def a_cost_is_never_too_low(self) -> None:
        for block in self.cached:
            assert self._true_loss(block) <= lost(self.lineage, block, *self.cached) <= 10 * len(self._path(block))


TestLineageAgainstModel = LineageMachine.TestCase
TestLineageAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
