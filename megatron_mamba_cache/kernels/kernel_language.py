"""Functions for kernels that Triton's language lacks."""

import triton
import triton.language as tl


@triton.jit
def only_if(flag, mask):
    """Return `mask` if the scalar `flag` holds, all False otherwise.

    `mask & flag` compiles to the same, but Triton 3.9's interpreter turns it into integers.
    """
    return tl.where(flag, mask, False)


@triton.jit
def appended(values, value):
    """Return the tuple `values` with `value` at its end."""
    return values + (value,)  # noqa: RUF005 (kernels cannot unpack into a tuple)
