"""Optional changes to query and key heads before attention: an RMS norm, then rotary embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms to apply to each query head and each key head.

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
        positions: [padded tokens] int64, contiguous; indices into the table.
    """

    table: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """Norm, then rotation, to apply to each query and key head; None: skip it. The norm's result is rounded."""

    norms: HeadNorms | None = None
    rotation: Rotation | None = None

    def check(self, key: Tensor) -> None:
        """Raise `ValueError` if weights or table do not match the keys [tokens, kv_heads, dim]."""
        head_dim, norms, rotation = key.shape[2], self.norms, self.rotation
        if norms is not None:
            for weight in (norms.query, norms.key):
                if weight.shape != (head_dim,) or not weight.is_contiguous() or weight.device != key.device:
                    raise ValueError(
                        f"norm weights must be contiguous with shape [{head_dim}] on {key.device}, found shape "
                        f"{tuple(weight.shape)}, strides {weight.stride()} on {weight.device}"
                    )
        if rotation is not None:
            _check_rotation(rotation, key)


def _check_rotation(rotation: Rotation, key: Tensor) -> None:
    table, positions = rotation.table, rotation.positions
    if table.dim() != 3 or table.shape[1] != 2 or not 2 <= 2 * table.shape[2] <= key.shape[2]:
        raise ValueError(
            f"the rotary table must have shape [positions, 2, half] with half between 1 and {key.shape[2] // 2}, "
            f"found {tuple(table.shape)}"
        )
    if table.dtype != key.dtype or table.device != key.device or not table.is_contiguous():
        raise ValueError(
            f"the rotary table must be contiguous {key.dtype} on {key.device}, found strides {table.stride()}, "
            f"{table.dtype} on {table.device}"
        )
    if positions.dtype != torch.int64 or positions.device != key.device or not positions.is_contiguous():
        raise ValueError(
            f"positions must be contiguous int64 on {key.device}, found {positions.dtype} with strides "
            f"{positions.stride()} on {positions.device}"
        )
    if positions.dim() != 1 or len(positions) < len(key):
        raise ValueError(f"positions must have {len(key)} or more entries, found shape {tuple(positions.shape)}")
