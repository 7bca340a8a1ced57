"""Limits of the GPU (copy and GEMM speed), measured in the same run as the results that are compared with them."""

from functools import cache

import torch
from measuring.graph_timing import launch_us, memcpy_us
from torch import Tensor

COPIED_BYTES = 2**31
MATMUL_SIZE = 8192


@cache
def copy_us(num_bytes: int) -> float:
    """Return the time in microseconds of a plain copy that reads and writes `num_bytes` in total."""
    return memcpy_us(_copied_memory(), num_bytes // 2)


@cache
def matmul_tflops() -> float:
    """Return the speed of a large bf16 GEMM in TFLOP/s."""
    left, right = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16().unbind()
    out = torch.empty_like(left)
    num_flops = 2 * MATMUL_SIZE**3
    return num_flops / launch_us([lambda: torch.mm(left, right, out=out)], num_flops / 7e8) / 1e6


def floor_us(num_bytes: int, num_flops: float = 0.0) -> float:
    """Return the time in microseconds to move `num_bytes` or to compute `num_flops` in bf16, whichever is longer."""
    return max(copy_us(num_bytes), num_flops / matmul_tflops() / 1e6 if num_flops else 0.0)


@cache
def _copied_memory() -> Tensor:
    return torch.randint(255, (COPIED_BYTES,), dtype=torch.uint8, device="cuda")
