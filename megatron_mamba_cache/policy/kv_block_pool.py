"""The KV block pool: references on each block, the key it is found under, and eviction."""

from collections.abc import Callable, Sequence

from ..errors import CacheCapacityError, CacheIntegrityError
from .block_tree import BlockTree
from .eviction import CachedEntry, EvictionHeap, Worth, lru_worth
from .identifiers import BlockId, BlockKey


class KVBlockPool:
    """Blocks 0 to num_blocks - 1, each free, referenced, or cached: registered under a key and unreferenced.

    Registered blocks form trees along their sequences. A request that holds a block also holds its ancestors, so every
    cached block can be evicted, leaves first. Time is logical: one tick for each call that uses blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        worth: Worth = lru_worth,
        on_evict: Callable[[BlockId], object] = lambda _block: None,
        *,
        block_size: int = 1,
    ) -> None:
        """Start with every block free.

        Args:
            on_evict: Called with each block that leaves, registered or not, before it is used again.
            block_size: Tokens a block.

        Raises:
            ValueError: If a size is out of range.
        """
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"need num_blocks >= 0 and block_size >= 1, found {num_blocks} and {block_size}")
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._on_evict = on_evict
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]  # a stack: lowest id on top
        self._refs = [0] * num_blocks
        self._last_used = [(0, 0.0)] * num_blocks  # when, and the floor of worth at that time
        self._num_matches = [0] * num_blocks  # how often the block was the last that a prompt shares
        self._tree = BlockTree(num_blocks)
        self._evictable = EvictionHeap(worth)  # the cached leaves
        self._num_cached = 0
        self._num_evicted = 0
        self._clock = 0

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Registered blocks without references."""
        return self._num_cached

    @property
    def num_referenced(self) -> int:
        """Blocks with references."""
        return self._num_blocks - len(self._free) - self._num_cached

    @property
    def num_available(self) -> int:
        """The most that `allocate` can give now."""
        return len(self._free) + self._num_cached

    @property
    def num_evicted(self) -> int:
        """Blocks evicted to make room since the pool was made; flushed ones do not count."""
        return self._num_evicted

    def count_by_kind(self) -> dict[str, int]:
        """Return how many blocks are free, cached and in use."""
        return {"free": self.num_free, "cached": self.num_cached, "in_use": self.num_referenced}

    def num_refs(self, block: BlockId) -> int:
        """Return how many references are held on the block."""
        return self._refs[block]

    def find(self, key: BlockKey) -> BlockId | None:
        """Return the block registered under the key."""
        return self._tree.find(key)

    def longest_match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Return the blocks of the leading keys that are all registered. Mutates nothing."""
        return self._tree.longest_match(keys)

    def key_of(self, block: BlockId) -> BlockKey | None:
        """Return the key the block is registered under."""
        return self._tree.key_of(block)

    def parent_of(self, block: BlockId) -> BlockId | None:
        """Return the registered block before this one; None for a first or an unregistered block."""
        return self._tree.parent_of(block)

    def num_children(self, block: BlockId) -> int:
        """Return how many registered blocks come right after this one."""
        return self._tree.num_children(block)

    def depth(self, block: BlockId) -> int:
        """Return the number of blocks from the root to this one, itself included; 0 if it is unregistered."""
        return self._tree.depth(block)

    def num_available_beside(self, blocks: Sequence[BlockId]) -> int:
        """Return what `num_available` would be if these blocks were acquired first."""
        return self.num_available - len({block for block in blocks if not self._refs[block]})

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Hand out blocks with one reference each, evicting what is worth least if too few are free.

        Raises:
            CacheCapacityError: If fewer are available; nothing has changed then.
        """
        if num_blocks < 0:
            raise ValueError(f"need a count of blocks, found {num_blocks}")
        if num_blocks > self.num_available:
            raise CacheCapacityError(
                f"need {num_blocks} KV blocks, {self.num_free} free and {self._num_cached} evictable; "
                "raise --inference-dynamic-batching-buffer-size-gb"
            )
        while len(self._free) < num_blocks:
            self._evict_one()
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each block, which then counts as just used; the last block counts as the end of a match.

        Raises:
            CacheIntegrityError: If a block is free; nothing has changed then.
        """
        self._require_ids(blocks)
        for block in blocks:
            if not self._refs[block] and block not in self._tree:
                raise CacheIntegrityError(f"need a referenced or cached block to acquire, found block {block} free")
        now = self._tick()
        for block in blocks:
            self._add_reference(block, now)
        if blocks:
            self._num_matches[blocks[-1]] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference on each block; the blocks count as just used, and registered ones stay findable.

        Raises:
            CacheIntegrityError: If a block has fewer references than it is listed times; nothing has changed then.
        """
        self._require_ids(blocks)
        emptied = self._drop_references(blocks)
        now = self._tick()
        for block in blocks:
            self._last_used[block] = now
        self._file_all(emptied)

    def touch(self, blocks: Sequence[BlockId], time: int | None = None) -> None:
        """Set the last use of the blocks to `time`, by default to now. Later uses count as later than `time`."""
        self._require_ids(blocks)
        now = self._tick() if time is None else (time, self._evictable.floor)
        self._clock = max(self._clock, now[0])
        for block in blocks:
            self._last_used[block] = now
            if block in self._evictable:
                self._evictable.push(block, self._entry(block))

    def register(self, block: BlockId, key: BlockKey, parent: BlockId | None) -> BlockId:
        """Make a held block findable under its key, and return the block that the caller now holds for that key.

        If another block has the key already, the caller's reference moves there: that block is acquired and `block`
        released. Registering a block again under its own key changes nothing.

        Args:
            parent: The block registered under the preceding key, which the caller holds too; None for a first block.

        Raises:
            ValueError: If the key is not positive.
            CacheIntegrityError: If the block is not held, has another key, or the parent is not as described.
        """
        self._require_registrable(block, key, parent)
        now = self._tick()
        known = self._tree.find(key)
        if known is None:
            self._tree.add(block, key, parent)
            self._num_matches[block] = 0
        if known is None or known == block:
            self._last_used[block] = now
            return block
        self._add_reference(known, now)
        self._file_all(self._drop_references([block]))
        return known

    def flush(self) -> None:
        """Forget every key: cached blocks become free, held ones unregistered; `on_evict` is called with each."""
        registered = self._tree.blocks()
        self._tree = BlockTree(self._num_blocks)
        self._evictable.clear()
        self._free += [block for block in registered if not self._refs[block]]
        self._num_cached = 0
        for block in registered:
            self._on_evict(block)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError, with the equation that failed, unless every invariant of the pool holds. O(n)."""
        self._tree.check_integrity()
        self._check_counts()
        self._check_references()

    def _tick(self) -> tuple[int, float]:
        self._clock += 1
        return self._clock, self._evictable.floor

    def _entry(self, block: BlockId) -> CachedEntry:
        time, floor = self._last_used[block]
        num_tokens = self._tree.depth(block) * self._block_size
        return CachedEntry(time, num_tokens, floor, self._block_size, self._num_matches[block])

    def _add_reference(self, block: BlockId, now: tuple[int, float]) -> None:
        if not self._refs[block]:
            self._num_cached -= 1
            self._evictable.discard(block)
        self._refs[block] += 1
        self._last_used[block] = now

    def _drop_references(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Drop one reference on each block, or on none if one lacks it; return the blocks left without references."""
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
        """File blocks without references as free or cached."""
        for block in emptied:
            if block not in self._tree:
                self._free.append(block)
                self._on_evict(block)
                continue
            self._num_cached += 1
            if self._tree.is_leaf(block):
                self._evictable.push(block, self._entry(block))

    def _evict_one(self) -> None:
        block = BlockId(self._evictable.pop())
        parent = self._tree.remove_leaf(block)
        if parent is not None and self._tree.is_leaf(parent) and not self._refs[parent]:
            self._evictable.push(parent, self._entry(parent))
        self._free.append(block)
        self._num_cached -= 1
        self._num_evicted += 1
        self._on_evict(block)

    def _require_ids(self, blocks: Sequence[BlockId]) -> None:
        # A padding -1 would silently index the last block.
        if blocks and (min(blocks) < 0 or max(blocks) >= self._num_blocks):
            raise ValueError(f"need block ids of 0 to {self._num_blocks - 1}, found {min(blocks)} to {max(blocks)}")

    def _require_registrable(self, block: BlockId, key: BlockKey, parent: BlockId | None) -> None:
        self._require_ids([block] if parent is None else [block, parent])
        self._tree.require_addable(block, key, parent)
        if not self._refs[block]:
            raise CacheIntegrityError(f"need a referenced block to register, found block {block} unreferenced")
        if parent is not None and not (parent in self._tree and self._refs[parent]):
            raise CacheIntegrityError(f"need a registered, referenced parent of block {block}, found block {parent}")

    def _check_counts(self) -> None:
        blocks = [BlockId(block) for block in range(self._num_blocks)]
        referenced = sum(1 for block in blocks if self._refs[block])
        cached = sum(1 for block in blocks if not self._refs[block] and block in self._tree)
        if self.num_free + cached + referenced != self._num_blocks or cached != self._num_cached:
            raise CacheIntegrityError(
                f"free {self.num_free} + cached {cached} (counted {self._num_cached}) + referenced {referenced} "
                f"!= {self._num_blocks} blocks"
            )
        wrong = [block for block in self._free if self._refs[block] or block in self._tree]
        if wrong or len(set(self._free)) != self.num_free:
            raise CacheIntegrityError(f"free list != unreferenced, unregistered blocks: {wrong or 'a block twice'}")

    def _check_references(self) -> None:
        leaves = []
        for block in self._tree.blocks():
            parent = self._tree.parent_of(block)
            if self._refs[block] and parent is not None and not self._refs[parent]:
                raise CacheIntegrityError(f"refs(block {block}) = {self._refs[block]} but refs(parent {parent}) = 0")
            if not self._refs[block] and self._tree.is_leaf(block):
                leaves.append(block)
        if len(leaves) != len(self._evictable) or not all(block in self._evictable for block in leaves):
            raise CacheIntegrityError(f"unreferenced leaves {leaves} != {len(self._evictable)} evictable blocks")
