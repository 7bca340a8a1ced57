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
    without a reference stays cached as long as a prompt can resume from a state at its end or after it. It is freed
    with the last such state, descendants first.

    Args:
        indices: Index pool for the blocks, or the number of blocks in a separate pool.
        states: Pool of the states for which blocks are kept.
        block_size: Number of tokens per block.

    Raises:
        ValueError: If `indices` is negative or `block_size` is below 1.
    """

    def __init__(self, indices: IndexPool | int, states: SlotPool, *, block_size: int = 1) -> None:
        if (isinstance(indices, int) and indices < 0) or block_size < 1:
            raise ValueError(
                f"num_blocks must be at least 0 and block_size at least 1, found {indices} and {block_size}"
            )
        self._indices = FixedIndexPool(indices) if isinstance(indices, int) else indices
        self._states = states
        self._slot_by_block = states.slot_by_block
        self._block_size = block_size
        self._refs = [0] * self._indices.num_indices
        self._tree = BlockTree(self._indices.num_indices)
        self.num_blocks = self._indices.num_indices
        self.num_referenced = 0
        """Number of blocks with references."""
        self.num_cached = 0
        """Number of registered blocks without references."""
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
        """Return the number of blocks of each kind, keyed by "free", "cached" and "in_use"."""
        return {"free": self.num_free, "cached": self.num_cached, "in_use": self.num_referenced}

    def num_refs(self, block: BlockId) -> int:
        """Return the reference count of the block."""
        return self._refs[block]

    def unreferenced(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Return those of `blocks` that have no reference; `blocks` must be distinct and registered."""
        return [block for block in blocks if not self._refs[block]]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Return blocks with one reference each; evict the states of lowest priority if too few blocks are free.

        Raises:
            CacheCapacityError: If fewer blocks are available; nothing is changed then.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks must not be negative, found {num_blocks}")
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
            raise CacheIntegrityError(f"block {free[0]} is free, so it cannot be acquired")
        self._add_references(blocks)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference on each block; registered blocks that a state can still use stay cached.

        Raises:
            CacheIntegrityError: If a block is listed more often than it has references; nothing is changed then.
        """
        self._require_ids(blocks)
        self._file_all(self._drop_references(blocks))

    def prune(self, block: BlockId) -> int:
        """Free a block and each ancestor without references, children or states; return how many became free."""
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
        """Register a held block under a key; return the block that the caller holds for that key afterwards.

        If another block has the key, the caller's reference moves to that block, and `block` is released. Registering a
        block again under its own key changes nothing.

        Args:
            parent: Block registered under the preceding key, also held by the caller; None for a text's first block.

        Raises:
            ValueError: If the key is not positive.
            CacheIntegrityError: If the block is not held or has another key, or `parent` is not held, not registered or
                not the key's parent.
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
        """Drop all keys and states: cached blocks become free, and held blocks become unregistered."""
        registered = self._tree.blocks()
        self._tree.clear()
        self.num_cached = 0
        for block in registered:
            self._states.drop(block)
            if not self._refs[block]:
                self._indices.release(block)

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` with the violated invariant unless all invariants of the pool hold. O(n)."""
        self._tree.check_integrity()
        self._check_counts()
        self._check_references()

    def _make_room(self, num_blocks: int) -> None:
        """Evict until `num_blocks` blocks are free; raise the same errors as `allocate`."""
        indices = self._indices
        if num_blocks > indices.num_available:
            num_evictable = self.num_available - self.num_free
            raise CacheCapacityError(
                f"{num_blocks} KV blocks are needed, but {self.num_free} are free and {num_evictable} evictable; "
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
        """Drop one reference on each block; return the blocks that now have none. Change nothing on an error."""
        refs = self._refs
        emptied = []
        for index, block in enumerate(blocks):
            if not refs[block]:
                for undone in blocks[:index]:
                    refs[undone] += 1
                raise CacheIntegrityError(f"block {block} has no reference left to release")
            refs[block] -= 1
            if not refs[block]:
                emptied.append(block)
        return emptied

    def _file_all(self, emptied: Sequence[BlockId]) -> None:
        """Mark blocks without references as cached, and free those that no state can use."""
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
            raise ValueError(
                f"block ids must be between 0 and {self.num_blocks - 1}, found {min(blocks)} to {max(blocks)}"
            )

    def _require_registrable(self, block: BlockId, key: BlockKey, parent: BlockId | None) -> None:
        self._require_ids([block] if parent is None else [block, parent])
        self._tree.require_addable(block, key, parent)
        if not self._refs[block]:
            raise CacheIntegrityError(f"block {block} has no reference, so it cannot be registered")
        if parent is not None and not (parent in self._tree and self._refs[parent]):
            raise CacheIntegrityError(f"parent {parent} of block {block} must be registered and referenced")

    def _check_counts(self) -> None:
        referenced = len(self._refs) - self._refs.count(0)
        cached = sum(1 for block in self._tree.blocks() if not self._refs[block])
        if (referenced, cached) != (self.num_referenced, self.num_cached):
            raise CacheIntegrityError(
                f"{referenced} blocks are referenced and {cached} cached, but {self.num_referenced} and "
                f"{self.num_cached} are counted"
            )

    def _check_references(self) -> None:
        for block in self._tree.blocks():
            parent = self._tree.parent_of(block)
            if self._refs[block] and parent is not None and not self._refs[parent]:
                raise CacheIntegrityError(
                    f"block {block} has {self._refs[block]} references, but its parent {parent} has none"
                )
            if not self._refs[block] and self.is_end(block) and block not in self._slot_by_block:
                raise CacheIntegrityError(f"block {block} is cached, but no state depends on it")
