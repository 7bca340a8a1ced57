"""Prefix trees of KV blocks: each registered block has a key and, as its parent, the preceding block."""

from collections.abc import Container, Sequence

from ..errors import CacheIntegrityError
from .identifiers import BlockId, BlockKey

_UNREGISTERED = BlockKey(0)
_ROOT = BlockId(-1)


class BlockTree:
    """Map between keys and blocks, with the parent, depth and number of children of each block."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[BlockKey, BlockId] = {}
        self._keys = [_UNREGISTERED] * num_blocks
        self._parents = [_ROOT] * num_blocks  # meaningful only for blocks with a depth above 1
        self._num_children = [0] * num_blocks
        self._depths = [0] * num_blocks

    def __contains__(self, block: BlockId) -> bool:
        return self._depths[block] > 0  # faster than reading the key, a big integer that is rarely in the CPU cache

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, key: BlockKey) -> BlockId | None:
        """Return the block that is registered under the key; None if there is none."""
        return self._block_of.get(key)

    def longest_match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Return the blocks of the leading keys, up to the first key without a registered block."""
        find = self._block_of.get
        matched = []
        for key in keys:
            block = find(key)
            if block is None:
                break
            matched.append(block)
        return matched

    def key_of(self, block: BlockId) -> BlockKey | None:
        """Return the key of a block; None if the block is unregistered."""
        return self._keys[block] or None

    def parent_of(self, block: BlockId) -> BlockId | None:
        """Return the block before this one; None if the block is the first of its sequence or unregistered."""
        return self._parents[block] if self._depths[block] > 1 else None

    def depth(self, block: BlockId) -> int:
        """Return the number of blocks from the root through this one; 0 if the block is unregistered."""
        return self._depths[block]

    def num_children(self, block: BlockId) -> int:
        """Return how many registered blocks have this one as their parent."""
        return self._num_children[block]

    def is_leaf(self, block: BlockId) -> bool:
        """Return whether no registered block has this one as its parent."""
        return not self._num_children[block]

    def tail(self, block: BlockId, refs: Sequence[int], states: Container[BlockId]) -> list[BlockId]:
        """Return a block and its ancestors, stopping before the first that has another child, a reference or a state.

        Args:
            block: First block of the result. If it is unregistered or has a child, the result is empty.
            refs: Reference count of each block.
            states: Blocks that have a state.
        """
        parents, num_children, depth, num_after = self._parents, self._num_children, self._depths[block], 0
        tail: list[BlockId] = []
        while depth and num_children[block] == num_after and not refs[block] and block not in states:
            tail.append(block)
            block = parents[block]
            depth -= 1
            num_after = 1
        return tail

    def unregistered(self, blocks: Sequence[BlockId], refs: Sequence[int]) -> list[BlockId]:
        """Return those of `blocks` that have neither a key nor a reference."""
        depths, found = self._depths, []
        for block in blocks:
            if not depths[block] and not refs[block]:
                found.append(block)
        return found

    def leaves(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Return those of `blocks` that are registered and have no registered child."""
        depths, num_children, found = self._depths, self._num_children, []
        for block in blocks:
            if depths[block] and not num_children[block]:
                found.append(block)
        return found

    def blocks(self) -> list[BlockId]:
        """Return the registered blocks in ascending order."""
        return sorted(self._block_of.values())

    def require_addable(self, block: BlockId, key: BlockKey, parent: BlockId | None) -> None:
        """Raise an error unless the key is positive, the block has no other key, and the key has no other parent."""
        if key <= 0:
            raise ValueError(f"the key of block {block} must be positive, found {key}")
        if block in self and self._keys[block] != key:
            raise CacheIntegrityError(f"block {block} is already registered under another key")
        known = self.find(key)
        if known is not None and self.parent_of(known) != parent:
            found = self.parent_of(known)
            raise CacheIntegrityError(f"block {known} already has parent {found}, so its parent cannot be {parent}")

    def add(self, block: BlockId, key: BlockKey, parent: BlockId | None) -> None:
        """Register a block under an unused key, with a registered parent or as the first block of a sequence."""
        self._block_of[key] = block
        self._keys[block] = key
        self._depths[block] = 1
        if parent is not None:
            self._parents[block] = parent
            self._num_children[parent] += 1
            self._depths[block] += self._depths[parent]

    def remove_tail(self, tail: Sequence[BlockId]) -> BlockId | None:
        """Unregister the blocks that `tail` returned; return the block before them, or None if there is none."""
        block_of, keys, depths, num_children = self._block_of, self._keys, self._depths, self._num_children
        first = tail[-1]
        parent = self._parents[first] if depths[first] > 1 else None
        for block in tail:
            del block_of[keys[block]]
            keys[block] = _UNREGISTERED
            depths[block] = num_children[block] = 0
        if parent is not None:
            num_children[parent] -= 1
        return parent

    def clear(self) -> None:
        """Unregister every block."""
        for block in self._block_of.values():
            self._keys[block] = _UNREGISTERED
            self._num_children[block] = self._depths[block] = 0
        self._block_of.clear()

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless keys, parents, depths and child counts of the blocks are consistent."""
        forward = {block: key for key, block in self._block_of.items()}
        backward = {BlockId(block): key for block, key in enumerate(self._keys) if key}
        registered = {BlockId(block): self._keys[block] for block, depth in enumerate(self._depths) if depth}
        if forward != backward or forward != registered or len(forward) != len(self._block_of):
            raise CacheIntegrityError(
                f"the map from keys to blocks, {self._block_of}, is not the inverse of the map from blocks to keys, "
                f"{backward}"
            )
        num_children = [0] * len(self._keys)
        for block in self._block_of.values():
            parent = self.parent_of(block)
            depth = 1 if parent is None else 1 + self._depths[parent]
            if depth != self._depths[block]:
                raise CacheIntegrityError(f"the depth of block {block} is {self._depths[block]}, but must be {depth}")
            if parent is not None:
                num_children[parent] += 1
                if parent not in self:
                    raise CacheIntegrityError(f"parent {parent} of registered block {block} is not registered")
        if num_children != self._num_children:
            raise CacheIntegrityError(
                f"the child counts of the blocks are {self._num_children}, but must be {num_children}"
            )
