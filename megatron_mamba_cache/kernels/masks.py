"""Masks inside kernels."""

import triton
import triton.language as tl


@triton.jit
def only_if(flag, mask):
    """Return `mask` if the scalar `flag` holds, and nothing but False otherwise.

    `mask & flag` says the same to the compiler, but Triton 3.9's interpreter makes integers of it.
    """
    return tl.where(flag, mask, False)
