"""What the products of a few tokens with their experts have in common.

With so few tokens hardly two choose the same expert, and reading the weights takes all the time. So there are no
tensor cores here, which want tiles, but many small programs: each multiplies a vector with a few rows of weights, all
loads of which are in flight at once. The expert that every token goes to takes part in both products: on Hopper its
first weights are read while tokens are routed, and the second product's while the first still runs.
"""

import torch
import triton
from torch import Tensor

FEW_TOKENS = 4
"""Up to as many tokens take less time so than in the order of experts; see `benchmarks/results/experts.md`."""

_WIDEST = 4096
"""Inputs of a tile at most."""


def tile_width(x: Tensor) -> int:
    """Return the inputs of a tile."""
    return min(_WIDEST, triton.next_power_of_2(x.shape[1]))


def check_few(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    rows_of_token: int,
    shared_weight: Tensor | None,
    shared_x: Tensor | None = None,
) -> None:
    """Raise `ValueError` if shapes, dtypes or strides disagree; see `pair_gemm` and `summed_gemm`.

    Args:
        x: [tokens * rows_of_token, inputs].
        shared_x: What the shared expert's weights multiply; None: x.
    """
    if weight.dim() != 3 or ids.dim() != 2 or x.shape != (ids.shape[0] * rows_of_token, weight.shape[2]):
        raise ValueError(
            "need weight [experts, outputs, inputs], ids [tokens, top_k] and their rows [rows, inputs], found "
            f"{tuple(weight.shape)}, {tuple(ids.shape)} and {tuple(x.shape)}"
        )
    if x.dtype != weight.dtype or ids.dtype != torch.int32 or not x.device == weight.device == ids.device:
        raise ValueError(f"need one dtype and device and int32 ids, found {x.dtype}, {weight.dtype} and {ids.dtype}")
    if not weight.is_contiguous() or not ids.is_contiguous() or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"need contiguous weights, ids and inputs, found strides {weight.stride()} and {x.stride()}")
    if shared_weight is None:
        return
    given = x if shared_x is None else shared_x
    if shared_weight.shape[1:] != given.shape[1:] or len(given) != len(ids) * (
        rows_of_token if shared_x is None else 1
    ):
        raise ValueError(
            f"need weights [outputs, inputs] of the shared expert and inputs of each token, found "
            f"{tuple(shared_weight.shape)} and {tuple(given.shape)}"
        )
    if not shared_weight.dtype == given.dtype == x.dtype or not (
        shared_weight.is_contiguous() and given.is_contiguous()
    ):
        raise ValueError(
            f"need contiguous weights and inputs of the shared expert in one dtype, found {shared_weight.dtype} and "
            f"{given.dtype}, strides {shared_weight.stride()} and {given.stride()}"
        )
