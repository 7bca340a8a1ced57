"""Chained hash keys for KV blocks; each key covers a block's tokens, all tokens before them, and a salt."""

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
    """Values, in addition to the tokens, that must be equal for two requests to share cached blocks.

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
            digest.update(len(text).to_bytes(8, "little"))  # without lengths, ("ab", "c") would equal ("a", "bc")
            digest.update(text)
        return digest.digest()


class KeyChain(Protocol):
    """Interface of a growing token sequence; `keys` has one key for each complete block, in order."""

    keys: list[BlockKey]
    num_tokens: int

    def extend(self, tokens: TokenIds) -> None:
        """Append tokens, and add the keys of the blocks that become complete."""


class BlockKeyChain:
    """`KeyChain` with one SHA-256 key per complete block.

    key(i) = SHA-256(key(i-1) ‖ tokens of block i as little-endian int32), with `root` as key(-1); a key is the whole
    digest as a big-endian integer. Tokens in an incomplete last block are buffered until the block is complete.

    Raises:
        ValueError: If `root` is not 32 bytes or `block_size` is not positive.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        if len(root) != _DIGEST_BYTES:
            raise ValueError(f"root must have {_DIGEST_BYTES} bytes, found {len(root)}; use CacheSalt(...).root()")
        if block_size < 1:
            raise ValueError(f"the block size must be at least 1 token, found {block_size}")
        self._digest = bytes(root)
        self._block_bytes = block_size * _TOKEN_BYTES
        self._tail = bytearray()
        self.num_tokens = 0
        """Number of tokens, including those of the incomplete last block."""
        self.keys: list[BlockKey] = []
        """Keys of the complete blocks, in order; callers must not change the list."""

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
        """Append the keys of the complete blocks in `data`; return the number of bytes hashed."""
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
        raise ValueError(f"token ids must be 32-bit integers: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed.tobytes())


def _int32_array(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a vector of integers, found {tokens.dtype} of shape {tokens.shape}")
    if tokens.size and (tokens.min() < _INT32.min or tokens.max() > _INT32.max):
        raise ValueError(f"token ids must fit in 32 bits, found ids between {tokens.min()} and {tokens.max()}")
    return np.ascontiguousarray(tokens, dtype="<i4")
