"""Changes to query and key heads before attention: an RMS norm, then rotary embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of the heads of queries and of keys.

    Args:
        query, key: [dim], contiguous. A channel's factor is its weight plus `offset`, in fp32.
        offset: 1 if the norms are zero-centred.
    """

    query: Tensor
    key: Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotation of the first channels of a head: channel i and channel i + half are a pair.

    Args:
        table: [positions, 2, half], contiguous, the cosines and the sines, in the dtype of queries.
        positions: [at least tokens] int64, contiguous, each in the table.
    """

    table: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """Changes to each query and key head. The norm comes first, and its result is rounded."""

    norms: HeadNorms | None = None
    rotation: Rotation | None = None

    def check(self, key: Tensor) -> None:
        """Raise `ValueError` if they do not fit keys [tokens, kv_heads, dim]."""
        head_dim, norms, rotation = key.shape[2], self.norms, self.rotation
        if norms is not None:
            for weight in (norms.query, norms.key):
                if weight.shape != (head_dim,) or not weight.is_contiguous() or weight.device != key.device:
                    raise ValueError(
                        f"need contiguous weights of norms [{head_dim}] on {key.device}, found {tuple(weight.shape)}, "
                        f"strides {weight.stride()} on {weight.device}"
                    )
        if rotation is not None:
            _check_rotation(rotation, key)


def _check_rotation(rotation: Rotation, key: Tensor) -> None:
    table, positions = rotation.table, rotation.positions
    if table.dim() != 3 or table.shape[1] != 2 or not 2 <= 2 * table.shape[2] <= key.shape[2]:
        raise ValueError(
            f"need a table [positions, 2, half] for at most {key.shape[2]} channels, found {tuple(table.shape)}"
        )
    if table.dtype != key.dtype or table.device != key.device or not table.is_contiguous():
        raise ValueError(
            f"need a contiguous table in {key.dtype} on {key.device}, found strides {table.stride()}, {table.dtype} on "
            f"{table.device}"
        )
    if positions.dtype != torch.int64 or positions.device != key.device or not positions.is_contiguous():
        raise ValueError(
            f"need contiguous int64 positions on {key.device}, found {positions.dtype} on {positions.device}"
        )
    if positions.dim() != 1 or len(positions) < len(key):
        raise ValueError(f"need positions of {len(key)} tokens, found {tuple(positions.shape)}")
