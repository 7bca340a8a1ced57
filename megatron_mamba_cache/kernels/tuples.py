"""Tuples inside kernels."""

import triton
import triton.language as tl  # noqa: F401 (the interpreter wants it in each module of a kernel)


@triton.jit
def appended(values, value):
    """Return the tuple `values` with `value` at its end."""
    return values + (value,)  # noqa: RUF005 (kernels cannot unpack into a tuple)
