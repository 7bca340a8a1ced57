"""Counter-based random numbers: each is a hash of a seed, a position and a purpose."""

import hashlib
import struct
from enum import IntEnum

_UINT64 = 1 << 64


class DrawPurpose(IntEnum):
    """Purpose of a random number; numbers for different purposes at the same position are independent."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def counter_uniform(seed: int, position: int, purpose: int) -> float:
    """Return a uniform number in [0, 1) that depends only on the arguments, not on the rank or batch.

    Args:
        seed: The request's seed, taken modulo 2**64.
        position: Absolute token position, from 0.
        purpose: A `DrawPurpose`.

    Raises:
        ValueError: If `position` or `purpose` is negative or does not fit in 64 bits.
    """
    for name, value in (("position", position), ("purpose", purpose)):
        if not 0 <= value < _UINT64:
            raise ValueError(f"{name} must be in [0, 2**64), found {value}")
    key = struct.pack("<Q", seed % _UINT64)
    digest = hashlib.blake2b(struct.pack("<QQ", position, purpose), key=key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
