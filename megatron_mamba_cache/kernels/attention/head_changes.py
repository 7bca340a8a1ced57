"""Optional changes to query and key heads before attention: an RMS norm, then rotary embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of query heads and key heads.

    Args:
        query, key: Weights [dim], contiguous; each channel is multiplied by (weight + offset), in fp32.
        offset: 1 if the norms are zero-centered, else 0.
    """

    query: Tensor
    key: Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of the first 2 * half channels of a head, which rotates channels i and i + half as a pair.

    Args:
        table: [positions, 2, half], contiguous: cosines, then sines, in the dtype of the queries.
        positions: [padded tokens] int64, contiguous; each is an index of the table.
    """

    table: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """Changes to each query and key head: first the norm, whose result is rounded, then the rotation."""

    norms: HeadNorms | None = None
    rotation: Rotation | None = None

    def check(self, key: Tensor) -> None:
        """Raise `ValueError` if weights or table do not match the keys [tokens, kv_heads, dim]."""
        head_dim, norms, rotation = key.shape[2], self.norms, self.rotation
        if norms is not None:
            for weight in (norms.query, norms.key):
                if weight.shape != (head_dim,) or not weight.is_contiguous() or weight.device != key.device:
                    raise ValueError(
                        f"need contiguous norm weights of shape [{head_dim}] on {key.device}, found shape "
                        f"{tuple(weight.shape)}, strides {weight.stride()} on {weight.device}"
                    )
        if rotation is not None:
            _check_rotation(rotation, key)


def _check_rotation(rotation: Rotation, key: Tensor) -> None:
    table, positions = rotation.table, rotation.positions
    if table.dim() != 3 or table.shape[1] != 2 or not 2 <= 2 * table.shape[2] <= key.shape[2]:
        raise ValueError(
            f"need a table [positions, 2, half] with 2 * half between 2 and {key.shape[2]}, found {tuple(table.shape)}"
        )
    if table.dtype != key.dtype or table.device != key.device or not table.is_contiguous():
        raise ValueError(
            f"need a contiguous {key.dtype} table on {key.device}, found strides {table.stride()}, {table.dtype} on "
            f"{table.device}"
        )
    if positions.dtype != torch.int64 or positions.device != key.device or not positions.is_contiguous():
        raise ValueError(
            f"need contiguous int64 positions on {key.device}, found {positions.dtype} with strides "
            f"{positions.stride()} on {positions.device}"
        )
    if positions.dim() != 1 or len(positions) < len(key):
        raise ValueError(f"need positions of shape [{len(key)} or more], found {tuple(positions.shape)}")
