"""Chained keys of KV blocks: a key identifies a block's tokens, all tokens before them, and their salt."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .identifiers import BlockKey

TokenIds = npt.NDArray[np.int64] | Sequence[int]

_DIGEST_BYTES = 32
_TOKEN_BYTES = 4
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """Values, besides the tokens, that must match before a request may reuse another request's cache.

    `epoch` is the number of flushes; `tenant` separates users that must not observe each other's cache hits.
    """

    fingerprint: str
    weights_version: str
    epoch: int
    tenant: str = ""

    def root(self) -> bytes:
        """Return the 32-byte digest at the start of every key chain with this salt."""
        digest = sha256()
        for field in (self.fingerprint, self.weights_version, str(self.epoch), self.tenant):
            text = field.encode()
            digest.update(len(text).to_bytes(8, "little"))  # else ("ab", "c") would equal ("a", "bc")
            digest.update(text)
        return digest.digest()


class KeyChain(Protocol):
    """Keys of the complete blocks of a growing token sequence, in order."""

    keys: list[BlockKey]
    num_tokens: int

    def extend(self, tokens: TokenIds) -> None:
        """Append tokens."""


class BlockKeyChain:
    """Keys of a growing token sequence, one per complete block.

    key(i) = SHA-256(key(i-1) ‖ tokens of block i as little-endian int32), with `root` as key(-1); a key is the whole
    digest as a big-endian integer. The tokens of an incomplete last block are stored until the block is complete.

    Raises:
        ValueError: If `root` is not 32 bytes or `block_size` is not positive.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        if len(root) != _DIGEST_BYTES:
            raise ValueError(f"need a root of {_DIGEST_BYTES} bytes, found {len(root)}; use CacheSalt(...).root()")
        if block_size < 1:
            raise ValueError(f"need a block size of at least 1 token, found {block_size}")
        self._digest = bytes(root)
        self._block_bytes = block_size * _TOKEN_BYTES
        self._tail = bytearray()
        self.num_tokens = 0
        """Tokens so far, including those of the incomplete last block."""
        self.keys: list[BlockKey] = []
        """The keys so far, first block first; callers do not change the list."""

    def extend(self, tokens: TokenIds) -> None:
        """Append tokens and hash the blocks that become complete; raise `ValueError` if a token id exceeds 32 bits."""
        new = _int32_view(tokens)
        self.num_tokens += len(new) // _TOKEN_BYTES
        if len(self._tail) + len(new) < self._block_bytes:
            self._tail += new
            return
        data = memoryview(bytes(self._tail) + new) if self._tail else new
        self._tail = bytearray(data[self._hash_blocks(data) :])

    def _hash_blocks(self, data: memoryview) -> int:
        """Hash the complete blocks in `data`; return how many bytes were hashed."""
        size = self._block_bytes
        num_bytes = len(data) // size * size
        digest = self._digest
        append = self.keys.append
        for start in range(0, num_bytes, size):
            digest = sha256(digest + data[start : start + size]).digest()
            append(BlockKey(int.from_bytes(digest, "big")))
        self._digest = digest
        return num_bytes


def block_keys(root: bytes, tokens: TokenIds, block_size: int) -> list[BlockKey]:
    """Return the keys of the complete blocks of `tokens`."""
    chain = BlockKeyChain(root, block_size)
    chain.extend(tokens)
    return chain.keys


def _int32_view(tokens: TokenIds) -> memoryview:
    """Return the bytes of the tokens as little-endian int32."""
    if isinstance(tokens, np.ndarray):
        return _int32_array(tokens).view(np.uint8).data  # a view: a long prompt is not copied
    try:
        packed = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"need token ids that are 32-bit integers: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed.tobytes())


def _int32_array(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"need a vector of integer token ids, found {tokens.dtype} of shape {tokens.shape}")
    if tokens.size and (tokens.min() < _INT32.min or tokens.max() > _INT32.max):
        raise ValueError(f"need token ids that fit 32 bits, found ids between {tokens.min()} and {tokens.max()}")
    return np.ascontiguousarray(tokens, dtype="<i4")
