"""The KV block pool: reference counts, lookup by key, and eviction."""

from collections.abc import Sequence
from typing import cast

from ..errors import CacheCapacityError, CacheIntegrityError
from .block_tree import BlockTree
from .identifiers import BlockId, BlockKey
from .index_pools import FixedIndexPool, IndexPool
from .slot_pool import SlotPool


class KVBlockPool:
    """Pool of KV blocks. A block is free, referenced, or cached (registered under a key, without references).

    Registered blocks form trees along their sequences. A request that holds a block also holds its ancestors. A block
    without a reference stays as long as a state at its end or later can resume it, and leaves with the last such state,
    leaves first.

    Args:
        indices: Index pool of the blocks, or the number of blocks of a pool of its own.
        states: The states for which blocks are kept.
        block_size: Tokens of a block.

    Raises:
        ValueError: If a size is out of range.
    """

    def __init__(self, indices: IndexPool | int, states: SlotPool, *, block_size: int = 1) -> None:
        if (isinstance(indices, int) and indices < 0) or block_size < 1:
            raise ValueError(f"need num_blocks >= 0 and block_size >= 1, found {indices} and {block_size}")
        self._indices = FixedIndexPool(indices) if isinstance(indices, int) else indices
        self._states = states
        self._slot_by_block = states.slot_by_block
        self._block_size = block_size
        self._refs = [0] * self._indices.num_indices
        self._tree = BlockTree(self._indices.num_indices)
        self.num_blocks = self._indices.num_indices
        self.num_referenced = 0
        """Blocks with references."""
        self.num_cached = 0
        """Registered blocks without references."""
        tree = self._tree
        self.find, self.longest_match, self.key_of, self.depth = tree.find, tree.longest_match, tree.key_of, tree.depth
        self.parent_of, self.num_children, self.is_end = tree.parent_of, tree.num_children, tree.is_leaf
        """Look up registered blocks, as the methods of `BlockTree` do."""

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated without an eviction."""
        return self._indices.num_free

    @property
    def num_available(self) -> int:
        """Maximum number of blocks that `allocate` can return now."""
        return self._indices.num_available

    def count_by_kind(self) -> dict[str, int]:
        """Return how many blocks are free, cached and in use."""
        return {"free": self.num_free, "cached": self.num_cached, "in_use": self.num_referenced}

    def num_refs(self, block: BlockId) -> int:
        """Return the reference count of the block."""
        return self._refs[block]

    def unreferenced(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Return which of the distinct cached blocks have no reference."""
        return [block for block in blocks if not self._refs[block]]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Return blocks with one reference each; evict the states of lowest priority if too few blocks are free.

        Raises:
            CacheCapacityError: If fewer blocks are available; nothing is changed then.
        """
        if num_blocks < 0:
            raise ValueError(f"need a count of blocks, found {num_blocks}")
        if self._indices.num_free < num_blocks:
            self._make_room(num_blocks)
        blocks = cast("list[BlockId]", self._indices.take(num_blocks))
        for block in blocks:
            self._refs[block] = 1
        self.num_referenced += num_blocks
        return blocks

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each block; raise `CacheIntegrityError` and change nothing if a block is free."""
        self._require_ids(blocks)
        free = self._tree.unregistered(blocks, self._refs)
        if free:
            raise CacheIntegrityError(f"need a referenced or cached block to acquire, found block {free[0]} free")
        self._add_references(blocks)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference on each block; registered blocks from which a state can resume stay cached.

        Raises:
            CacheIntegrityError: If a block is listed more often than it has references; nothing is changed then.
        """
        self._require_ids(blocks)
        self._file_all(self._drop_references(blocks))

    def prune(self, block: BlockId) -> int:
        """Forget a block and its ancestors without references, followers or states; return how many became free."""
        tail = self._tree.tail(block, self._refs, self._slot_by_block)
        if not tail:
            return 0
        end = self._tree.remove_tail(tail)
        for leaving in tail:
            self._indices.release(leaving)
        self.num_cached -= len(tail)
        if end is not None and self.is_end(end):
            self._states.note_end(end)
        return len(tail)

    def register(self, block: BlockId, key: BlockKey, parent: BlockId | None) -> BlockId:
        """Register a held block under its key; return the block that the caller now holds for that key.

        If another block has the key already, the caller's reference moves there: that block is acquired and `block`
        released. Registering a block again under its own key changes nothing.

        Args:
            parent: The block registered under the preceding key, which the caller holds too; None for a first block.

        Raises:
            ValueError: If the key is not positive.
            CacheIntegrityError: If the block is not held or has another key, or `parent` is wrong.
        """
        self._require_registrable(block, key, parent)
        known = self._tree.find(key)
        if known is None:
            self._tree.add(block, key, parent)
        if known is None or known == block:
            return block
        self._add_references([known])
        self._file_all(self._drop_references([block]))
        return known

    def flush(self) -> None:
        """Forget all keys and states: cached blocks become free, held blocks unregistered."""
        registered = self._tree.blocks()
        self._tree.clear()
        self.num_cached = 0
        for block in registered:
            self._states.drop(block)
            if not self._refs[block]:
                self._indices.release(block)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError, naming the failed equation, unless all invariants of the pool hold. O(n)."""
        self._tree.check_integrity()
        self._check_counts()
        self._check_references()

    def _make_room(self, num_blocks: int) -> None:
        """Evict until `num_blocks` blocks are free; raises as `allocate` does."""
        indices = self._indices
        if num_blocks > indices.num_available:
            num_evictable = self.num_available - self.num_free
            raise CacheCapacityError(
                f"need {num_blocks} KV blocks, {self.num_free} free and {num_evictable} evictable; "
                "raise --cache-gb, or --inference-dynamic-batching-buffer-size-gb if that is set"
            )
        is_end = not indices.is_shared
        while indices.num_free < num_blocks:
            self._states.evict(is_end=is_end)

    def _add_references(self, blocks: Sequence[BlockId]) -> None:
        refs, unreferenced = self._refs, []
        for block in blocks:
            if not refs[block]:
                unreferenced.append(block)
            refs[block] += 1
        self.num_cached -= len(unreferenced)
        self.num_referenced += len(unreferenced)
        self._indices.fix(*unreferenced)

    def _drop_references(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Drop one reference on each block, or none if any block lacks one; return the unreferenced blocks."""
        refs = self._refs
        emptied = []
        for index, block in enumerate(blocks):
            if not refs[block]:
                for undone in blocks[:index]:
                    refs[undone] += 1
                raise CacheIntegrityError(f"need a reference on block {block} to release, found none left")
            refs[block] -= 1
            if not refs[block]:
                emptied.append(block)
        return emptied

    def _file_all(self, emptied: Sequence[BlockId]) -> None:
        """Count blocks without references as cached; free those from which no state can resume."""
        unregistered = self._tree.unregistered(emptied, self._refs)
        self.num_referenced -= len(emptied)
        self.num_cached += len(emptied) - len(unregistered)
        self._indices.unfix(*emptied)
        for block in unregistered:
            self._indices.release(block)
            self._states.drop(block)
        for block in reversed(self._tree.leaves(emptied)):  # pruning a leaf frees its ancestors too
            if block not in self._slot_by_block:
                self.prune(block)

    def _require_ids(self, blocks: Sequence[BlockId]) -> None:
        # A padding -1 would silently index the last block.
        if blocks and (min(blocks) < 0 or max(blocks) >= self.num_blocks):
            raise ValueError(f"need block ids below {self.num_blocks}, found {min(blocks)} to {max(blocks)}")

    def _require_registrable(self, block: BlockId, key: BlockKey, parent: BlockId | None) -> None:
        self._require_ids([block] if parent is None else [block, parent])
        self._tree.require_addable(block, key, parent)
        if not self._refs[block]:
            raise CacheIntegrityError(f"need a referenced block to register, found block {block} unreferenced")
        if parent is not None and not (parent in self._tree and self._refs[parent]):
            raise CacheIntegrityError(f"need a registered, referenced parent of block {block}, found block {parent}")

    def _check_counts(self) -> None:
        referenced = len(self._refs) - self._refs.count(0)
        cached = sum(1 for block in self._tree.blocks() if not self._refs[block])
        if (referenced, cached) != (self.num_referenced, self.num_cached):
            raise CacheIntegrityError(
                f"referenced {referenced} and cached {cached} != {self.num_referenced} and {self.num_cached} counted"
            )

    def _check_references(self) -> None:
        for block in self._tree.blocks():
            parent = self._tree.parent_of(block)
            if self._refs[block] and parent is not None and not self._refs[parent]:
                raise CacheIntegrityError(f"refs(block {block}) = {self._refs[block]} but refs(parent {parent}) = 0")
            if not self._refs[block] and self.is_end(block) and block not in self._slot_by_block:
                raise CacheIntegrityError(f"block {block} is cached, but nothing after it has a state")
